"""Layered model: any model as a sequence of layers that can be measured, cut into stages, and run."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
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
from pipesched.capture.paths import BatchPaths
from pipesched.capture.recorder import record
from pipesched.capture.stage_body import Body, LayerChain
from pipesched.capture.weight_writes import check_weight_writes
from pipesched.capture.whole_layers import as_whole_layers
from pipesched.checks import shown
from pipesched.errors import GraphError, InputError, ModelTypeError
from pipesched.model.class_state import ClassAttribute, changed_classes, check_class_state, class_state
from pipesched.model.module_tree import check_hooks, check_initialised, is_in_a_row, layers_of
from pipesched.model.stale_weights import check_not_stale
from pipesched.model.state_guard import is_of_user, names_of, unchanged, untouched
from pipesched.model.tensor_places import TensorPlaces, check_made_buffers
from pipesched.model.tied_weights import Ties, Use
from pipesched.partitioning.result import StageLayers
from pipesched.program.program import Program
from pipesched.progress import advance
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.payload import pytree
from pipesched.tensors.tensor_attributes import is_plain
from pipesched.tensors.torch_insides import is_compiled
from pipesched.tensors.tree_structure import tensors_in
from pipesched.units import counted

__all__ = ["LayerError", "LayeredModel", "as_model", "layered", "stages_of"]


class LayerError(Exception):
    """A layer raised the error in ``__cause__``. Callers can ignore a LayerError: a step will raise the same error."""


class LayeredModel(Protocol):
    """A model as a sequence of layers."""

    #: Whether code between layers may take another path for a micro-batch than for the sample.
    may_branch: bool

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """The layers at which a stage may begin, keyed by name, in the order in which they run."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules that the model's code calls, keyed by name."""

    @property
    def written(self) -> Collection[str]:
        """The names of weights and buffers that forwards write to."""

    def written_by(self, cut: StageLayers) -> Sequence[Collection[str]]:
        """Return, for each stage, the names of weights and buffers that the calls of this stage write to."""

    @property
    def recomputed(self) -> Collection[str]:
        """The layers that the model's own code calls inside ``torch.utils.checkpoint``."""

    def examples(self, layers: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Iterate over (layer, (args, kwargs)) of the sample's calls of these layers, in call order."""

    def reached(self, cut: StageLayers, *, frozen: bool = False) -> Sequence[tuple[str, str, int]]:
        """Return the layers that use another layer's parameter without getting it as an argument.

        Args:
            cut: the layers of each stage.
            frozen: whether to include parameters that are not trained. Default: False.

        Returns:
            A list of (layer, parameter, stage of the layer).

        """

    def check(self, program: Program, *, threads: bool) -> None:
        """Raise ScheduleError or GraphError if the model's stages cannot run the program.

        ``threads`` states whether the ranks of the program are threads of one process.
        """

    def find_paths(self, batch: Sequence[Any], first: Key, cut: StageLayers) -> BatchPaths:
        """Return the paths of a batch's micro-batches through the code between layers, in the model's current mode.

        Args:
            batch: the inputs (args, kwargs) of each micro-batch.
            first: the random key of the first micro-batch.
            cut: the layers of each stage.

        Raises:
            GraphError: the stages cannot run the path of a micro-batch.

        """

    def learn_paths(self, found: BatchPaths) -> None:
        """Follow the paths that rank 0 has found and sent. Raises GraphError if this rank finds other paths."""

    def uses(self, cut: StageLayers, ranks: Sequence[int]) -> list[Use]:
        """Return a Use for each call that uses parameters. ``ranks`` holds the rank of each stage.

        The list may be empty if no parameters are shared.
        """

    def calls_of(self, layer: str, *, again: bool) -> list[tuple[str, int]]:
        """Return the calls that run as one layer, each as (module name, number of earlier calls of the module).

        Args:
            layer: name of the layer.
            again: whether each call will be recomputed in its backward.

        Raises:
            GraphError: a call cannot be recomputed.

        """

    def check_sent(self, cut: StageLayers, *, threads: bool) -> None:
        """Raise GraphError if the stages of a cut exchange tensors that cannot be sent.

        ``threads`` states whether the ranks are threads of one process.
        """

    sample: tuple[tuple[Any, ...], dict[str, Any]]

    def passed(self) -> Generator[tuple[str, Any]]:
        """Run the layers on the sample, and yield (layer name, output) for each layer.

        A layer is left out if its output is not passed unchanged to the next layer.

        Raises:
            LayerError: a layer raised an exception.

        """

    @property
    def output_form(self) -> Any:
        """The form of the model's output (see ``form_of``) if the form is known before the first step, else None."""

    def output(self) -> Any:
        """Return the model's output for the sample. The model must not be on the meta device."""

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        """Return the layers as a graph, with their costs if ``costs`` is not empty; see ``graph_of``."""

    def edges(self, cut: StageLayers) -> list[tuple[int, int]]:
        """Return the pairs (sending stage, receiving stage) of stages that exchange values."""

    def bodies(self, cut: StageLayers, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        """Return the body of each stage, which computes the stage's output."""


def as_model(model: Any) -> Any:
    """Turn a list of modules into an nn.Sequential; return any other model unchanged.

    Raises:
        ModelTypeError: an element of the list is not a module.

    """
    if not isinstance(model, list | tuple | nn.ModuleList):
        return model
    for part in model:
        if not isinstance(part, nn.Module):
            raise ModelTypeError(
                f"the model must be an nn.Module or a list of nn.Modules; the list contains an object of type "
                f"{type(part).__name__}; remove the object from the list, or wrap it in a module"
            )
    return nn.Sequential(*model)


def stages_of(model: Any, layers: Sequence[str], num_stages: int) -> list[str] | None:
    """If a model is a list with one module per stage, return the first layer of every stage except stage 0.

    Returns None for other models, and for a list in which some module has no layer.
    """
    if not isinstance(model, list | tuple | nn.ModuleList) or len(model) != num_stages:
        return None
    firsts = [next((name for name in layers if f"{name}.".startswith(f"{part}.")), "") for part in range(len(model))]
    return firsts[1:] if all(firsts) else None


def layered(
    model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], whole_layers: Collection[str] = ()
) -> LayeredModel:
    """Return a model as layers: the modules of a plain nn.Sequential, or the modules that any other forward calls.

    Args:
        model: the user's module.
        sample: the arguments (args, kwargs) of a forward.
        whole_layers: names of modules that are kept whole. Default: none.

    Raises:
        ModelTypeError: the model is not an nn.Module, or is compiled, scripted or wrapped.
        GraphError: the model cannot be cut into stages.
        InputError: the sample does not fit the model's forward.

    """
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"the model must be an nn.Module or a list of nn.Modules; got {shown(model)}; pass the module"
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
    """Raise InputError if the sample does not fit the forward's signature.

    Called only after the forward has failed, because a wrapper may accept more arguments than the forward's signature.
    """
    taken = signature(model.forward)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as unlike:
        given = [counted(len(args), "positional argument")] * bool(args)
        given += [f"{'keyword' if len(kwargs) == 1 else 'keywords'} {', '.join(kwargs)}"] * bool(kwargs)
        raise InputError(
            f"a sample must match the signature of the model's forward, {type(model).__name__}.forward{taken}; the "
            f"sample has {' and '.join(given) or 'no arguments'} ({unlike}); pass a tensor, a tuple of arguments, a "
            f"dict of keywords, or ({{...}},) for an argument that is a dict"
        ) from error


def _check_is_open(model: nn.Module) -> None:
    """Raise ModelTypeError for a model whose forward does not call layers one by one from Python."""
    for form, closed, remedy in (
        ("compiled into one graph", is_compiled(model), "pass the original model, with compile=True"),
        ("scripted or traced", isinstance(model, torch.jit.ScriptModule), "pass the original module"),
        (
            "wrapped for replication",
            isinstance(model, nn.DataParallel | DistributedDataParallel),
            "pass its .module; to use several machines pass mesh=, and to shard or replicate stages pass wrap=",
        ),
    ):
        if closed:
            raise ModelTypeError(
                f"the stages must be able to call the model's layers one by one; this {type(model).__name__} is "
                f"{form}; {remedy}"
            )


class LayersInARow:
    """An nn.Sequential whose layers share no parameters."""

    may_branch = False
    recomputed: Collection[str] = frozenset()

    def __init__(
        self, model: nn.Sequential, sample: tuple[tuple[Any, ...], dict[str, Any]], whole_layers: Collection[str] = ()
    ) -> None:
        self.layers = self.modules = layers_of(model, whole_layers)
        self._model = model
        self.sample = sample
        #: The names of the weights that a forward writes to. Of torch's own layers, only embeddings write to weights.
        self._weights_written: list[str] = []
        #: The layers that set attributes on the tensors that they return.
        self._marking: set[str] = set()
        if any(is_of_user(type(module)) for module in model.modules()):
            self._check_state()

    def check_sample(self, error: TypeError) -> None:
        """Raise InputError if a layer has raised this error because the sample does not fit the first layer."""
        name, first = next(iter(self.layers.items()))
        _check_takes(first, *self.sample, error)
        if not is_of_user(type(first)) and f"layer {name!r} was" in "".join(getattr(error, "__notes__", ())):
            raise InputError(
                f"a sample must fit the model's first layer; layer {name!r} ({type(first).__name__}) refuses the "
                f"sample ({error}); pass a tensor, a tuple of arguments or a dict of keywords"
            ) from error

    def _check_state(self) -> None:
        """Raise GraphError if layers share state through their class, make weights, or make buffers that change."""
        places = TensorPlaces(self._model)

        def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, output in self._each(args, kwargs):
                places.after(name, self.layers[name])
                if any(is_plain(tensor) and vars(tensor) for tensor in tensors_in(output)):
                    self._marking.add(name)

        changed: Sequence[ClassAttribute] = ()
        with untouched(self._model, True) as written, torch.no_grad(), suppress(LayerError):
            before = class_state(self._model)
            forward(*self.sample)
            if places.made:
                check_made_buffers(self._model, places.made, partial(forward, *self.sample))
            _, changed = changed_classes(self._model, before, self.sample, forward)
        check_class_state(self._model, changed, self.layers, list(self.layers))
        weights = set(names_of(self._model, written))
        self._weights_written = [name for name, _ in self._model.named_parameters() if name in weights]

    def check(self, program: Program, *, threads: bool) -> None:
        """Raise GraphError if the layers change their weights in every forward."""
        if self._weights_written:
            check_weight_writes(self._model, True, self.sample, self._weights_written)

    def find_paths(self, batch: Sequence[Any], first: Key, cut: StageLayers) -> BatchPaths:
        return BatchPaths()  # no code runs between the layers of a chain

    def learn_paths(self, found: BatchPaths) -> None:
        """Do nothing, because all micro-batches take the same path."""

    def uses(self, cut: StageLayers, ranks: Sequence[int]) -> list[Use]:
        return []

    def calls_of(self, layer: str, *, again: bool) -> list[tuple[str, int]]:
        return [(layer, 0)]

    def check_sent(self, cut: StageLayers, *, threads: bool) -> None:
        """Raise GraphError if the last layer of a stage sets attributes on the tensor that the stage sends."""
        for stage, names in enumerate(cut[:-1]):
            if names and names[-1] in self._marking:
                raise GraphError(
                    f"stages send tensors without their attributes; layer {names[-1]!r}, the last of stage {stage}, "
                    f"sets an attribute on the tensor that it returns; return the value beside the tensor, or keep "
                    f"the layers together with together="
                )

    output_form = None

    @cached_property
    def written(self) -> Collection[str]:
        found: set[str] = set()
        for mode in (True, False):
            written: list[Tensor] = []
            with suppress(Exception):  # some models run only in one of the modes
                self._output(mode, written)
            found.update(names_of(self._model, written))
        return found

    def written_by(self, cut: StageLayers) -> Sequence[Collection[str]]:
        return [self.written] * len(cut)

    def reached(self, cut: StageLayers, *, frozen: bool = False) -> Sequence[tuple[str, str, int]]:
        """Return an empty list, because the use of parameters is not recorded for an nn.Sequential."""
        return []

    def examples(self, layers: Collection[str]) -> Iterator[tuple[str, Any]]:
        given: Any = self.sample
        found = []
        with suppress(Exception):  # the layers of another rank may have no weights here
            for name, output in self.passed():
                if name in layers:
                    found.append((name, given))
                given = (output,), {}
        yield from found

    def passed(self) -> Generator[tuple[str, Any]]:
        return self._run(self._model.training, [])

    def output(self) -> Any:
        return self._output(self._model.training, [])

    def _output(self, mode: bool, written: list[Tensor]) -> Any:
        output = None
        try:
            for _, given in self._run(mode, written):
                output = given
        except LayerError as error:
            raise (error.__cause__ or error) from None
        return output

    def _run(self, mode: bool, written: list[Tensor]) -> Generator[tuple[str, Any]]:
        """Run the layers in training or evaluation mode, and yield (layer name, output) for each layer.

        At the end, appends the weights and buffers that the layers have changed to ``written``.
        """
        with untouched(self._model, mode) as changed, torch.no_grad():
            yield from self._each(*self.sample)
        written += changed

    def _each(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[tuple[str, Any]]:
        """Run each layer on its own device, and yield (layer name, output).

        Each layer gets copies of its inputs, because the layer may write to them.
        """
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
            advance()
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
        return [LayerChain({name: self.layers[name] for name in names}, watched=True) for names in cut]
