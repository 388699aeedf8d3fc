"""Copies of layers, which two-way schedules run, have the settings of the layers; layers with state are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Pipeline
from pipesched.errors import GraphError

X, Y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)


class Gains(nn.Linear):
    """Multiplies by settings in containers of several kinds."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gains: Any = [1.0]
        self.named: Any = {"gain": 1.0}
        self.limit: Any = 0.1
        self.kind = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.gains[-1] * self.named["gain"]
        return (x if self.limit is None else x.clamp(-self.limit, self.limit)).to(self.kind).float()


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class KeepsLast(nn.Linear):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) + (0 if self.last is None else self.last)
        self.last = made.detach().mean(0)
        return made


class OwnGenerator(nn.Linear):
    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


class Shows(nn.Linear):
    """Keeps its output for pictures, and reads it nowhere."""

    shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.shown = super().forward(x)
        return self.shown


class Tracks(nn.Linear):
    """Records which module runs each call."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__(8, 8)
        self.calls = Shared(calls)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.list.append(id(self))
        return super().forward(x)


class Shared:
    """A list that copies of a module share."""

    def __init__(self, values: list[int]) -> None:
        self.list = values

    def __deepcopy__(self, memo: Any) -> "Shared":
        return self


class Checkpoints(nn.Module):
    """Recomputes a layer by itself."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Tracks(calls), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))
        return made


def pipeline(middle: nn.Module, schedule: str) -> tuple[Pipeline, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8), nn.Linear(8, 8))
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "boundaries": [2]}
    return Pipeline(model, X[:4], devices=["cpu"] * 2, schedule=schedule, **options), model


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_settings_that_change_later_reach_the_copies(schedule: str) -> None:
    middle = Gains()
    pipe, model = pipeline(middle, schedule)
    with pipe:
        for gain in (1.0, 2.0):
            middle.gains.append(gain)
            middle.named["gain"] = middle.named["gain"] + gain
            middle.limit = None if gain > 1 else 0.2
            middle.kind = torch.float64
            due = functional.mse_loss(model(X), Y)
            assert torch.allclose(pipe.step(X, target=Y), due.detach())


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
@pytest.mark.parametrize("kind", [Counts, KeepsLast, OwnGenerator])
def test_layers_with_state_are_refused(kind: type[nn.Linear], schedule: str) -> None:
    with pytest.raises(GraphError, match=rf"runs copies of layers.*layer '1' \({kind.__name__}\) keeps state"):
        pipeline(kind(8, 8), schedule)


@pytest.mark.parametrize("middle", [Shows(8, 8), nn.Dropout(0.5)])
def test_layers_without_state_are_copied(middle: nn.Module) -> None:
    pipe, _ = pipeline(middle, "chimera")
    with pipe:
        assert pipe.step(X, target=Y).isfinite()


def test_a_copy_recomputes_what_it_has_run() -> None:
    """Over a mesh, the layer itself may have old weights."""
    calls: list[int] = []
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "boundaries": ["last"]}
    with Pipeline(Checkpoints(calls), X[:4], devices=["cpu"] * 2, schedule="chimera", **options) as pipe:
        calls.clear()
        pipe.step(X, target=Y)
    assert sorted(calls.count(module) for module in set(calls)) == [4, 4]
