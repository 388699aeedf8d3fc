"""Buffers that forwards write and backwards read: gradients equal the reference loop's bits in every schedule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Numerics, Pipeline
from pipesched.errors import ExecutionError
from pipesched.testing import reference_step
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, Blocks, InBlocks, check, made, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = [pytest.mark.usefixtures("every_product_deferred"), pytest.mark.timeout(120)]

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


class Scaling(nn.Module):
    """Divides by the largest recent number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.register_buffer("amax", torch.ones(8))

    def see(self, x: Tensor) -> None:
        self.amax.mul_(0.9).add_(x.detach().abs().amax(0), alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.see(x)
        return self.linear(x) * self.gain / self.amax


class Uncounted(Scaling):
    """Writes through .data, which autograd does not notice."""

    def see(self, x: Tensor) -> None:
        self.amax.data.mul_(0.9).add_(x.detach().abs().amax(0), alpha=0.1)


class Divided(torch.autograd.Function):
    """x divided by the module's buffer, which the backward reads again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x / module.amax

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.module.amax, None


class Reads(Scaling):
    """A Function whose backward reads the buffer from the module."""

    def forward(self, x: Tensor) -> Tensor:
        self.see(x)
        return Divided.apply(self.linear(x) * self.gain, self)


class Replaces(Reads):
    """Its forward replaces the buffer by a new tensor."""

    def see(self, x: Tensor) -> None:
        self.amax = self.amax * 0.9 + x.detach().abs().amax(0) * 0.1


class Hooks(Scaling):
    """A hook on a gradient reads the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.see(x)
        y = self.linear(x) * self.gain
        if y.requires_grad:
            y.register_hook(lambda grad: grad / self.amax)
        return y


class Between(Blocks):
    """The model's own buffer is used between two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.ones(8))

    def after(self, number: int, x: Tensor) -> Tensor:
        if number != 2:
            return x
        self.amax.mul_(0.9).add_(x.detach().abs().amax(0), alpha=0.1)
        return x / self.amax


class Twice(nn.Module):
    """One layer called twice; its first backward reads the buffer written by its second forward, as in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), Uncounted(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(self.first(x))))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "scaling": lambda: InBlocks(Scaling),
    "by .data": lambda: InBlocks(Uncounted),
    "a Function reads": lambda: InBlocks(Reads),
    "a Function reads what is replaced": lambda: InBlocks(Replaces),
    "a hook reads": lambda: InBlocks(Hooks),
    "between layers": Between,
    "twice": Twice,
    "in a row": lambda: nn.Sequential(Scaling(), Uncounted(), Reads(), Scaling()),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_the_loops_however_many_are_in_flight(name: str) -> None:
    stages = 2 if name == "twice" else 3
    check(KINDS[name], FLOATS, stages=stages, schedules=SCHEDULES)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("name", KINDS)
def test_buffers_are_the_loops_if_stages_are_recomputed(name: str, checkpoint: Any) -> None:
    stages = 2 if name == "twice" else 3
    check(KINDS[name], FLOATS, stages=stages, schedules=("1f1b",), checkpoint=checkpoint)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Scaling, Uncounted, Reads, Replaces])
def test_buffers_are_the_loops_if_layers_are_recomputed_or_offloaded(kind: type[nn.Module]) -> None:
    again = {"blocks.0": "recompute", "blocks.2": "recompute-cheap", "blocks.3": "offload"}
    check(lambda: InBlocks(kind), FLOATS, stages=2, boundaries=["blocks.2"], checkpoint=again)  # type: ignore[arg-type]


def test_buffers_are_the_loops_after_a_forward_that_the_caller_differentiates() -> None:
    own, plain = made(KINDS["a Function reads"]), made(KINDS["a Function reads"])
    reference_step(plain, FLOATS, target=FLOATS, loss_fn=square, num_microbatches=4, seed=5)
    with Pipeline(own, FLOATS[:2], devices=["cpu"] * 2, schedule="gpipe", num_microbatches=4, seed=5) as pipe:
        square(pipe(FLOATS), FLOATS).backward()
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert all(map(torch.equal, own.buffers(), plain.buffers()))


class ScaledLoss(Scaling):
    """A loss with a running statistic."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        self.see(output)
        return ((output - target) / self.amax).pow(2).mean()


def test_buffers_of_a_loss_module_are_the_loops() -> None:
    options: dict[str, Any] = {"num_microbatches": 4, "seed": 5}
    own, plain = made(Blocks), made(Blocks)
    own_loss, plain_loss = made(ScaledLoss), made(ScaledLoss)
    due = reference_step(plain, FLOATS, target=FLOATS, loss_fn=plain_loss, loss_reduction="mean", **options)
    options["numerics"] = Numerics(loss_reduction="mean")
    with Pipeline(own, FLOATS[:2], devices=["cpu"] * 2, schedule="gpipe", loss_fn=own_loss, **options) as pipe:
        assert torch.equal(pipe.step(FLOATS, target=FLOATS), due)
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(own_loss.amax, plain_loss.amax)


class Written(torch.autograd.Function):
    """Its backward counts in the same buffer as its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x / module.amax

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.module.amax.add_(1.0)
        return grad / ctx.module.amax, None


class WritesBoth(Scaling):
    def forward(self, x: Tensor) -> Tensor:
        self.see(x)
        return Written.apply(self.linear(x) * self.gain, self)


def test_a_buffer_that_both_write_to_is_refused_by_its_name() -> None:
    with (
        Pipeline(made(lambda: InBlocks(WritesBoth)), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square) as pipe,
        pytest.raises(ExecutionError, match=r"both write to buffer 'amax' of layer 'blocks\.\d'; make the"),
    ):
        pipe.step(FLOATS, target=FLOATS)
