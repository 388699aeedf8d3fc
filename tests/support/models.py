"""Models and comparisons that several test files share."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline, schedules
from pipesched.runtime.stage import split_backward as backward
from pipesched.testing import reference_step


class Function(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TransformerBlock(nn.Module):
    """A block with causal attention of four heads and dropout; its rows are the tokens of one sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (4, -1)).transpose(0, 1) for part in self.qkv(self.norms[0](x)).chunk(3, 1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))


class Scale(torch.autograd.Function):
    """Compute x * weight. One custom backward returns both gradients, and counts its runs."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        Scale.calls += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Scaled(nn.Module):
    """A layer whose matrix product is inside a custom autograd.Function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.weight)


class ScaledLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output * self.scale, target)


def mixed_model(width: int = 8) -> nn.Sequential:
    """Return twelve layers with two kinds of dropout, in-place ReLU, norms with buffers, and nested children."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(2 * width, 2 * width), nn.LayerNorm(2 * width)),
        nn.Unflatten(1, (2, width)),
        nn.BatchNorm1d(2),
        nn.Dropout(0.1, inplace=True),
        Scaled(width),
        nn.Flatten(),
        nn.AlphaDropout(0.1),
        nn.Linear(2 * width, 4),
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that two states have the same names and the same bits."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def assert_as(pipe: Pipeline, expected: nn.Module) -> None:
    """Check that the gradients and buffers of this process's stages are those of ``expected``, bit for bit."""
    names = {name for name, _ in pipe.named_parameters()}
    mine = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    assert_equal_bits(mine, {name: grad for name, grad in gradients(expected).items() if name in names})
    buffers = dict(expected.named_buffers())
    mine = dict(pipe.named_buffers())
    assert_equal_bits(mine, {name: buffers[name] for name in mine})


def compare_step(
    pipe: Pipeline,
    expected: nn.Module,
    *args: Any,
    target: Any,
    loss_fn: Any = functional.cross_entropy,
    **options: Any,
) -> None:
    """Check that loss, gradients and buffers of one step are bit-identical to those of a plain loop.

    options: keyword arguments of `reference_step`, such as step and seed.
    """
    loss = pipe.step(*args, target=target)
    choices = {"num_microbatches": pipe.num_microbatches, **options}
    assert torch.equal(loss, reference_step(expected, *args, target=target, loss_fn=loss_fn, **choices)), (
        pipe,
        options,
    )
    assert_as(pipe, expected)


@cache
def synchronous_names() -> list[str]:
    """Return the names of the schedules whose programs contain no updates."""
    return [name for name in schedules.names() if not schedules.get(name).program(2, 2).has_updates]


#: The schedules whose results are bit-identical to those of an unpipelined loop: schedules without shared weights and
#: without updates of their own.
EXACT = [name for name in synchronous_names() if schedules.get(name).program(2, 2).exact]

#: One schedule of each kind that a Stage handles differently: whole or split backwards, one or several chunks per rank.
KINDS = ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"]


def shapes(max_stages: int = 4) -> Iterator[tuple[str, int]]:
    """Yield (schedule, number of ranks) for each schedule in `EXACT`, with at most ``2 * max_stages`` stages."""
    for name in EXACT:
        for num_ranks in range(1, max_stages + 1):
            if num_ranks * schedules.get(name).chunks_per_rank <= 2 * max_stages:
                yield name, num_ranks


@pytest.fixture
def every_product_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defer the weight gradients of all matrix products to W, as in a large model, however small the products are."""
    monkeypatch.setattr(backward, "PAYS_FLOPS", 0)
