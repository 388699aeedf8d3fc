"""Odd models: each trains as the loop does, to the bit, or is an error that says what is wrong with it."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import every_product_deferred, one_thread
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.payload import gather
from pipesched.testing import reference_step

__all__ = ["every_product_deferred", "one_thread"]  # fixtures

pytestmark = pytest.mark.usefixtures("every_product_deferred", "one_thread")

ROWS = 8
FLOATS = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def state(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if value is None else value.clone() for name, value in (*grads.items(), *model.named_buffers())}


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def check(
    make: Callable[[], nn.Module],
    *args: Any,
    stages: int = 3,
    steps: int = 2,
    schedules: Sequence[str] = ("1f1b", "zb-h1"),
    loss_fn: Callable[[Any, Any], Any] | None = square,
) -> None:
    """Train with dropout in each schedule, and compare loss, gradients and buffers; then evaluate as the model does."""
    target = {} if loss_fn is None else {"target": torch.zeros(ROWS, 8)}
    sample = tuple(value[:2] for value in args)
    for schedule in schedules:
        own, plain = made(make), made(make)
        options: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 4, "seed": 5}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of BatchNorm
            pipe = Pipeline(own, sample, devices=["cpu"] * stages, schedule=schedule, **options)
        with pipe:
            for step in range(steps):
                due = reference_step(plain, *args, **target, step=step, **options)
                assert torch.equal(pipe.step(*args, **target), due)
                wanted, got = state(plain), state(own)
                assert wanted.keys() == got.keys()
                for name, value in wanted.items():
                    assert (value is None) == (got[name] is None), name
                    assert value is None or torch.equal(value, got[name]), name
            pipe.eval()
            plain.eval()
            with torch.no_grad():
                due = [plain(*parts) for parts in zip(*(value.chunk(4) for value in args), strict=True)]
                torch.testing.assert_close(pipe.forward(*args), gather(due, [2] * 4))


class MaskedLate(nn.Module):
    """The code asks for the shape of a mask that only the last blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.to(torch.bool)
        if hidden.shape[-1] < x.shape[-1]:
            hidden = torch.cat([hidden, hidden], -1)
        for number, block in enumerate(self.blocks):
            x = block(x) if number < 5 else block(x).masked_fill(hidden, 0.0)
        return x


def test_the_shape_of_what_a_later_stage_uses() -> None:
    check(MaskedLate, FLOATS, (FLOATS > 0).long())


class Remembering(nn.Module):
    """A layer that keeps things as plain attributes, and puts a new tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count, self.seen = nn.Linear(8, 8), 0, []
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(len(x))
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.inner(x - self.mean) * self.count


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_that_remember() -> None:
    model = Remembers()
    Pipeline(model, FLOATS[:2], devices=["cpu"] * 3, loss_fn=square).close()  # captures, and measures
    assert [(block.count, block.seen, block.mean.tolist()) for block in model.blocks] == [(0, [], [0.0] * 8)] * 4
    check(Remembers, FLOATS)


class OnlyTrains(nn.Module):
    """Fails in the mode in which it is not used, as a detector does without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("only in training")
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_runs_in_one_mode() -> None:
    own, plain = made(OnlyTrains), made(OnlyTrains)
    with Pipeline(own, FLOATS[:2], devices=["cpu"] * 3, loss_fn=square, num_microbatches=4, seed=5) as pipe:
        due = reference_step(plain, FLOATS, target=FLOATS, loss_fn=square, num_microbatches=4, seed=5)
        assert torch.equal(pipe.step(FLOATS, target=FLOATS), due)
        pipe.eval()
        with pytest.raises(GraphError, match="captured; with the sample it calls other layers, or fails") as caught:
            pipe.evaluate(FLOATS, target=FLOATS)
        assert "only in training" in str(caught.value.__cause__)
