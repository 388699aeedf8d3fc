"""Jobs that save and load pipelines with replicas, on 2 x 2 ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Distributed, Pipeline
from pipesched.saving import writing
from pipesched.testing import reference_step
from tests.support.jobs.saving import Average, X, Y, error_of, layers
from tests.support.places import Group, mesh_of

ADAM = {"optimizer": torch.optim.Adam}


def replicated(model: nn.Module | None = None, *, mesh: DeviceMesh | None = None, **options: Any) -> Pipeline:
    """Return a pipeline of two replicas of two ranks, with two micro-batches per replica."""
    choices: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "seed": 5, "boundaries": [2], **options}
    return Pipeline(
        layers() if model is None else model,
        X[:2],
        loss_fn=nn.functional.mse_loss,
        mesh=mesh_of(2, 2) if mesh is None else mesh,
        distributed=Distributed(timeout=20),
        **choices,
    )


def step(pipe: Pipeline) -> None:
    replica = mesh_of(2, 2)["dp"].get_local_rank()
    pipe.step(X.chunk(2)[replica], target=Y.chunk(2)[replica])


def trained(steps: int) -> nn.Sequential:
    """Return the model after this number of steps in a plain loop."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(steps):
        given = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 2, "num_replicas": 2, "seed": 5}
        reference_step(model, X, target=Y, step=number, **given)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_equal(own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert own.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in own.items())


def every_way(group: Group, folder: str) -> list[str]:
    """Save, load and gather in every way, and check the weights. Return the names of a checkpoint's tensor files."""
    path = Path(folder)
    rank = group.rank()
    with replicated(**ADAM) as pipe:
        step(pipe)
        pipe.save(path / "one", extra={"average": Average(pipe), "epoch": 4})
        parts = sorted(file.name for file in next((path / "one").glob("data-*")).iterdir())
        pipe.save(path / "kept", asynchronous=True, keep=2)
        state = pipe.training_state()
        assert bool(state["tensors"]) == (rank < 2)  # replica 1 holds copies of the same tensors
        states: list[Any] = [None] * 4
        distributed.all_gather_object(states, state, group=group)
        step(pipe)
        pipe.save(path / "kept", asynchronous=True, keep=2)
        due = trained(2).state_dict()
        assert_equal(pipe.full_state_dict(), due)
        own = ["0", "1"] if rank % 2 == 0 else ["2", "3"]
        assert {name.split(".")[0] for name in pipe.state_dict()} == {*own}
        trace = pipe.gather_trace()
        assert trace.num_ranks == 2
        assert {span.rank for span in trace.spans} == {0, 1}
        pipe.save_weights(path / "weights")
        pipe.gather_model(rank=3)
        assert (error_of(pipe.model.state_dict) == "") == (rank == 3)
        if rank == 3:
            assert_equal(pipe.model.state_dict(), due)
        pipe.gather_model()
        assert_equal(pipe.model.state_dict(), due)
    with replicated(layers(3), **ADAM) as pipe:
        assert pipe.load(path / "kept").step == 2
        assert_equal(pipe.full_state_dict(), due)
        average = Average(pipe)
        assert pipe.load(path / "one", extra={"average": average}).extra["epoch"] == 4
        assert_equal(average.weights, {name: value * 10 for name, value in pipe.state_dict().items()})
        assert pipe.load_training_state(states).step == 1
        assert_equal(pipe.full_state_dict(), trained(1).state_dict())
        step(pipe)
        assert_equal(pipe.full_state_dict(), due)
    return parts


def transposed(group: Group, path: str) -> list[str]:
    """Save on a mesh with the pipeline as first dimension. Return the names of the checkpoint's tensor files."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pp", "dp"))
    with replicated(mesh=mesh) as pipe:
        pipe.save(path)
        pipe.load(path)
        assert_equal(pipe.full_state_dict(), layers().state_dict())
    return sorted(file.name for file in next(Path(path).glob("data-*")).iterdir())


class Counting(nn.Linear):
    """A layer whose extra state counts its calls."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def different(group: Group, path: str) -> dict[str, str]:
    """Return the errors of saves whose states or arguments differ between replicas. Then make a step and save."""
    rank = group.rank()
    replica = rank // 2
    model = layers()
    model[1] = counting = Counting(4, 4)
    model[3].register_buffer("scale", torch.ones(3))
    with replicated(model) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        found = {
            "extra": error_of(lambda: pipe.save(path, extra={"loader": {"place": replica}})),
            "ranks": error_of(lambda: pipe.save(path, extra={"loader": {"place": rank}})),
            "given": error_of(lambda: pipe.save(path, extra={"loader": 1} if replica else {})),
            "keep": error_of(lambda: pipe.save(path, keep=1 + replica)),
            "path": error_of(lambda: pipe.save(f"{path}-{replica}")),
            "rank": error_of(lambda: pipe.gather_model(rank=4)),
        }
        optimizer.param_groups[0]["lr"] = 0.1 + replica
        found["options"] = error_of(lambda: pipe.save(path, optimizer=optimizer))
        optimizer.param_groups[0]["lr"] = 0.1
        counting.calls = replica
        found["module"] = error_of(pipe.training_state)
        counting.calls = 0
        model[3].scale[1] += replica
        found["buffer"] = error_of(lambda: pipe.save(path))
        model[3].scale[1] -= replica
        with torch.no_grad():
            model[0].weight[0, :2] = torch.tensor([1.0, 2.0] if replica else [2.0, 1.0])
        found["weight"] = error_of(lambda: pipe.save(path))
        with torch.no_grad():
            model[0].weight[0, :2] = 1.0
        step(pipe)
        pipe.save(path, optimizer=optimizer, extra={"loader": 1})
        return found


def failing_writer(group: Group, path: str) -> list[str]:
    """Return the errors of a save and an asynchronous save in which rank 1 cannot write its part."""

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device", str(args[0]))

    with replicated() as pipe:
        pipe.save(path)
        step(pipe)
        original = writing.write_tensors
        writing.write_tensors = full if group.rank() == 1 else original
        try:
            found = [error_of(lambda: pipe.save(path))]
            pipe.save(path, asynchronous=True)
            found.append(error_of(lambda: pipe.save(path)))
        finally:
            writing.write_tensors = original
        assert pipe.load(path).step == 0
        step(pipe)
        return found


def loads_with_other_microbatches(group: Group, path: str) -> str:
    with replicated(num_microbatches=4) as pipe:
        return error_of(lambda: pipe.load(path))


def dying(group: Group, path: str) -> str:
    """Return the error of a save during which rank 3, a rank of replica 1, dies."""

    class Fatal:
        def state_dict(self) -> dict[str, Any]:
            if group.rank() == 3:
                os._exit(1)
            return {}

    pipe = replicated()
    pipe.save(path)
    return error_of(lambda: pipe.save(path, extra={"fatal": Fatal()}))
