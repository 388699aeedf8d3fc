"""Memory: what each rank of a program needs at most, by what it is needed for. A matter of order alone, not of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Columns, Ints, Mask
from pipesched.program.actions import OTHER_END, Holding, Kind
from pipesched.program.liveness import bytes_held
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs

__all__ = ["AHEAD", "Message", "RankMemory", "rank_memory"]

#: Receives between processes that are posted before they are needed, on each channel.
AHEAD = 4
_HEADER_BYTES = 64  # of a message between processes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What a rank holds where it holds the most, in bytes, by what it is for."""

    #: Of the rank's stages, all the time.
    parameters: int
    #: Of the rank's stages, all the time.
    buffers: int
    #: The optimizer's state, all the time.
    optimizer: int
    #: The model's inputs for all micro-batches, if a stage of the rank takes them.
    batch: int
    #: Of the parameters, from a stage's first backward to its update.
    gradients: int
    #: Of the micro-batches in flight; of checkpointed ones the inputs, and the buffers that they met.
    activations: int
    #: What is kept between I and W.
    weight_grads: int
    #: Older versions of weights that are still used.
    stashed: int
    #: Outputs and gradients that nobody is known to have taken yet.
    messages: int
    #: Of the action that runs.
    transients: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


class Message(NamedTuple):
    """What one stage gives to another for a micro-batch, in bytes."""

    #: Where it arrives.
    arriving: int
    #: Where it was made; of views all that they lie in.
    made: int
    #: The part of `made` that lies in the giver's activations.
    kept: int
    #: The gradients that come back.
    back: int


def rank_memory(
    program: Program, costs: Costs, *, posted: int = 0, messages: Mapping[tuple[int, int], Message] | None = None
) -> tuple[RankMemory, ...]:
    """An upper bound of what each rank holds at once while the program runs; the parts are those of that moment.

    program: as it runs: with recomputation (R) where it is checkpointed, and updates where a step ends with them. What
    is counted of the batch is what lies on the ranks' devices; targets are not. posted: receives of each channel that
    have their memory ahead of their turn, as between processes. messages: by (giver, taker), where stages give
    different ones different things; their outputs, to each, unless given.
    Raises ScheduleError for costs of another number of stages.
    """
    if costs.num_stages != program.num_stages:
        raise ScheduleError(
            f"costs have one number a stage; the program has {program.num_stages} stages, "
            f"the costs {costs.num_stages}; make the costs for {program.num_stages} stages"
        )
    if program.index.has(*OTHER_END):
        program = replace(program, orders=program.orders.where(~program.columns.are(*OTHER_END)))
    held = _held(program, costs, _Sizes.of(program, costs, messages), posted)
    total = sum(held.values(), np.zeros(len(program.columns), np.int64))
    ends = pairwise(program.orders.offsets.tolist())
    rows = [start + int(np.argmax(total[start:stop])) if stop > start else None for start, stop in ends]
    visits = np.bincount(program.columns.stage[program.columns.are(Kind.F)], minlength=program.num_stages).tolist()
    batch = [
        0 if program.graph.producers[stage] else visits[stage] * size for stage, size in enumerate(costs.input_bytes)
    ]
    found = []
    for rank, row in enumerate(rows):
        stages = [stage for stage, own in enumerate(program.placement) if own == rank]
        own = {name: 0 if row is None else int(values[row]) for name, values in held.items()}
        found.append(
            RankMemory(
                parameters=sum(costs.weight_bytes[stage] for stage in stages),
                buffers=sum(costs.buffer_bytes[stage] for stage in stages),
                optimizer=sum(costs.optimizer_bytes[stage] for stage in stages),
                batch=sum(map(batch.__getitem__, stages)),
                **own,
            )
        )
    return tuple(found)


class _Around(NamedTuple):
    """What is held before each action of a program, and after it."""

    before: Ints
    after: Ints

    @classmethod
    def of(cls, program: Program, change: Ints) -> "_Around":
        """From what each action changes; each rank begins with nothing."""
        total = np.concatenate([[0], np.cumsum(change)])
        begins = program.orders.offsets[:-1][program.orders.rank_of]
        return cls(total[:-1] - total[begins], total[1:] - total[begins])

    @property
    def either(self) -> Ints:
        """The larger one."""
        return np.maximum(self.before, self.after)


class _Sizes(NamedTuple):
    """Those of messages, as `Message` has them, by giver and taker."""

    arriving: Ints
    made: Ints
    kept: Ints
    back: Ints

    @classmethod
    def of(cls, program: Program, costs: Costs, messages: Mapping[tuple[int, int], Message] | None) -> "_Sizes":
        """Given ones, or the outputs of stages."""
        stages = range(costs.num_stages)
        own = [
            Message(arriving=size, made=size, kept=min(kept, size), back=size)
            for size, kept in zip(costs.output_bytes, costs.kept_output_bytes, strict=True)
        ]
        known = messages or {(one, two): own[one] for two in stages for one in program.graph.producers[two]}
        found = np.zeros((4, costs.num_stages, costs.num_stages), np.int64)
        for ends, message in known.items():
            found[(slice(None), *ends)] = message
        return cls(*found)


def _held(program: Program, costs: Costs, messages: _Sizes, posted: int) -> dict[str, Ints]:
    """What is held while each action runs, at most, by what it is for."""
    columns = program.columns
    sizes: dict[str, Ints] = {name: np.asarray(values, np.int64) for name, values in _sizes(costs).items()}
    inputs = tuple(size if program.graph.producers[stage] else 0 for stage, size in enumerate(costs.input_bytes))
    sizes["input_bytes"] = np.asarray(inputs, np.int64)  # those of first stages lie in the batch
    activations = _holding(
        program, replace(costs, input_bytes=inputs), Holding.INPUT, Holding.ACTIVATIONS, Holding.OFFLOADED
    )
    gradients = _Gradients.of(program, sizes)
    return {
        "gradients": gradients.around.before,
        "activations": activations.either + _met(program, sizes["buffer_bytes"]).either,
        "weight_grads": _holding(program, costs, Holding.WEIGHT_GRAD).before,
        "stashed": _holding(program, costs, Holding.WEIGHTS).either,
        "messages": _waiting(program, messages, posted),
        "transients": _transients(columns, sizes, gradients),
    }


def _sizes(costs: Costs) -> dict[str, tuple[int, ...]]:
    return {field.name: getattr(costs, field.name) for field in fields(costs) if field.name.endswith("_bytes")}


def _holding(program: Program, costs: Costs, *wanted: Holding) -> _Around:
    none = (0,) * costs.num_stages
    sizes = {holding: size if holding in wanted else none for holding, size in costs.sizes().items()}
    after = bytes_held(program.columns, sizes, program.versions).after
    return _Around.of(program, np.diff(after, prepend=0))


def _met(program: Program, buffer_bytes: Ints) -> _Around:
    """The buffers that a checkpointed forward met are kept, and its backward may need them."""
    columns = program.columns
    again = np.isin(columns.pair, columns.pair[columns.are(Kind.R)])
    size = np.where(again, buffer_bytes[columns.stage], 0)
    return _Around.of(program, np.where(columns.are(Kind.F), size, 0) - np.where(columns.are(Kind.B, Kind.I), size, 0))


class _Gradients(NamedTuple):
    """The gradients of parameters, which are there from a stage's first backward on, and until its update, or the
    step's end.
    """

    around: _Around
    #: The actions that make them.
    first: Mask

    @classmethod
    def of(cls, program: Program, sizes: Mapping[str, Ints]) -> "_Gradients":
        """Those of a program's stages."""
        columns = program.columns
        whole = sizes["gradient_bytes"]
        deferred = sizes["deferred_gradient_bytes"]
        order = np.argsort(columns.stage, kind="stable")
        updates = columns.are(Kind.UPDATE)
        number = np.empty(len(columns), np.int64)
        number[order] = np.cumsum(updates[order]) - updates[order]  # how many updates lie before, of all stages
        change = np.zeros(len(columns), np.int64)
        first = np.zeros(len(columns), np.bool_)
        for kind, size in ((Kind.I, whole - deferred), (Kind.W, deferred)):
            rows = np.flatnonzero(columns.are(Kind.B, kind))  # whichever of them comes first makes them
            firsts = rows[np.unique(number[rows] * len(size) + columns.stage[rows], return_index=True)[1]]
            change[firsts] += size[columns.stage[firsts]]
            first[firsts] = True
        change[updates] -= whole[columns.stage[updates]]
        return cls(_Around.of(program, change), first)


def _transients(columns: Columns, sizes: Mapping[str, Ints], gradients: _Gradients) -> Ints:
    """What actions need beyond what is held as they begin and what they leave."""
    stage = columns.stage
    found = np.zeros(len(columns), np.int64)
    for kind, name in (
        (Kind.F, "forward"),
        (Kind.R, "forward"),
        (Kind.B, "backward"),
        (Kind.I, "input_grad"),
        (Kind.W, "weight_grad"),
        (Kind.UPDATE, "update"),
    ):
        rows = columns.are(kind)
        found[rows] = sizes[f"{name}_transient_bytes"][stage[rows]]
    updates = np.bincount(stage[columns.are(Kind.UPDATE)], minlength=int(stage.max(initial=0)) + 1)
    versioned = (updates > 1)[stage]
    whole = sizes["gradient_bytes"]
    fresh = sizes["first_backward_transient_bytes"]
    first = columns.are(Kind.B) & (gradients.first | versioned)  # to a version all gradients are new
    found[first] = fresh[stage[first]]
    handed = columns.are(Kind.B) & gradients.first & versioned  # then those of the version become the live ones' own
    twice = 2 * whole + sizes["input_bytes"] + sizes["output_bytes"] - sizes["activation_bytes"]
    found[handed] = np.maximum(fresh, twice)[stage[handed]]
    first = columns.are(Kind.I) & gradients.first
    found[first] += (sizes["gradient_bytes"] - sizes["deferred_gradient_bytes"])[stage[first]]
    first = columns.are(Kind.W) & gradients.first
    found[first] = np.maximum(found[first], sizes["deferred_gradient_bytes"][stage[first]])
    late = columns.are(Kind.W) & versioned
    found[late] += whole[stage[late]]  # of the version, until they are handed on
    dropping = columns.are(Kind.F) & np.isin(columns.pair, columns.pair[columns.are(Kind.R)])
    found[dropping] = sizes["dropping_transient_bytes"][stage[dropping]]
    return found


def _waiting(program: Program, sizes: _Sizes, posted: int) -> Ints:
    """Outputs and gradients that wait for who takes them, on the rank that made them, and where they came early; and
    the memory of receives that are posted.
    """
    change = np.zeros(len(program.columns) + 1, np.int64)
    received = _Received.of(program, sizes)
    early = (received.place, received.taker, received.size)
    for start, stop, size in (
        *_waits(program, sizes),
        early,
        *received.ahead(posted),
    ):
        np.add.at(change, start, size)
        np.subtract.at(change, stop, size)
    return np.cumsum(change[:-1])


class _Received(NamedTuple):
    """What ranks receive, rank after rank in their orders."""

    #: The next action of the program.
    place: Ints
    #: The action that takes it.
    taker: Ints
    #: In bytes.
    size: Ints
    #: A number for the two ranks and the direction.
    channel: Ints

    @classmethod
    def of(cls, program: Program, sizes: _Sizes) -> "_Received":
        """Those of a program without transfers, once it is lowered."""
        columns = lower(program).columns
        at = np.flatnonzero(columns.are(Kind.RECV_F, Kind.RECV_B))
        received = columns[at]
        place = np.cumsum(~columns.are(*OTHER_END), dtype=np.int64)[at]  # so many actions of the program come before
        forward = received.are(Kind.RECV_F)
        rows = {
            kind: program.index.rows(kind, received.stage, received.microbatch) for kind in (Kind.F, Kind.B, Kind.I)
        }
        taker = np.where(forward, rows[Kind.F], np.maximum(rows[Kind.B], rows[Kind.I]))
        own = received.stage
        peer = received.peer
        size = np.where(forward, sizes.arriving[peer, own], sizes.back[own, peer])
        rank_of = np.asarray(program.placement)
        ends = rank_of[received.peer] * program.num_ranks + rank_of[received.stage]
        return cls(place=place, taker=taker, size=size, channel=ends * 2 + forward)

    def ahead(self, posted: int) -> Iterator[tuple[Ints, Ints, Ints]]:
        """As ``_waits``: each message's memory is there from the receive so many before it, or the channel's first."""
        for channel in np.unique(self.channel).tolist() if posted else ():
            own = self.channel == channel
            place = self.place[own]
            count = int(own.sum())
            yield np.concatenate([np.repeat(place[:1], posted), place])[:count], place, self.size[own]
            last = np.array([self.taker[own].max() + 1])
            yield place[:1], last, np.array([count * _HEADER_BYTES])  # which stay with what they head


def _waits(program: Program, sizes: _Sizes) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(row from which on a value waits, row before which it is gone, its bytes): of values that pass between stages.

    On its own rank a value is gone with the action that takes it. On another one it is known to be taken once something
    has come from there that was made after it was.
    """
    columns = program.columns
    rank_of = program.orders.rank_of
    row, needed = (part[program.requirements.needed >= 0] for part in program.requirements)
    passing = columns.stage[row] != columns.stage[needed]
    row = row[passing]
    needed = needed[passing]
    forward = columns.are(Kind.F)[needed]
    again = np.isin(columns.pair, columns.pair[columns.are(Kind.R)])
    backs = np.isin(columns.pair, columns.pair[columns.are(Kind.B, Kind.I)])
    holds = (columns.are(Kind.F) & backs & ~again)[needed]  # activations, for longer than the output waits
    one = columns.stage[needed]
    two = columns.stage[row]
    size = np.where(forward, sizes.made[one, two] - np.where(holds, sizes.kept[one, two], 0), sizes.back[two, one])
    giver = rank_of[needed]
    taker = rank_of[row]
    here = giver == taker
    yield needed[here] + 1, row[here], size[here]
    channel = giver * program.num_ranks + taker
    back = taker * program.num_ranks + giver
    for way in np.unique(channel[~here]).tolist():
        own = channel == way
        replies = back == way
        order = np.argsort(needed[replies])
        made = needed[replies][order]
        came = np.minimum.accumulate(row[replies][order][::-1])[::-1]
        end = program.orders.offsets[way // program.num_ranks + 1]
        at = np.searchsorted(made, row[own])
        gone = np.append(came, end)[at]
        yield needed[own] + 1, np.maximum(gone, needed[own] + 1), size[own]
