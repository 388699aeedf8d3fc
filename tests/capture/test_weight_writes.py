"""Weights that a forward changes: limits of a layer's own weights hold; everything else is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.testing import reference_step

ROWS, TARGET = torch.randn(8, 8), torch.randn(8, 8)


class Momentum(nn.Module):
    """Moves a slow encoder towards the trained one in the forward, as in MoCo."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.fast = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.slow = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                if self.how == "lerp":
                    own.lerp_(other, 0.01)
                elif self.how == "data":
                    own.data = own.data * 0.99 + other.data * 0.01
                else:
                    own.data.mul_(0.99).add_(other.data, alpha=0.01)
        a, b = x, x
        for one, two in zip(self.fast, self.slow, strict=True):
            a, b = one(a).tanh(), two(b).tanh()
        return a - b.detach()


class Decays(nn.Linear):
    """Makes its own weight smaller in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


class Limits(nn.Linear):
    """Keeps its own weight small."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class LimitsInPlace(nn.Linear):
    """Keeps its own weight small, in a way that autograd sees."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Shares(nn.Module):
    """Two layers with one weight, of which the first limits it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Limits(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()))


def in_a_row(kind: type[nn.Linear]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.Tanh(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda: Momentum("lerp"), "slow.0.weight"),
        (lambda: Momentum("data"), "slow.0.weight"),
        (lambda: Momentum("alias"), "slow.0.weight"),
        (lambda: in_a_row(Decays), "1.weight"),
        (lambda: in_a_row(LimitsInPlace), "1.weight"),
        (Shares, "first.weight"),
    ],
    ids=["lerp", "data replaced", "alias of data", "decay in a layer", "limit in place", "tied weight"],
)
@pytest.mark.filterwarnings("ignore:building a pipeline must leave the weights unchanged")
def test_weights_that_a_forward_changes_for_other_calls_are_refused(make: Callable[[], nn.Module], weight: str) -> None:
    with pytest.raises(GraphError, match=rf"writes to '{weight}'.*change weights after the step"):
        Pipeline(make(), ROWS[:2], loss_fn=functional.mse_loss, devices=["cpu"] * 3, schedule="1f1b")


@pytest.mark.filterwarnings("ignore:building a pipeline must leave the weights unchanged")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_layer_that_limits_its_own_weights_is_right(schedule: str) -> None:
    torch.manual_seed(0)
    model, plain = in_a_row(Limits), in_a_row(Limits)
    plain.load_state_dict(model.state_dict())
    options = {"loss_fn": functional.mse_loss, "num_microbatches": 4}
    with Pipeline(model, ROWS[:2], devices=["cpu"] * 2, schedule=schedule, **options) as pipe:
        loss = pipe.step(ROWS, target=TARGET)
    assert torch.equal(loss, reference_step(plain, ROWS, target=TARGET, **options))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
