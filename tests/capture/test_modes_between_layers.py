"""Layers that a model's own code calls under autocast or in another grad mode: trained like the reference loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline, graph_of
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, check, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = [pytest.mark.usefixtures("every_product_deferred"), pytest.mark.timeout(120)]

HALF = torch.bfloat16


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def through(self, x: Tensor, begin: int = 0, end: int = 5) -> Tensor:
        for line in self.lines[begin:end]:
            x = torch.tanh(line(x))
        return x


class Autocast(Lines):
    """All layers but the last."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            x = self.through(x, 0, 4)
        return self.through(x.float(), 4)


class Decorated(Lines):
    @torch.autocast("cpu", dtype=HALF)
    def forward(self, x: Tensor) -> Tensor:
        return self.through(x).float()


class OnTheDeviceOfTheInput(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=HALF):
            return self.through(x).float()


class OneLayerInFullPrecision(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            x = self.through(x, 0, 2)
            with torch.autocast("cpu", enabled=False):
                x = self.through(x.float(), 2, 3)
            return self.through(x, 3).float()


class AFunctionUnderAutocast(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            x = self.through(x, 0, 2) @ self.weight
        return self.through(x.float(), 2)


class TheSameLayerInBothModes(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            x = self.through(x, 0, 3)
        return self.through(x.float(), 2)


class TheSameLayersTwiceUnderAutocast(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            for _ in range(2):
                for line in self.lines[:3]:
                    x = torch.tanh(line(x))
        return self.through(x.float(), 2)


class FrozenTrunk(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.through(x, 0, 2)
        return self.through(x, 2)


class FrozenTrunkUnderAutocast(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=HALF):
            x = self.through(x, 0, 2)
        return self.through(x.float(), 2)


MODELS = [
    Autocast,
    Decorated,
    OnTheDeviceOfTheInput,
    OneLayerInFullPrecision,
    AFunctionUnderAutocast,
    TheSameLayerInBothModes,
    TheSameLayersTwiceUnderAutocast,
    FrozenTrunk,
    FrozenTrunkUnderAutocast,
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_layers_in_other_modes(kind: type[nn.Module], stages: int) -> None:
    check(kind, FLOATS, stages=stages)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [Decorated, OneLayerInFullPrecision])
def test_layers_in_other_modes_are_recomputed(kind: type[nn.Module]) -> None:
    check(kind, FLOATS, checkpoint="always")


@pytest.mark.parametrize("kind", [OneLayerInFullPrecision, Autocast])
def test_autocast_in_the_model_within_the_callers_autocast(kind: type[nn.Module]) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        check(kind, FLOATS)


def test_layers_are_measured_in_the_modes_in_which_the_code_calls_them() -> None:
    def kept(kind: type[nn.Module]) -> list[int]:
        graph = graph_of(kind(), FLOATS)
        return [graph.nodes[name]["output_bytes"] for name in graph]

    size = FLOATS.nbytes
    assert kept(Autocast) == [size // 2] * 4 + [size]
    nodes = graph_of(FrozenTrunk(), FLOATS).nodes
    assert [nodes[f"lines.{number}"]["backward_s"] for number in range(2)] == [0, 0]


def test_a_schedule_is_searched_for_layers_under_autocast() -> None:
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "schedule": "auto"}
    with Pipeline(Decorated(), FLOATS[:2], devices=["cpu"] * 2, **options) as pipe:
        assert pipe.step(FLOATS, target=torch.zeros(8, 8)).isfinite()


class ScaleInInferenceMode(Lines):
    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x, 0, 2)
        with torch.inference_mode():
            scale = x.abs().max()
        return self.through(x * scale.clone(), 2)


class InferenceOnInputs(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = x.mean(0)
        return self.through(x + shift.clone())


class TrunkInInferenceMode(Lines):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            x = self.through(x, 0, 2)
        return self.through(x.clone(), 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [ScaleInInferenceMode, InferenceOnInputs, TrunkInInferenceMode])
def test_inference_mode_between_layers(kind: type[nn.Module], stages: int) -> None:
    check(kind, FLOATS, stages=stages)
