"""Layered: a model as layers in a row, whatever its code: what is measured and cut, and what its stages run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from pipesched.body import Body, Chain
from pipesched.captured import Captured, Cut
from pipesched.errors import ModelTypeError
from pipesched.graph import check_hooks, is_in_a_row, layers_of
from pipesched.profiler import LayerCosts, measure_layers
from pipesched.program import Program
from pipesched.ties import Ties, Use

__all__ = ["Layered", "layered"]


class Layered(Protocol):
    """A model as layers."""

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Those with which a stage may begin, by name, in the order in which they run."""

    def check(self, program: Program, *, updates: bool) -> None:
        """Raise ScheduleError for what its stages cannot do, so far. updates: the pipeline has optimizers."""

    def uses(self, cut: Cut, ranks: Sequence[int]) -> list[Use]:
        """The calls of layers, where several may share parameters. ranks: of the stages."""

    def measure(self, device: torch.device, intra_op_threads: int) -> dict[str, LayerCosts]:
        """What each layer costs."""

    def edges(self, cut: Cut) -> list[tuple[int, int]]:
        """Which stage gives to which."""

    def bodies(self, cut: Cut, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        """What the stages run."""


def layered(model: Any, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> Layered:
    """Layers in a row as they are; any other module by what its forward does with the sample.

    Raises ModelTypeError for what is no module, GraphError for a module that cannot be cut.
    """
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"the model is an nn.Module; got {type(model).__name__}; pass the module itself")
    check_hooks(model)
    if isinstance(model, nn.Sequential) and is_in_a_row(model):
        return InARow(model, sample)
    return Captured(model, sample)


class InARow:
    """An nn.Sequential whose layers share nothing."""

    def __init__(self, model: nn.Sequential, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.layers = layers_of(model)
        self._sample = sample

    def check(self, program: Program, *, updates: bool) -> None:
        """Nothing: its stages can do everything."""

    def uses(self, cut: Cut, ranks: Sequence[int]) -> list[Use]:
        """None is shared."""
        return []

    def measure(self, device: torch.device, intra_op_threads: int) -> dict[str, LayerCosts]:
        return measure_layers(self.layers, self._sample, device, intra_op_threads)

    def edges(self, cut: Cut) -> list[tuple[int, int]]:
        return list(pairwise(range(len(cut))))

    def bodies(self, cut: Cut, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        return [Chain({name: self.layers[name] for name in names}) for names in cut]
