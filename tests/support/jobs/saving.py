"""Jobs that save and load pipelines, over a mesh or in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import PipeschedError
from tests.support.places import Group, is_one_process, pipeline

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)


def layers(seed: int = 0, count: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def piped(group: Group, model: nn.Sequential | None = None, **options: Any) -> Pipeline:
    return pipeline(group, layers() if model is None else model, X[:2], loss_fn=nn.functional.mse_loss, **options)


def error_of(call: Any) -> str:
    """Return the error of a call as text; "" without an error."""
    try:
        call()
    except (PipeschedError, OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load_error(group: Group, path: str) -> str:
    with piped(group) as pipe:
        return error_of(lambda: pipe.load(path))


class Average:
    """An object with a state: ten times the weights of this rank, in place of averages of the weights."""

    def __init__(self, pipe: Pipeline, prefix: str = "") -> None:
        self.weights = {f"{prefix}{name}": weight.detach() * 10 for name, weight in pipe.named_parameters()}
        self.count = 3

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "inner": {"weights": self.weights}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.weights = state["inner"]["weights"]


def save_average(group: Group, path: str) -> None:
    with piped(group) as pipe:
        pipe.save(path, extra={"average": Average(pipe, "module."), "epoch": 4, "seen": torch.arange(3)})


def load_average(group: Group, path: str) -> dict[str, Tensor]:
    """Load the checkpoint of `save_average` under this plan, and return this rank's averages."""
    with piped(group, layers(seed=5)) as pipe:
        average = Average(pipe)
        average.count = 0
        extra = pipe.load(path, extra={"average": average}).extra
        assert extra["epoch"] == 4
        assert extra["seen"].tolist() == [0, 1, 2]
        assert average.count == 3
        assert {*average.weights} == {name for name, _ in pipe.named_parameters()}
        return average.weights


def different_extras(group: Group, path: str) -> list[str]:
    """Return the errors of saves whose arguments differ between ranks. Then make a step and a good save."""
    with piped(group) as pipe:
        rank = group.rank()
        found = [
            error_of(lambda: pipe.save(path, extra={"loader": {"place": [1, rank]}})),
            error_of(lambda: pipe.save(path, extra={"loader": {"noise": torch.ones(2) * rank}})),
            error_of(lambda: pipe.save(path, extra={"mine": 1} if rank else {})),
            error_of(lambda: pipe.save(path, extra={"odd": object()} if rank else {"odd": 1})),
            error_of(lambda: pipe.save(path, asynchronous=rank == 1)),
        ]
        pipe.step(X, target=Y)
        pipe.save(path, extra={"loader": 1})
        return found


def failing_rank(group: Group, path: str, asynchronous: bool) -> list[Any]:
    """Make a save fail on one rank, and then load the previous checkpoint.

    Returns this rank's error, the loaded step, and the names of the files that remain in the folder.
    """
    from pipesched.saving import writing

    with piped(group) as pipe:
        pipe.step(X, target=Y)
        pipe.save(path)
        pipe.step(X, target=Y)
        original = writing.write_tensors

        def full(*args: Any) -> Any:
            raise OSError(28, "No space left on device", str(args[0]))

        writing.write_tensors = full if group.rank() else original
        try:
            error = error_of(lambda: pipe.save(path, asynchronous=asynchronous) or asynchronous or None)
            writing.write_tensors = original
            if asynchronous:
                assert error == ""
                error = error_of(lambda: pipe.load(path))
        finally:
            writing.write_tensors = original
        step = pipe.load(path).step
        left = sorted(one.name.split("-")[0] for one in Path(path).iterdir())
        pipe.step(X, target=Y)
        return [error, step, left]


def loads_misfits(group: Group, path: str) -> list[str]:
    """Return this rank's errors of loading a checkpoint into different models and numbers of micro-batches."""
    found = []
    for model in (layers(count=5), nn.Sequential(*layers()[:3], nn.Linear(4, 4).double())):
        with piped(group, model, num_microbatches=4) as pipe:
            found.append(error_of(lambda pipe=pipe: pipe.load(path)))
    with piped(group, num_microbatches=2) as pipe:
        found.append(error_of(lambda: pipe.load(path)))
    return found


def damaged_part(group: Group, path: str) -> list[str]:
    """Return the error of loading a damaged checkpoint. Checks that the weights have not changed."""
    with piped(group) as pipe:
        before = [parameter.clone() for parameter in pipe.parameters()]
        found = error_of(lambda: pipe.load(path))
        assert all(map(torch.equal, before, pipe.parameters()))
        pipe.step(X, target=Y)
        return [found]


def save_steps(group: Group, path: str, steps: int, **options: Any) -> None:
    with piped(group) as pipe:
        for _ in range(steps):
            pipe.step(X, target=Y)
            pipe.save(path, **options)


def load_step(group: Group, path: str) -> int:
    with piped(group) as pipe:
        return pipe.load(path).step


def unequal_paths(group: Group, path: str) -> list[str]:
    with piped(group) as pipe:
        return [error_of(lambda: pipe.save(f"{path}-{0 if is_one_process(group) else group.rank()}"))]


def save_weights(group: Group, path: str, seed: int) -> None:
    with piped(group, layers(seed)) as pipe:
        pipe.save_weights(path)
