"""Odd code between layers: it trains like the reference loop, to the bit, or an error says what is wrong."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import GraphError
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, Block, Blocks, check, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = pytest.mark.usefixtures("every_product_deferred")


class Counts(Blocks):
    """Code between layers changes a buffer of the model in place, and uses it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def after(self, number: int, x: Tensor) -> Tensor:
        if number == 1 and self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean if number == 5 else x


class CountsOn(Blocks):
    """Counts by ``+=``, which sets the attribute to the same object, and reads the buffer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def after(self, number: int, x: Tensor) -> Tensor:
        if number in (1, 2) and self.training:
            self.count += 1
        return x * (1 + self.count.clone()) if number in (2, 5) else x


@pytest.mark.parametrize("kind", [Counts, CountsOn])
def test_buffers_between_layers_are_counted_once_where_stages_recompute(kind: type[nn.Module]) -> None:
    check(kind, FLOATS, checkpoint="always", schedules=("1f1b",))


class Lazy(Blocks):
    """Makes a mask late in its first forward."""

    mask: Tensor | None = None

    def after(self, number: int, x: Tensor) -> Tensor:
        if number == 3:
            if self.mask is None:
                self.mask = torch.ones(8, 8).tril()
            x = x @ self.mask
        return x


class Keeps(Blocks):
    """Passes tensors through attributes and lists of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def after(self, number: int, x: Tensor) -> Tensor:
        if number == 0:
            self.history.clear()
            self.last = x
        self.history.append(x)
        return x + self.last + self.history[-1] if number > 2 else x


class Refers(nn.Module):
    """Layers in plain lists, closures and partials; one is called through its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.first = list(self.blocks[:2])
        self.functions = [lambda x, block=block: block(x) * 2 for block in self.blocks[2:4]]
        self.third = partial(self.called, self.blocks[4])

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return block.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        for function in (*self.first, *self.functions, self.third, self.blocks[5]):
            x = function(x)
        return x


class Scripted(nn.Module):
    """Layers of torch.jit."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(torch.jit.script(part) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


class Hooked(Blocks):
    """Hooks on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.register_forward_hook(lambda module, args, output: output * 2)


class Tries(Blocks):
    """Catches the error of a failing call, which must not be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x, x)
            except TypeError:
                x = block(x)
        return x


class Frozen(Blocks):
    """Runs its first layers without gradients; a stage ends among them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x)
        return x


class Tripled(torch.autograd.Function):
    """x * 2 in two calls, with a gradient of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.expand(3, *x.shape).sum(0) - x

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad * 3


class OwnFunctions(Blocks):
    """An autograd.Function after each layer, also at the end."""

    def after(self, number: int, x: Tensor) -> Tensor:
        return Tripled.apply(x)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", [OwnFunctions, Counts, Lazy, Keeps, Refers, Scripted, Hooked, Tries, Frozen])
def test_unusual_containers_train_as_the_loop(kind: type[nn.Module]) -> None:
    check(kind, FLOATS)


class Carries(Blocks):
    """Stores a number that grows with every forward."""

    count = 0

    def after(self, number: int, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_code_between_layers_that_counts_is_an_error() -> None:
    with pytest.raises(
        GraphError, match=r"must not carry state from one forward to the next; Carries sets its .*'count'"
    ):
        Pipeline(Carries(), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square, schedule="1f1b")
