"""Layered model: a model as layers in a row, whatever its code: what is measured and cut, and what its stages run."""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol

import networkx as nx
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesched.capture.captured_model import CapturedModel
from pipesched.capture.layer_graph import flow_of, row_of, with_costs
from pipesched.capture.recorder import record
from pipesched.capture.stage_body import Body, Chain
from pipesched.capture.whole_layers import as_whole_layers
from pipesched.checks import shown
from pipesched.errors import InputError, ModelTypeError
from pipesched.model.class_state import ClassAttribute, changed_classes, check_class_state, class_state
from pipesched.model.module_tree import check_hooks, check_initialised, is_compiled, is_in_a_row, layers_of
from pipesched.model.stale_weights import check_not_stale
from pipesched.model.state_guard import is_of_user, names_of, unchanged, untouched
from pipesched.model.tied_weights import Ties, Use
from pipesched.partitioning.result import StageLayers
from pipesched.program.program import Program
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.tensors.payload import pytree

__all__ = ["LayerError", "LayeredModel", "as_model", "layered", "stages_of"]


class LayerError(Exception):
    """A layer raised: a step says it better."""


class LayeredModel(Protocol):
    """A model as layers."""

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Those with which a stage may begin, by name, in the order in which they run."""

    @property
    def written(self) -> Collection[str]:
        """The names of weights and buffers that forwards write to."""

    def written_by(self, cut: StageLayers) -> Sequence[Collection[str]]:
        """Those of each stage's own calls."""

    def reached(self, cut: StageLayers) -> Sequence[tuple[str, str, int]]:
        """Layers that use another one's parameter without being given it: (layer, parameter, the layer's stage)."""

    def check(self, program: Program) -> None:
        """Raise ScheduleError for what its stages cannot do."""

    def uses(self, cut: StageLayers, ranks: Sequence[int]) -> list[Use]:
        """The calls of layers, where several may share parameters. ranks: of the stages."""

    def calls_of(self, layer: str, *, again: bool) -> list[tuple[str, int]]:
        """The calls of modules that run as a layer, (name, how many of it came before). again: each is to run again by
        itself. Raises GraphError where one cannot.
        """

    sample: tuple[tuple[Any, ...], dict[str, Any]]

    def passed(self) -> Generator[tuple[str, Any]]:
        """What layers give that stages pass on as it is, with the sample: (name, value).

        Runs those layers. Raises LayerError for what one of them raises.
        """

    @property
    def output_form(self) -> Any:
        """Of the model's output, where that is known before it has run: ``form_of``."""

    def output(self) -> Any:
        """What it gives for the sample; of a model with contents."""

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        """The layers as a graph, with what was measured of them, or nothing; see ``graph_of``."""

    def edges(self, cut: StageLayers) -> list[tuple[int, int]]:
        """Which stage gives to which."""

    def bodies(self, cut: StageLayers, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
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


def layered(
    model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], whole_layers: Collection[str] = ()
) -> LayeredModel:
    """Layers in a row as they are; any other module by what its forward does with the sample. whole_layers: modules
    that stay in one piece.

    Raises ModelTypeError for what is no module, GraphError for one that cannot be cut, InputError for a sample that is
    not what its forward takes.
    """
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"the model is an nn.Module, or a list of them; got {shown(model)}; pass the module itself"
        )
    _check_is_open(model)
    check_not_stale(model)
    check_hooks(model)
    check_initialised(model)
    whole = as_whole_layers(model, whole_layers)
    if isinstance(model, nn.Sequential) and is_in_a_row(model):
        return LayersInARow(model, sample, whole)
    try:
        return CapturedModel(model, sample, whole)
    except TypeError as error:
        _check_takes(model, *sample, error)
        raise


def _check_takes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> None:
    """Asked once it did not run: what is around a forward may take more than its signature says."""
    taken = signature(model.forward)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as unlike:
        given = [f"{len(args)} positional"] * bool(args) + [f"keywords {', '.join(kwargs)}"] * bool(kwargs)
        raise InputError(
            f"a sample is what the model's forward takes, {type(model).__name__}.forward{taken}; got "
            f"{' and '.join(given)}: {unlike}; pass a tensor, a tuple of arguments, a dict of keywords, or ({{...}},) "
            f"for an argument that is a dict"
        ) from error


def _check_is_open(model: nn.Module) -> None:
    """Raise ModelTypeError for a model whose layers are not called one by one by code of Python."""
    for what, closed, remedy in (
        ("compiled into one graph", is_compiled(model), "pass the model as it was before, with compile=True"),
        ("scripted or traced", isinstance(model, torch.jit.ScriptModule), "pass the module that it was made of"),
        (
            "wrapped to be replicated",
            isinstance(model, nn.DataParallel | DistributedDataParallel),
            "pass its .module; over several machines use mesh=, and wrap= to shard or replicate stages",
        ),
    ):
        if closed:
            raise ModelTypeError(
                f"stages call the model's layers one by one; this {type(model).__name__} is {what}; {remedy}"
            )


class LayersInARow:
    """An nn.Sequential whose layers share nothing."""

    def __init__(
        self, model: nn.Sequential, sample: tuple[tuple[Any, ...], dict[str, Any]], whole_layers: Collection[str] = ()
    ) -> None:
        self.layers = layers_of(model, whole_layers)
        self._model = model
        self.sample = sample
        if any(is_of_user(type(module)) for module in model.modules()):
            self._check_class_state()

    def _check_class_state(self) -> None:
        """Raise GraphError where layers share state by way of their class."""

        def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for _ in self._each(args, kwargs):
                pass

        changed: Sequence[ClassAttribute] = ()
        with untouched(self._model, True), torch.no_grad(), suppress(LayerError):
            before = class_state(self._model)
            forward(*self.sample)
            _, changed = changed_classes(self._model, before, self.sample, forward)
        check_class_state(self._model, changed, self.layers, list(self.layers))

    def check(self, program: Program) -> None:
        """Nothing: its stages can do everything."""

    def uses(self, cut: StageLayers, ranks: Sequence[int]) -> list[Use]:
        """None is shared."""
        return []

    def calls_of(self, layer: str, *, again: bool) -> list[tuple[str, int]]:
        """Its own."""
        return [(layer, 0)]

    output_form = None

    @cached_property
    def written(self) -> Collection[str]:
        """Found by a forward in each mode."""
        found: set[str] = set()
        for mode in (True, False):
            written: list[Tensor] = []
            with suppress(Exception):  # it runs in the other mode only
                self._output(mode, written)
            found.update(names_of(self._model, written))
        return found

    def written_by(self, cut: StageLayers) -> Sequence[Collection[str]]:
        """No layer writes to another's."""
        return [self.written] * len(cut)

    def reached(self, cut: StageLayers) -> Sequence[tuple[str, str, int]]:
        """Not known of layers in a row."""
        return []

    def passed(self) -> Generator[tuple[str, Any]]:
        """One layer after the other."""
        return self._run(self._model.training, [])

    def output(self) -> Any:
        return self._output(self._model.training, [])

    def _output(self, mode: bool, written: list[Tensor]) -> Any:
        """The last layer's."""
        output = None
        try:
            for _, given in self._run(mode, written):
                output = given
        except LayerError as error:
            raise (error.__cause__ or error) from None
        return output

    def _run(self, mode: bool, written: list[Tensor]) -> Generator[tuple[str, Any]]:
        """Layers may lie on several devices. written: takes the tensors that they write to."""
        with untouched(self._model, mode) as changed, torch.no_grad():
            yield from self._each(*self.sample)
        written += changed

    def _each(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[tuple[str, Any]]:
        """Run the layers on copies of the inputs, which a layer may write to."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), (args, kwargs))
        for name, layer in self.layers.items():
            device = next((own.device for own in (*layer.parameters(), *layer.buffers())), None)
            there = partial(Tensor.to, device=device)
            args, kwargs = unchanged(pytree.tree_map_only(Tensor, there, (args, kwargs)))
            try:
                args = (layer(*args, **kwargs),)
                kwargs = {}
            except Exception as error:
                raise LayerError(name) from error
            yield name, args[0]

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        if costs:
            return with_costs(row_of(self._model, self.layers, costs), costs)
        with untouched(self._model, self._model.training), torch.no_grad():
            capture = record(self._model, self.layers, *self.sample)
        return flow_of(self._model, capture, {call.layer: call.index for call in capture.layer_calls})

    def edges(self, cut: StageLayers) -> list[tuple[int, int]]:
        return list(pairwise(range(len(cut))))

    def bodies(self, cut: StageLayers, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        return [Chain({name: self.layers[name] for name in names}, watched=True) for names in cut]
