"""Captured model: any model as a sequence of layers in call order, from which stages are built."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn

from pipesched.capture.capture import Call, Capture
from pipesched.capture.layer_graph import assign_unused_tensors, flow_of, gap, narrowest, with_costs
from pipesched.capture.paths import MOST_PATHS, BatchPaths, Paths
from pipesched.capture.recording import Recording, recorded
from pipesched.capture.replayed_body import ReplayedBody
from pipesched.capture.stage_body import Body
from pipesched.capture.stage_parts import Homes, StagePart, cut_at
from pipesched.capture.weight_writes import check_stages_of_writes, check_weight_writes
from pipesched.capture.whole_layers import opened
from pipesched.errors import GraphError, ScheduleError
from pipesched.model.class_state import check_class_state
from pipesched.model.module_tree import installs_recorders, layers_that_share
from pipesched.model.state_guard import attributes_kept
from pipesched.model.tied_weights import Ties, Use
from pipesched.partitioning.result import StageLayers
from pipesched.program.program import Program
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.tensors.graph_edges import check_layouts
from pipesched.tensors.keyed_random import Key, outside_kept
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

    may_branch = True

    def __init__(
        self, model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], whole_layers: Collection[str] = ()
    ) -> None:
        self.model = model
        self.sample = _two_rows(sample)
        self.recordings: dict[bool, Recording] = {}
        self._hooked = False
        look = partial(self._recorded, model.training)
        self.modules, own = opened(model, self.sample, look, whole_layers)
        self.captures = {model.training: own}
        self.missing: Exception | None = None  # the error that the model raises in the other mode, if any
        try:
            other = self._recorded(not model.training, self.modules)
        except Exception as error:  # for example a detector that takes targets only in training
            self.missing = error
        else:
            if _is_within(own, other) or _is_within(other, own):
                self.captures[not model.training] = other
        #: The mode in which the sample's forward calls all layers. Cuts and costs come from this forward.
        self.primary = model.training
        if any(not _is_within(one, own) for one in self.captures.values()):
            self.primary = not model.training
        own = self.primary_capture
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
            if position == 0 or all(_may_begin(capture, name) for capture in self.captures.values())
        }
        #: Layer -> the layers that hold one of its modules, for layers that are not the only holder.
        self.sharing = layers_that_share(self.modules)
        self.parts = lru_cache(maxsize=1)(self._parts)
        self.homes = lru_cache(maxsize=2)(self._homes)
        self.parts_on = lru_cache(maxsize=MOST_PATHS)(self._parts_on)
        self.paths = {
            mode: Paths(model, self.modules, mode, self.recordings[mode], self.sample, self._check_path)
            for mode in self.captures
        }

    @property
    def primary_capture(self) -> Capture:
        """The record of the forward that calls all layers."""
        return self.captures[self.primary]

    def _recorded(self, mode: bool, layers: Mapping[str, nn.Module]) -> Capture:
        args, kwargs = self.sample
        self.recordings[mode] = recorded(self.model, layers, mode, args, kwargs)
        return self.recordings[mode].capture

    def check(self, program: Program, *, threads: bool) -> None:
        """Raise GraphError or ScheduleError if the stages of this captured model cannot run the program."""
        forward_mode = sorted(name for capture in self.captures.values() for name in capture.forward_mode)
        if forward_mode and threads and program.num_ranks > 1:
            place = f"layer {forward_mode[0]!r}" if forward_mode[0] else "the code between layers"
            raise GraphError(
                f"only one thread of a process may differentiate in forward mode, as torch.func.jvp does, because all "
                f"threads share one state of torch; {place} does so, and {program.num_ranks} ranks would run as "
                f"threads; run each rank in its own process with mesh=, or use torch.func.vjp in a layer"
            )
        hidden = self.primary_capture.hidden
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
        for mode, one in self.recordings.items():
            if weights := self._weights_written(one):
                check_weight_writes(self.model, mode, self.sample, weights)
        calls = self.primary_capture.calls
        named = dict(self.model.named_parameters())
        users = Counter(name for call in calls for name in call.weights if name in named)
        tied = [name for name, count in users.items() if count > 1]
        if program.has_updates and tied:
            raise ScheduleError(
                f"a model with tied weights must not use an asynchronous schedule, because such a schedule updates "
                f"each stage as soon as the stage's gradients are complete; with schedule {program.name!r}, the "
                f"{users[tied[0]]} calls that share {tied[0]!r} would use different versions of this weight; give "
                f"each layer its own weight, or choose a synchronous schedule"
            )

    def _weights_written(self, recording: Recording) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name in recording.written]

    def _check_stages_of_writes(self, cut: StageLayers) -> None:
        stages_of: dict[str, set[int]] = {}
        for mode, recording in self.recordings.items():
            weights = self._weights_written(recording)
            calls = recording.capture.calls
            for stage, part in enumerate(self.parts(cut).get(mode, ()) if weights else ()):
                for name in {name for index in part.own for name in calls[index].uses}.intersection(weights):
                    stages_of.setdefault(name, set()).add(stage)
        check_stages_of_writes(self.model, stages_of)

    def uses(self, cut: StageLayers, ranks: Sequence[int]) -> list[Use]:
        """Return a Use for each call that uses parameters. ``ranks`` holds the rank of each stage."""
        parameters = {name for name, _ in self.model.named_parameters()}
        rank_of = {
            index: rank for part, rank in zip(self.parts(cut)[self.primary], ranks, strict=True) for index in part.own
        }
        return [
            Use(call.place, rank_of[call.index], [name for name in call.weights if name in parameters])
            for call in self.primary_capture.calls
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

    def check_sent(self, cut: StageLayers, *, threads: bool) -> None:
        """Raise GraphError if stages exchange tensors that cannot be sent, or use weights that others change."""
        self._check_stages_of_writes(cut)
        if self.model.training not in self.captures:
            return
        capture = self.captures[self.model.training]
        for stage, part in enumerate(self.parts(cut)[self.model.training]):
            for value in dict.fromkeys(value for values in part.gives.values() for value in values):
                tensor = capture.values.get(value)
                if not isinstance(tensor, Tensor):
                    continue
                maker = str(capture.calls[value[0]])
                check_layouts([tensor], maker)
                if not threads and (tensor.is_nested or tensor.layout is not torch.strided):
                    raise GraphError(
                        f"processes may exchange only plain, strided tensors; stage {stage} sends a tensor of layout "
                        f"{tensor.layout} that {maker} returns; convert the tensor before it leaves the layer "
                        f"(to_dense, torch.nested.to_padded_tensor), or begin the stage elsewhere with boundaries="
                    )

    @property
    def recomputed(self) -> frozenset[str]:
        return frozenset().union(*(capture.recomputed for capture in self.captures.values()))

    def examples(self, layers: Collection[str]) -> Iterator[tuple[str, Any]]:
        capture = self.primary_capture
        for call in capture.layer_calls:
            if call.layer in layers and call.index in capture.examples:
                yield call.layer, capture.examples[call.index]

    def passed(self) -> Generator[tuple[str, Any]]:
        """Yield nothing, because captured stages send single tensors and numbers, not whole outputs of layers."""
        yield from ()

    @property
    def output_form(self) -> Any:
        return self.primary_capture.output_form

    def output(self) -> Any:
        """Return the model's output for the sample if it is a single tensor, else None."""
        results = self.primary_capture.results
        return results[0].detach() if len(results) == 1 else None

    def begins(self, capture: Capture) -> dict[str, int]:
        """Return, for each layer, the index of the first call of a stage that begins with this layer."""
        order = list(self.calls)
        return {name: narrowest(capture, gap(capture, at)) if (at := order.index(name)) else 0 for name in self.layers}

    def graph(self, costs: Mapping[str, LayerCosts]) -> "nx.DiGraph[str]":
        capture = self.primary_capture
        return with_costs(flow_of(self.model, capture, self.begins(capture)), costs)

    def _parts(self, cut: StageLayers) -> dict[bool, list[StagePart]]:
        """Return the Part of each stage, keyed by mode: True for training mode, False for evaluation mode."""
        capture = self.primary_capture
        parts = {self.primary: cut_at(capture, self._starts(capture, cut))}
        homes = Homes.of(capture, parts[self.primary], {})
        for mode in self.captures.keys() - parts:
            parts[mode] = cut_at(self.captures[mode], self._starts(self.captures[mode], cut, homes))
        return parts

    def _homes(self, cut: StageLayers, mode: bool) -> Homes:
        """Return the stages that may use the weights and buffers in a mode.

        A tensor that only the capture of the other mode uses belongs to the stage that uses it there. A tensor that no
        capture uses belongs to the stage of the tensor registered before it.
        """
        parts = self.parts(cut)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        users: dict[str, set[int]] = {}
        for stage, part in enumerate(parts[self.primary]):
            for index in part.own:
                for name in self.primary_capture.calls[index].uses:
                    users.setdefault(name, set()).add(stage)
        held: list[list[Tensor]] = [[] for _ in cut]
        for of_mode in sorted(parts, key=lambda one: one != self.primary):
            calls = self.captures[of_mode].calls
            for stage, part in enumerate(parts[of_mode]):
                own = [calls[index] for index in sorted(part.own)]
                layers = dict.fromkeys(call.layer for call in own if call.layer)
                used = dict.fromkeys(name for call in own for name in call.loose)
                users |= {name: {stage} for name in used if name not in users}
                held[stage] += _tensors(self.modules[name] for name in layers)
                held[stage] += [tensors[name] for name in used if stage in users[name]]
        for stage, names in assign_unused_tensors(self.model, held).items():
            users |= {name: {stage} for name in names}
        if mode:  # the gradients of a weight with several users are added by call
            buffers = {name for name, _ in self.model.named_buffers()}
            users = {name: stages for name, stages in users.items() if len(stages) == 1 or name in buffers}
        return Homes.of(self.primary_capture, parts[self.primary], users)

    def loose(self, cut: StageLayers, stage: int) -> tuple[list[str], list[str]]:
        """Return the names of tensors outside of layers that a stage uses, and of those that it only holds."""
        calls = self.primary_capture.calls
        own = [calls[index] for index in sorted(self.parts(cut)[self.primary][stage].own)]
        used = frozenset().union(*(capture.uses for capture in self.captures.values()))
        held = [name for name, stages in self.homes(cut, False).stages.items() if stage in stages]
        others = [name for name in held if name in used - self.primary_capture.uses]
        loose = [*(name for call in own for name in call.loose), *others]
        return loose, [name for name in held if name not in used]

    def _starts(self, capture: Capture, cut: StageLayers, homes: Homes | None = None) -> list[int]:
        """Return the index of each stage's first call. A stage has no calls if the forward skips all its layers.

        With ``homes``, stages use weights in their homes if possible.
        """
        order = {name: place for place, name in enumerate(self.calls)}
        places = [order[_unit(call)] for call in capture.layer_calls]
        starts = [0]
        for stage, names in enumerate(cut[1:], 1):
            position = bisect_left(places, order[names[0]])
            at = len(capture.calls)
            if position < len(places):
                candidates = gap(capture, position) if position else [0]
                at = narrowest(capture, candidates if homes is None else homes.fitting(capture, candidates, stage))
            starts.append(max(at, starts[-1]))
        return starts

    def _check_path(self, capture: Capture) -> None:
        """Raise GraphError unless a path calls some or all of the layers, in the order of the primary capture."""
        order = {name: place for place, name in enumerate(self.calls)}
        units = [_unit(call) for call in capture.layer_calls]
        strange = [unit for unit in units if unit not in order]
        places = [order[unit] for unit in units if unit in order]
        if strange or places != sorted(places):
            raise GraphError(
                f"every batch must call the layers of the sample in the same order; it may skip layers; this batch "
                f"calls {strange[0] if strange else 'them in another order'}; build the pipeline with a sample for "
                f"which the model calls all its layers, or name the module around these layers in whole_layers="
            )
        if uncut := [name for name in self.layers if not _may_begin(capture, name)]:
            raise GraphError(
                f"a stage must be able to begin at the same layers for every batch; for this batch, no stage can begin "
                f"at layer {uncut[0]}, because the code around it must stay in one stage; name the module around this "
                f"layer in whole_layers="
            )

    def set_up(self, mode: bool) -> None:
        """Prepare the model for a step as its first forward would."""
        if not self._hooked:  # else each stage's first forward would install its own hooks
            installs_recorders(self.model)
            self._hooked = True
        self.recordings[mode].set_up()

    def find_paths(self, batch: Sequence[Any], first: Key, cut: StageLayers) -> BatchPaths:
        mode = self.model.training
        if mode not in self.paths:
            return BatchPaths()  # the stages raise an error
        self.set_up(mode)
        found = self.paths[mode].find(batch, first)
        for path, *_ in found.new:
            self.parts_on(cut, mode, path)
        return found

    def learn_paths(self, found: BatchPaths) -> None:
        if paths := self.paths.get(self.model.training):
            paths.learn(found)

    def capture_on(self, mode: bool, path: int) -> Capture:
        """Return the record of a path in a mode."""
        return self.paths[mode].captures[path]

    def _parts_on(self, cut: StageLayers, mode: bool, path: int) -> list[StagePart]:
        """Return the Part of each stage on a path. On all paths, values travel along the same pairs of stages."""
        if not path and mode == self.primary:
            return self.parts(cut)[mode]
        homes = self.homes(cut, mode)
        capture = self.capture_on(mode, path)
        parts = self.parts(cut)[mode]
        if path:
            parts = cut_at(capture, self._starts(capture, cut, homes), set(self.edges(cut)))
        for stage, part in enumerate(parts):
            for call in (capture.calls[index] for index in sorted(part.own)):
                if call.weights and stage not in homes.stages_of(call):
                    name = next((name for name in call.uses if stage not in homes.stages.get(name, ())), call.uses[0])
                    home = ", ".join(map(str, homes.stages.get(name, ["of the sample's calls"])))
                    raise GraphError(
                        f"code between layers must use a weight or buffer in the same stage for every batch; for this "
                        f"batch, {call} uses {name} in stage {stage}, and {name} belongs to stage {home}; move the "
                        f"code that uses it into a layer, or build the pipeline with a sample like this batch"
                    )
        return parts

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
        parts = self.parts(cut)[self.primary]
        calls = self.primary_capture.calls
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
        """Return the stages' bodies."""
        edges = self.edges(cut)
        bodies = [ReplayedBody(self, cut, edges, stage, device, ties) for stage, device in enumerate(devices)]
        own = self.captures.get(self.model.training)
        if own is not None and "" not in own.outside:  # else the code may take another path than for the sample
            self._rehearse(bodies)
        return bodies

    def _rehearse(self, bodies: Sequence[ReplayedBody]) -> None:
        """Run the code between layers of each stage on the sample. Raises GraphError if the code fails in a stage."""
        with attributes_kept(self.model.modules()), outside_kept():
            self.recordings[self.model.training].set_up()
            for body in bodies:
                body.rehearse()
        for body in bodies:
            body.forget()


def _tensors(layers: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]


def _is_within(one: Capture, other: Capture) -> bool:
    """Return whether ``other`` calls all layers that ``one`` calls, in the same order."""
    units = iter([_unit(call) for call in other.layer_calls])
    return all(_unit(call) in units for call in one.layer_calls)


def _may_begin(capture: Capture, name: str) -> bool:
    """Return whether a stage may begin at a layer. A layer that the capture does not call is no obstacle."""
    position = next((at for at, call in enumerate(capture.layer_calls) if _unit(call) == name), 0)
    return not position or bool(gap(capture, position))


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
