"""Captured model: any model as a sequence of layers in call order, from which stages are built."""

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn

from pipesched.capture.capture import Call, Capture
from pipesched.capture.layer_graph import flow_of, gap, narrowest, unused, with_costs
from pipesched.capture.recording import Recording, recorded
from pipesched.capture.replayed_body import Loose, ReplayedBody
from pipesched.capture.stage_body import Body
from pipesched.capture.stage_parts import Part, cut_at
from pipesched.capture.whole_layers import opened
from pipesched.errors import GraphError, ScheduleError
from pipesched.model.class_state import check_class_state
from pipesched.model.module_tree import installs_recorders
from pipesched.model.tied_weights import Ties, Use
from pipesched.partitioning.result import StageLayers
from pipesched.program.program import Program
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.tensors.payload import has_a_row_each, pytree
from pipesched.tensors.row_split import RowSplit
from pipesched.tensors.rows import Argument, Dim
from pipesched.tensors.tree_structure import tensors_in
from pipesched.units import counted
from pipesched.user_warning import warn

__all__ = ["CapturedModel"]


class CapturedModel:
    """A model recorded once in training mode and once in evaluation mode.

    Args:
        model: the user's module.
        sample: the arguments (args, kwargs) of a forward. A sample of a single row is extended to two identical rows.
        whole_layers: names of modules that are kept whole. Default: none.

    ``layers`` maps names to the layers at which a stage may begin, in call order. The second call of a layer has an
    entry named ``name#2``. ``written`` holds the names of weights and buffers that forwards write to.

    """

    def __init__(
        self, model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], whole_layers: Collection[str] = ()
    ) -> None:
        self.model = model
        self.sample = _two_rows(sample)
        self.recordings: dict[bool, Recording] = {}
        look = partial(self._recorded, model.training)
        try:
            self.modules, own = opened(model, look, whole_layers)
        except Exception:
            if not installs_recorders(model):  # the forward may have failed without these hooks
                raise
            self.modules, own = opened(model, look, whole_layers)
        self.captures = {model.training: own}
        self.missing: Exception | None = None  # the error that the model raises in the other mode, if any
        try:
            other = self._recorded(not model.training, self.modules)
        except Exception as error:  # for example a detector that takes targets only in training
            self.missing = error
        else:
            if [_unit(call) for call in own.layer_calls] == [_unit(call) for call in other.layer_calls]:
                self.captures[not model.training] = other
        for one in self.recordings.values():
            check_class_state(
                model, one.capture.changed_classes, self.modules, [call.layer for call in own.layer_calls]
            )
        self.written = {name for one in self.recordings.values() for name in one.written}
        if weights := [name for name, _ in model.named_parameters() if name in self.written]:
            warn(
                f"building a pipeline must leave the weights unchanged; forwards of {type(model).__name__} write to "
                f"{counted(len(weights), 'weight')}, such as {weights[0]!r}; the old values were restored; ignore "
                f"this warning if the forward is meant to change weights"
            )
        self.calls = {_unit(call): call for call in own.layer_calls}
        self.layers = {
            name: self.modules[call.layer]
            for position, (name, call) in enumerate(self.calls.items())
            if position == 0 or all(gap(capture, position) for capture in self.captures.values())
        }
        self.parts = lru_cache(maxsize=1)(self._parts)

    def _recorded(self, mode: bool, layers: Mapping[str, nn.Module]) -> Capture:
        args, kwargs = self.sample
        self.recordings[mode] = recorded(self.model, layers, mode, args, kwargs)
        return self.recordings[mode].capture

    def check(self, program: Program) -> None:
        """Raise GraphError or ScheduleError if the stages of this captured model cannot run the program."""
        hidden = self.captures[self.model.training].hidden
        if hidden and program.num_weights > len(self.layers):
            (maker, user), *others = hidden
            pairs = counted(len(others), "other pair")
            same = f" (as in {pairs} of layers)" if others else ""
            raise GraphError(
                f"layers that pass a tensor through an attribute or an object must be in one stage; {maker} passes a "
                f"tensor to {user} in this way{same}; the model has only {len(self.layers)} layers that can be "
                f"separated, too few for {program.num_weights} stages; return the tensor from {maker}, and pass it to "
                f"{user} as an argument"
            )
        calls = self.captures[self.model.training].calls
        named = dict(self.model.named_parameters())
        users = Counter(name for call in calls for name in _trained(call) if name in named)
        tied = [name for name, count in users.items() if count > 1]
        if program.has_updates and tied:
            raise ScheduleError(
                f"a model with tied weights must not use an asynchronous schedule, because such a schedule updates "
                f"each stage as soon as the stage's gradients are complete; with schedule {program.name!r}, the "
                f"{users[tied[0]]} calls that share {tied[0]!r} would use different versions of this weight; give "
                f"each layer its own weight, or choose a synchronous schedule"
            )

    def uses(self, cut: StageLayers, ranks: Sequence[int]) -> list[Use]:
        """Return a Use for each call that uses parameters. ``ranks`` holds the rank of each stage."""
        parameters = {name for name, _ in self.model.named_parameters()}
        rank_of = {
            index: rank
            for part, rank in zip(self.parts(cut)[self.model.training], ranks, strict=True)
            for index in part.own
        }
        return [
            Use(call.place, rank_of[call.index], [name for name in _trained(call) if name in parameters])
            for call in self.captures[self.model.training].calls
            if call.index in rank_of
        ]

    def calls_of(self, layer: str, *, again: bool) -> list[tuple[str, int]]:
        """Return the layer calls from this layer to the next possible stage boundary.

        Args:
            layer: name of the layer.
            again: whether each call will be recomputed in its backward.

        Returns:
            A list of (module name, number of earlier calls of the module).

        Raises:
            GraphError: a call cannot be recomputed, because the layer uses tensors that are not among its arguments.

        """
        begin = layer
        found: list[Call] = []
        for name, call in self.calls.items():
            begin = name if name in self.layers else begin
            if begin == layer and (found or name == layer):
                found.append(call)
        for capture in self.captures.values() if again else ():
            apart = {call.place for pair in capture.hidden for call in pair}
            apart |= {capture.calls[index].place for index in capture.told}
            for call in found:
                if call.place in apart:
                    raise GraphError(
                        f"a layer that is recomputed in the backward must receive all tensors from other layers as "
                        f"arguments; {call} reads attributes that are set outside of it, or shares tensors with "
                        f"other layers through an object; take the layer out of checkpoint=, or pass those tensors as "
                        f"arguments"
                    )
        return [call.place for call in found]

    def passed(self) -> Generator[tuple[str, Any]]:
        """Yield nothing, because captured stages send single tensors and numbers, not whole outputs of layers."""
        yield from ()

    @property
    def output_form(self) -> Any:
        return self.captures[self.model.training].output_form

    def output(self) -> Any:
        """Return the model's output for the sample if it is a single tensor, else None."""
        results = self.captures[self.model.training].results
        return results[0].detach() if len(results) == 1 else None

    def begins(self, capture: Capture) -> dict[str, int]:
        """Return, for each layer, the index of the first call of a stage that begins with this layer."""
        order = list(self.calls)
        return {name: narrowest(capture, at) if (at := order.index(name)) else 0 for name in self.layers}

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        capture = self.captures[self.model.training]
        return with_costs(flow_of(self.model, capture, self.begins(capture)), costs)

    def _parts(self, cut: StageLayers) -> dict[bool, list[Part]]:
        """Return the Part of each stage, keyed by mode: True for training mode, False for evaluation mode."""
        order = list(self.calls)
        begins = [order.index(names[0]) for names in cut[1:]]
        return {
            mode: cut_at(capture, [0, *(narrowest(capture, position) for position in begins)])
            for mode, capture in self.captures.items()
        }

    def written_by(self, cut: StageLayers) -> Sequence[Collection[str]]:
        """Return, for each stage, the names of buffers that the calls of this stage may write to.

        A function between layers that only reads a buffer is ignored, because it may be in a different stage than the
        calls that write to the buffer.
        """
        found: list[set[str]] = [set() for _ in cut]
        for mode, parts in self.parts(cut).items():
            calls = self.captures[mode].calls
            for part, names in zip(parts, found, strict=True):
                names.update(*(calls[index].uses for index in part.own if calls[index].layer or calls[index].changes))
        return [names & self.written for names in found]

    def reached(self, cut: StageLayers, *, frozen: bool = False) -> list[tuple[str, str, int]]:
        """Return (layer, parameter, stage of the layer) for each layer that uses a trained parameter of another layer.

        Considers only the capture in the model's current mode. With ``frozen``, parameters that are not trained are
        included.
        """
        parts = self.parts(cut)[self.model.training]
        calls = self.captures[self.model.training].calls
        trained = {name for name, parameter in self.model.named_parameters() if frozen or parameter.requires_grad}
        return [
            (calls[index].layer, name, stage)
            for stage, part in enumerate(parts)
            for index in sorted(part.own)
            for name in calls[index].reached
            if name in trained
        ]

    def edges(self, cut: StageLayers) -> list[tuple[int, int]]:
        along = set(pairwise(range(len(cut))))
        for parts in self.parts(cut).values():
            along |= {(giver, taker) for taker, part in enumerate(parts) for giver in part.receives}
        return sorted(along)

    def bodies(self, cut: StageLayers, devices: Sequence[torch.device], ties: Ties) -> Sequence[Body]:
        """Return the stages' bodies. An unused parameter joins the stage of the parameter registered before it."""
        parts = self.parts(cut)
        edges = self.edges(cut)
        bodies = [ReplayedBody(self, parts, edges, stage, device, ties) for stage, device in enumerate(devices)]
        held = [_tensors(body.layers.values()) for body in bodies]
        for stage, names in unused(self.model, held).items():
            bodies[stage].layers["(never used)"] = Loose(self.model, names)
        return bodies


def _trained(call: Call) -> Sequence[str]:
    """Return the names of parameters and buffers that a call uses, or none if the call returns plain Python values."""
    return () if call.reads else call.uses


def _tensors(layers: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]


def _unit(call: Call) -> str:
    return f"{call.layer}#{call.number + 1}" if call.number else call.layer


def _two_rows(sample: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the sample. A sample of a single row is returned with two copies of this row.

    The model's code may treat a single row differently.
    """
    tensors = [tensor for tensor in tensors_in(sample) if tensor.dim()]
    if not tensors or any(len(tensor) != 1 for tensor in tensors) or _has_lists(sample):
        return sample
    args, kwargs = sample
    given = [Argument(name, value, Dim()) for name, value in (*enumerate(args), *kwargs.items())]
    split = RowSplit.choosing(1, [[0, 0]])
    repeated = [split.parts(argument)[0] for argument in given]
    return tuple(repeated[: len(args)]), dict(zip(kwargs, repeated[len(args) :], strict=True))


def _has_lists(sample: Any) -> bool:
    """Return whether a sample has lists of a single entry, which may have rows."""
    leaves = pytree.tree_leaves(sample, is_leaf=lambda value: isinstance(value, list | np.ndarray))
    return any(isinstance(leaf, list | np.ndarray) and not has_a_row_each(leaf) for leaf in leaves)
