"""Jobs that save and load pipelines with zero=, on 2 x 2 or 4 x 1 ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from pipesched import Distributed, Numerics, Pipeline, schedules
from pipesched.saving import writing
from tests.support.jobs.saving import error_of
from tests.support.jobs.zero import MICROBATCHES, Case, batch, made, momentum, plain
from tests.support.places import even_boundaries


def pipeline(group: Any, dims: tuple[int, int], case: Case, **options: Any) -> tuple[Pipeline, int]:
    """Return the pipeline of a case, and the number of this process's replica.

    The boundaries are fixed, because the cut determines the name of a tied weight.
    """
    model = case.model()
    num_layers = len(list(model.children()))
    num_stages = dims[1] * schedules.get(case.schedule).chunks_per_rank
    return made(
        group,
        dims,
        model,
        schedule=case.schedule,
        boundaries=even_boundaries(num_layers, num_stages),
        optimizer=case.optimizer,
        distributed=Distributed(zero=case.zero, timeout=20),
        numerics=Numerics(clip_grad_norm=0.05 if case.clips else None),
        **options,
    )


def one_process(model: nn.Module, optimizer: Any) -> Pipeline:
    """Return a pipeline of two ranks in this process."""
    return Pipeline(
        model,
        batch(0)[0][:2],
        loss_fn=nn.CrossEntropyLoss(),
        devices=["cpu"] * 2,
        num_microbatches=MICROBATCHES,
        schedule="1f1b",
        optimizer=optimizer,
    )


def train(pipe: Pipeline, replica: int, num_replicas: int, steps: range) -> list[Tensor]:
    """Train these steps, and return the losses."""
    losses = []
    for step in steps:
        x, y = (rows.chunk(num_replicas)[replica] for rows in batch(step))
        losses.append(pipe.step(x, target=y).clone())
    return losses


def states(pipe: Pipeline, group: Any) -> dict[str, Any]:
    """Return the optimizer state and learning rate of each parameter of all ranks. Collective. Only for zero=0."""
    names = {parameter: name for name, parameter in pipe.named_parameters()}
    found = {}
    for optimizer in pipe.optimizers.values():
        for options in optimizer.param_groups:
            for parameter in options["params"]:
                values = optimizer.state[parameter]
                found[names[parameter]] = {**values, "lr": options["lr"]}
    return {name: value for own in everywhere(found, group) for name, value in own.items()}


def everywhere(value: Any, group: Any) -> list[Any]:
    """Gather a value from all ranks. Returns copies."""
    found: list[Any] = [None] * group.size()
    distributed.all_gather_object(found, value, group=group)
    return found


def save_and_load(group: Any, dims: tuple[int, int], before: Case, after: Case, folder: str) -> None:
    """Save a run with zero=, and continue it with zero=0 and with another zero=.

    Checks that losses, weights and optimizer states are bit-identical to those of a run with zero=0.
    """
    plain_run, replica = pipeline(group, dims, before._replace(zero=0))
    with plain_run:
        train(plain_run, replica, dims[0], range(2))
        weights = {name: tensor.clone() for name, tensor in plain_run.full_state_dict().items()}
        due = states(plain_run, group)
        losses = train(plain_run, replica, dims[0], range(2, 4))
    saved, _ = pipeline(group, dims, before)
    with saved:
        train(saved, replica, dims[0], range(2))
        saved.save(folder, asynchronous=True)
        gathered = everywhere(saved.training_state(), group)
        assert_same(train(saved, replica, dims[0], range(2, 4)), losses)
    whole, _ = pipeline(group, dims, before._replace(zero=0))
    with whole:
        for load in (lambda: whole.load(folder), lambda: whole.load_training_state(gathered)):
            assert load().step == 2
            assert_same(whole.full_state_dict(), weights)
            assert_same(states(whole, group), due)
            assert_same(train(whole, replica, dims[0], range(2, 4)), losses)
    other, _ = pipeline(group, dims, after)
    with other:
        for load in (lambda: other.load(folder), lambda: other.load_training_state(gathered)):
            assert load().step == 2
            assert_same(train(other, replica, dims[0], range(2, 4)), losses)


def assert_same(own: Any, due: Any) -> None:
    """Check that two nested values are equal, bit for bit."""
    if isinstance(due, Tensor):
        assert own.dtype == due.dtype
        assert torch.equal(own, due)
    elif isinstance(due, dict):
        assert own.keys() == due.keys()
        for name in due:
            assert_same(own[name], due[name])
    elif isinstance(due, list):
        for pair in zip(own, due, strict=True):
            assert_same(*pair)
    else:
        assert own == due


def save(group: Any, dims: tuple[int, int], case: Case, folder: str) -> dict[str, int]:
    """Train and save. Return the number of rows of each divided state that this rank holds."""
    pipe, replica = pipeline(group, dims, case)
    with pipe:
        train(pipe, replica, dims[0], range(1))
        pipe.save(folder)
        state = pipe.training_state()
        return {key: len(tensor) for key, tensor in state["tensors"].items() if state["entries"][key].get("chunks")}


def load_step(group: Any, dims: tuple[int, int], case: Case, folder: str) -> int:
    pipe, _ = pipeline(group, dims, case)
    with pipe:
        return pipe.load(folder).step


def refusals(group: Any, folder: str) -> dict[str, str]:
    """Return the errors of saves that must fail, and of loading a state in which a part is missing or occurs twice.

    Checks that the pipeline can still train, save and load.
    """
    rank = group.rank()
    pipe, replica = pipeline(group, (2, 2), Case(2, plain, "1f1b", momentum))
    with pipe:
        train(pipe, replica, 2, range(1))
        pipe.save(folder)
        (optimizer,) = pipe.optimizers.values()
        local = next(one for one in optimizer.param_groups[0]["params"] if one.dim() == 2)
        state = optimizer.state[local]
        found = {}
        state["count"] = replica
        found["scalar"] = error_of(pipe.training_state)
        state["count"] = torch.zeros(3)
        found["shape"] = error_of(lambda: pipe.save(folder))
        del state["count"]
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate + replica
        found["options"] = error_of(lambda: pipe.save(folder))
        optimizer.param_groups[0]["lr"] = rate
        gathered = everywhere(pipe.training_state(), group)
        found["missing"] = error_of(lambda: pipe.load_training_state(gathered[:3]))
        found["twice"] = error_of(lambda: pipe.load_training_state([*gathered, gathered[3]]))
        write = writing.write_tensors
        writing.write_tensors = _full if rank == 3 else write
        found["full"] = error_of(lambda: pipe.save(folder))
        pipe.save(folder, asynchronous=True)
        found["full, asynchronous"] = error_of(lambda: pipe.save(folder))
        writing.write_tensors = write
        train(pipe, replica, 2, range(1, 2))
        assert pipe.load(folder).step == 1
        train(pipe, replica, 2, range(1, 2))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        found["group"] = error_of(lambda: pipe.save(folder))
        return found


def _full(*args: Any) -> Any:
    raise OSError(28, "No space left on device", str(args[0]))


def dying_writer(group: Any, folder: str) -> str:
    """Return the error of a save during which rank 3 (replica 1) dies while it writes its rows."""

    def fatal(*args: Any) -> Any:
        Path(args[0]).write_bytes(b"half of a file")
        os._exit(1)

    pipe, replica = pipeline(group, (2, 2), Case(1, plain, "1f1b", momentum))
    train(pipe, replica, 2, range(1))
    pipe.save(folder)
    train(pipe, replica, 2, range(1, 2))
    if group.rank() == 3:
        writing.write_tensors = fatal
    return error_of(lambda: pipe.save(folder))
