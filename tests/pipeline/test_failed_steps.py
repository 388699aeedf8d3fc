"""After a failed step, buffers are as before it: running statistics, and buffers that layers and losses change."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.errors import ScheduleError

X, Y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)


class FailsError(ValueError):
    pass


class Fails(nn.Module):
    """Raises in its forward or its backward, a few calls after ``left`` is set."""

    left = 0

    def __init__(self, *, in_backward: bool = False) -> None:
        super().__init__()
        self._in_backward = in_backward

    def _count(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise FailsError("a bad record")

    def forward(self, x: Tensor) -> Tensor:
        if not self._in_backward:
            self._count()
        y = x * 1.0
        if self._in_backward and y.requires_grad:
            y.register_hook(self._count)
        return y


class Moving(nn.Module):
    """Keeps a moving average in a buffer, in place or by assignment, and uses it."""

    average: Tensor

    def __init__(self, *, assigns: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._assigns = assigns
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("constant", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        new = 0.9 * self.average + 0.1 * x.detach().abs().mean()
        if self._assigns:
            self.average = new
        else:
            self.average.copy_(new)
        made: Tensor = self.linear(x) / self.average * self.constant
        return made


class MovingLoss(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        return functional.mse_loss(output, target)


class Between(nn.Module):
    """Its own code changes a buffer between layers."""

    total: Tensor

    def __init__(self, fails: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), fails, nn.Linear(8, 8)])
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.total += x.detach().sum()
        return x


MODELS = {
    "batch norm": lambda fails: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), fails, nn.Linear(8, 8)),
    "buffer": lambda fails: nn.Sequential(Moving(), nn.Linear(8, 8), fails, Moving()),
    "assigned buffer": lambda fails: nn.Sequential(Moving(assigns=True), nn.Linear(8, 8), fails, nn.Linear(8, 8)),
    "code between layers": Between,
}


@pytest.mark.one_in(8)
@pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch at a time")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "gpipe", "checkpoint": "always"}], ids=str)
def test_buffers_are_as_before_a_failed_step(
    name: str, in_backward: bool, first: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    fails = Fails(in_backward=in_backward)
    model, loss_fn = MODELS[name](fails), MovingLoss()
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 4, **options}
    with Pipeline(model, X[:4], loss_fn=loss_fn, **given) as pipe:
        for _ in range(0 if first else 2):
            pipe.step(X, target=Y)
        before = copy.deepcopy({**dict(model.named_buffers()), **dict(loss_fn.named_buffers())})
        fails.left = 3
        with pytest.raises(FailsError):
            pipe.step(X, target=Y)
        after = {**dict(model.named_buffers()), **dict(loss_fn.named_buffers())}
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        pipe.step(X, target=Y)  # the pipeline goes on
        assert int(loss_fn.seen) == (4 if first else 12)


@pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch at a time")
@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
@pytest.mark.parametrize("name", ["batch norm", "buffer", "assigned buffer"])
def test_schedules_with_copies_of_layers_refuse_layers_that_change_buffers(schedule: str, name: str) -> None:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 4, "schedule": schedule}
    model = MODELS[name](nn.Identity())
    with pytest.raises(ScheduleError, match="dualpipe-v"):
        Pipeline(model, X[:4], loss_fn=nn.MSELoss(), **given)
    Pipeline(model, X[:4], loss_fn=nn.MSELoss(), **{**given, "schedule": "dualpipe-v"}).close()


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_schedules_with_copies_of_layers_run_buffers_that_nothing_changes(schedule: str) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = super().forward(x) * self.mask
            return made

    model = nn.Sequential(Masked(), nn.Tanh(), Masked())
    plain = copy.deepcopy(model)
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 4, "schedule": schedule}
    with Pipeline(model, X[:4], loss_fn=nn.MSELoss(), **given) as pipe:
        torch.testing.assert_close(pipe.step(X, target=Y), functional.mse_loss(plain(X), Y).detach())


def test_mini_batch_statistics_include_the_copies() -> None:
    torch.manual_seed(0)
    model = MODELS["batch norm"](nn.Identity())
    plain = copy.deepcopy(model)
    numerics = Numerics(batch_norm="mini-batch")
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 4, "schedule": "chimera", "numerics": numerics}
    with Pipeline(model, X[:4], loss_fn=nn.MSELoss(), **given) as pipe:
        pipe.step(X, target=Y)
    plain(X)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
