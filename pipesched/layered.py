"""Layered: a model as layers in a row, whatever its code: what is measured and cut, and what its stages run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import networkx as nx
import torch
from torch import nn

from pipesched.arguments import as_call
from pipesched.body import Body, Chain
from pipesched.capture import record
from pipesched.captured import Captured, Cut
from pipesched.errors import ModelTypeError
from pipesched.flow import flow_of, row_of, with_costs
from pipesched.graph import check_hooks, is_in_a_row, layers_of
from pipesched.profiler import LayerCosts, measure_layers
from pipesched.program import Program
from pipesched.ties import Ties, Use
from pipesched.untouched import untouched

__all__ = ["Layered", "graph_of", "as_model", "layered", "stages_of"]


class Layered(Protocol):
    """A model as layers."""

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Those with which a stage may begin, by name, in the order in which they run."""

    def check(self, program: Program) -> None:
        """Raise ScheduleError for what its stages cannot do."""

    def uses(self, cut: Cut, ranks: Sequence[int]) -> list[Use]:
        """The calls of layers, where several may share parameters. ranks: of the stages."""

    def measure(self, device: torch.device, intra_op_threads: int) -> dict[str, LayerCosts]:
        """What each layer costs."""

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        """The layers as a graph, with what was measured of them, or nothing; see ``graph_of``."""

    def edges(self, cut: Cut) -> list[tuple[int, int]]:
        """Which stage gives to which."""

    def bodies(self, cut: Cut, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        """What the stages run."""


def as_model(model: Any) -> Any:
    """A list of modules as a chain: each takes what the one before gives. Any other model is what it is.

    Raises ModelTypeError for a list of what are no modules.
    """
    if not isinstance(model, list | tuple | nn.ModuleList):
        return model
    for part in model:
        if not isinstance(part, nn.Module):
            raise ModelTypeError(
                f"the model is an nn.Module, or a list of them; got {type(part).__name__} in a list; leave it out, or "
                f"make a module of it"
            )
    return nn.Sequential(*model)


def stages_of(model: Any, layers: Sequence[str], num_stages: int) -> list[str] | None:
    """The first layers of the modules of a list, but for the first one's, where there are as many as stages."""
    if not isinstance(model, list | tuple | nn.ModuleList) or len(model) != num_stages:
        return None
    firsts = [next((name for name in layers if f"{name}.".startswith(f"{part}.")), "") for part in range(len(model))]
    return firsts[1:] if all(firsts) else None


def layered(model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> Layered:
    """Layers in a row as they are; any other module by what its forward does with the sample.

    Raises GraphError for a module that cannot be cut.
    """
    check_hooks(model)
    if isinstance(model, nn.Sequential) and is_in_a_row(model):
        return InARow(model, sample)
    return Captured(model, sample)


def graph_of(model: nn.Module, sample: Any, *, measured: bool = True, device: Any = "cpu") -> "nx.DiGraph[str]":
    """The layers of a model as a graph, as they are cut into stages.

    sample: one micro-batch, as for ``Pipeline``. Nodes are layers with which a stage may begin, under their names and
    in the order of their calls: a layer's second call is ``name#2``; what runs between layers belongs to one of them.
    Nodes have ``parameters`` and ``buffers`` (their names in the model; a tied one is in several nodes),
    ``num_parameters``, ``parameter_bytes``, and ``output_bytes`` (what later layers use, and the model's output). An
    edge leads from a layer to one that uses what it gives: ``bytes``, and ``tensors``, the bytes of each by a name: a
    tensor that several layers use has one name. What every stage computes by itself, such as masks, makes no edge.
    measured: each layer is run several times on ``device``, by one thread: nodes then also have ``forward_s``,
    ``backward_s``, ``input_grad_s``, ``weight_grad_s`` and ``activation_bytes`` (held from forward to backward).
    `pipesched.partition` cuts such a graph. The model is left as it was. Raises GraphError, ModelTypeError.
    """
    known = layered(as_model(model), as_call(sample))
    return known.graph(known.measure(torch.device(device), 1) if measured else {})


class InARow:
    """An nn.Sequential whose layers share nothing."""

    def __init__(self, model: nn.Sequential, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.layers = layers_of(model)
        self._model, self._sample = model, sample

    def check(self, program: Program) -> None:
        """Nothing: its stages can do everything."""

    def uses(self, cut: Cut, ranks: Sequence[int]) -> list[Use]:
        """None is shared."""
        return []

    def measure(self, device: torch.device, intra_op_threads: int) -> dict[str, LayerCosts]:
        return measure_layers(self.layers, self._sample, device, intra_op_threads)

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        if costs:
            return with_costs(row_of(self._model, self.layers, costs), costs)
        with untouched(self._model, self._model.training), torch.no_grad():
            capture = record(self._model, self.layers, *self._sample)
        return flow_of(self._model, capture, {call.layer: call.index for call in capture.layer_calls})

    def edges(self, cut: Cut) -> list[tuple[int, int]]:
        return list(pairwise(range(len(cut))))

    def bodies(self, cut: Cut, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        return [Chain({name: self.layers[name] for name in names}, watched=True) for names in cut]
