"""Unusual models, and a check that a pipeline trains them with results bit-identical to a plain loop's."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.capture.layered_model import as_model
from pipesched.program.checkpoint_options import CheckpointMode
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.rows import Dim
from pipesched.testing import reference_step

ROWS = 8
FLOATS = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class InBlocks(nn.Module):
    """Four layers of the same kind in a list; each adds its output to its input."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def state(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if value is None else value.clone() for name, value in (*grads.items(), *model.named_buffers())}


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def check(
    make: Callable[[], Any],
    *args: Any,
    stages: int = 3,
    steps: int = 2,
    checkpoint: CheckpointMode = "never",
    boundaries: Sequence[str] | None = None,
    schedules: Sequence[str] = ("1f1b", "zb-h1"),
    loss_fn: Callable[[Any, Any], Any] | None = square,
) -> None:
    """Check that losses, gradients and buffers are bit-identical to a plain loop's, and that evaluations agree."""
    target = {} if loss_fn is None else {"target": torch.zeros(ROWS, 8)}
    sample = tuple(value[:2] for value in args)
    for schedule in schedules:
        own, plain = made(make), made(make)
        options: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 4, "seed": 5}
        planned: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, "boundaries": boundaries}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of BatchNorm
            pipe = Pipeline(own, sample, devices=["cpu"] * stages, **planned, **options)
        with pipe:
            for step in range(steps):
                due = reference_step(plain, *args, **target, step=step, **options)
                assert torch.equal(pipe.step(*args, **target), due)
                wanted, got = state(as_model(plain)), state(as_model(own))
                assert wanted.keys() == got.keys()
                for name, value in wanted.items():
                    assert (value is None) == (got[name] is None), name
                    assert value is None or torch.equal(value, got[name]), name
            pipe.eval()
            plain = as_model(plain).eval()
            with torch.no_grad():
                due = [plain(*parts) for parts in zip(*(value.chunk(4) for value in args), strict=True)]
                torch.testing.assert_close(pipe.forward(*args), OutputRows().joined(due, [2] * 4, Dim()))


class Blocks(nn.Module):
    """Six blocks in a list; subclasses define the code after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def after(self, number: int, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.after(number, block(x))
        return x
