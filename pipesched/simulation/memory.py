"""Memory: the peak memory of each rank of a program, broken down by purpose.

The peak depends on the order of actions, not on their times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Columns, Ints, Mask
from pipesched.program.actions import OTHER_END, RECEIVES, Holding, Kind
from pipesched.program.dependencies import INPUT_USES
from pipesched.program.liveness import bytes_held
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.program.reductions import SUM_USES
from pipesched.program.tree_groups import copies_held, num_tree_groups
from pipesched.simulation.costs import Costs
from pipesched.simulation.replica_memory import ReplicaMemory, held_with_replicas
from pipesched.units import counted

__all__ = ["AHEAD", "MessageSizes", "RankMemory", "rank_memory"]

#: The number of receives that a process posts in advance on each channel.
AHEAD = 4
#: The kinds that have a transient of their own.
_TRANSIENT = tuple(kind for kind in Kind if kind.row.transient)
_HEADER_BYTES = 64  # size of the header of each message between processes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The peak memory of a rank in bytes, broken down by purpose."""

    #: Parameters of the rank's stages, held all the time.
    parameters: int
    #: Buffers of the rank's stages, held all the time.
    buffers: int
    #: State of the optimizer, held all the time.
    optimizer: int
    #: The model's inputs of all micro-batches, if one of the rank's stages takes them.
    batch: int
    #: Gradients of the parameters, held from a stage's first backward to its update.
    gradients: int
    #: Activations of the micro-batches in flight. Checkpointed stages hold their inputs and copies of buffers instead.
    activations: int
    #: Memory held from the input gradients (I) to the weight gradients (W).
    weight_grads: int
    #: Older weight versions that are still in use.
    stashed: int
    #: Outputs and gradients that may not have been received yet, and the buffers of posted receives.
    messages: int
    #: Flat copies of gradients that are summed over replicas, and the buffers in which updated weights are exchanged.
    reductions: int = 0
    #: Weights gathered from the other replicas. The rank's own parts of the weights are in `parameters`.
    gathered: int = 0
    #: Transient memory of the running action.
    transients: int
    #: In the host's memory, for when a rank is lost: the weights and the optimizer's state that the rank has set aside,
    #: and its gradients until they are sent; for the stages whose copies it holds, all three as well.
    host_copies: int = 0

    @property
    def total_bytes(self) -> int:
        """The rank's peak memory on its device: the sum of all fields except `host_copies`."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host_copies")

    @property
    def total_with_host_bytes(self) -> int:
        """The rank's peak memory if its device is the host, whose memory `host_copies` takes, too."""
        return self.total_bytes + self.host_copies


class MessageSizes(NamedTuple):
    """The sizes of a message that one stage sends to another for a micro-batch, in bytes."""

    #: Size of the message at the receiver.
    arriving: int
    #: Size at the sender. For a view, this is the size of the whole storage.
    made: int
    #: The part of `made` that shares memory with the sender's activations.
    kept: int
    #: Size of the gradient that the receiver sends back.
    back: int


def rank_memory(
    program: Program,
    costs: Costs,
    *,
    posted: int = 0,
    messages: Mapping[tuple[int, int], MessageSizes] | None = None,
    replicas: Sequence[ReplicaMemory] | None = None,
    in_tree: bool = False,
) -> tuple[RankMemory, ...]:
    """Return an upper bound on each rank's peak memory in bytes, broken down by purpose.

    The model's inputs on the ranks' devices are counted; the targets are not.

    Args:
        program: the program as it runs, with recomputes (R) and updates.
        costs: the sizes of the stages.
        posted: the number of receives per channel that are posted in advance, each with a buffer. Default: 0.
        messages: the sizes of messages, keyed by (sending stage, receiving stage). Default: each stage sends its
            output.
        replicas: the memory that each stage needs because the pipeline has replicas. Default: flat copies with the
            sizes in ``costs.reduce_bytes``.
        in_tree: whether the gradients of micro-batches are summed in a binary tree. Default: False; they are summed one
            by one.

    Raises:
        ScheduleError: if the costs and the program have different numbers of stages.

    """
    if costs.num_stages != program.num_stages:
        raise ScheduleError(
            f"costs must have one number per stage; the program has {counted(program.num_stages, 'stage')}, but the "
            f"costs have {costs.num_stages}; pass costs for {counted(program.num_stages, 'stage')}"
        )
    if program.index.has(*OTHER_END):
        program = replace(program, orders=program.orders.where(~program.columns.are(*OTHER_END)))
    if replicas is None:
        replicas = [ReplicaMemory.of_buffers(sizes) for sizes in costs.reduce_bytes]
    held = _held(program, costs, _SizeArrays.of(program, costs, messages), posted, replicas, in_tree=in_tree)
    total = sum(held.values(), np.zeros(len(program.columns), np.int64))
    ends = pairwise(program.orders.offsets.tolist())
    rows = [start + int(np.argmax(total[start:stop])) if stop > start else None for start, stop in ends]
    visits = np.bincount(program.columns.stage[program.columns.are(Kind.F)], minlength=program.num_stages).tolist()
    batch = [
        0 if program.graph.producers[stage] else visits[stage] * size for stage, size in enumerate(costs.input_bytes)
    ]
    copies = _host_copies(program, costs)
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
                host_copies=copies[rank],
                **own,
            )
        )
    return tuple(_after_run(own, rank, program, costs, replicas) for rank, own in enumerate(found))


def _host_copies(program: Program, costs: Costs) -> list[int]:
    """Return the bytes of states set aside and of copies of stages that each rank holds in its host's memory."""
    held = np.zeros(program.num_ranks, np.int64)
    states = np.asarray(costs.weight_bytes, np.int64) + np.asarray(costs.optimizer_bytes, np.int64)
    gradients = np.asarray(costs.gradient_bytes, np.int64)
    for kind, sizes in ((Kind.KEEP, states), (Kind.MIRROR, gradients), (Kind.REPLAY, states + gradients)):
        rows = program.columns.are(kind)
        np.add.at(held, program.orders.rank_of[rows], sizes[program.columns.stage[rows]])
    own: list[int] = held.tolist()
    return own


def _after_run(
    own: RankMemory, rank: int, program: Program, costs: Costs, replicas: Sequence[ReplicaMemory]
) -> RankMemory:
    """Return a rank's memory at the larger of two peaks: during the run, and while replicas sum gradients later."""
    stages = [stage for stage, home in enumerate(program.placement) if home == rank]
    late = [replicas[stage].late for stage in stages if replicas[stage].late.buffer]
    if not late:
        return own
    exchanges = [max(replicas[stage].spread, costs.update_transient_bytes[stage]) for stage in stages]
    after = replace(
        own,
        gradients=sum(costs.gradient_bytes[stage] for stage in stages),
        activations=0,
        weight_grads=0,
        stashed=0,
        reductions=sum(copies.buffer for copies in late),
        transients=max(*(copies.working for copies in late), *exchanges),
    )
    return max(own, after, key=lambda memory: memory.total_bytes)


class _Around(NamedTuple):
    """The bytes that a rank holds before and after each action, for all actions of a program."""

    before: Ints
    after: Ints

    @classmethod
    def of(cls, program: Program, change: Ints) -> "_Around":
        """Add up ``change``, the bytes by which each action changes the memory held. Each rank starts with 0 bytes."""
        total = np.concatenate([[0], np.cumsum(change)])
        begins = program.orders.offsets[:-1][program.orders.rank_of]
        return cls(total[:-1] - total[begins], total[1:] - total[begins])

    @property
    def either(self) -> Ints:
        """The larger of ``before`` and ``after``."""
        return np.maximum(self.before, self.after)


class _SizeArrays(NamedTuple):
    """The fields of `MessageSizes` as arrays, indexed by (sending stage, receiving stage)."""

    arriving: Ints
    made: Ints
    kept: Ints
    back: Ints

    @classmethod
    def of(
        cls, program: Program, costs: Costs, messages: Mapping[tuple[int, int], MessageSizes] | None
    ) -> "_SizeArrays":
        """Return the sizes of ``messages``. If None, each stage sends its output to its consumers."""
        stages = range(costs.num_stages)
        own = [
            MessageSizes(arriving=size, made=size, kept=min(kept, size), back=size)
            for size, kept in zip(costs.output_bytes, costs.kept_output_bytes, strict=True)
        ]
        known = messages or {(one, two): own[one] for two in stages for one in program.graph.producers[two]}
        found = np.zeros((4, costs.num_stages, costs.num_stages), np.int64)
        for ends, message in known.items():
            found[(slice(None), *ends)] = message
        return cls(*found)


#: The sorts of memory of a purpose (a field of `RankMemory`). Sorts without a purpose of their own count as "gathered".
_PURPOSES: dict[str, tuple[Holding, ...]] = {
    "activations": (Holding.INPUT, Holding.ACTIVATIONS, Holding.OFFLOADED),
    "weight_grads": (Holding.WEIGHT_GRAD,),
    "stashed": (Holding.WEIGHTS,),
    "reductions": (Holding.REDUCTION,),
}
_OTHERS = {*Holding}.difference(*_PURPOSES.values())


def _held(
    program: Program,
    costs: Costs,
    messages: _SizeArrays,
    posted: int,
    replicas: Sequence[ReplicaMemory],
    *,
    in_tree: bool,
) -> dict[str, Ints]:
    """Return the peak bytes during each action, keyed by purpose (a field of `RankMemory`)."""
    columns = program.columns
    sizes: dict[str, Ints] = {name: np.asarray(values, np.int64) for name, values in _sizes(costs).items()}
    inputs = tuple(size if program.graph.producers[stage] else 0 for stage, size in enumerate(costs.input_bytes))
    sizes["input_bytes"] = np.asarray(inputs, np.int64)  # inputs of first stages belong to the batch
    activations = _holding(program, replace(costs, input_bytes=inputs), *_PURPOSES["activations"])
    gradients = _Gradients.of(program, sizes, in_tree=in_tree)
    with_replicas = held_with_replicas(program, replicas, costs.update_transient_bytes)
    return {
        "gradients": gradients.around.before - with_replicas.released,
        "activations": activations.either + _met(program, sizes["buffer_bytes"]).either,
        "weight_grads": _holding(program, costs, *_PURPOSES["weight_grads"]).before,
        "stashed": _holding(program, costs, *_PURPOSES["stashed"]).either,
        "messages": _waiting(program, messages, posted),
        "reductions": with_replicas.buffers,
        "gathered": _holding(program, costs, *_OTHERS).either,
        "transients": _transients(columns, sizes, gradients),
    }


def _sizes(costs: Costs) -> dict[str, tuple[int, ...]]:
    names = (field.name for field in fields(costs) if field.name.endswith("_bytes") and field.name != "reduce_bytes")
    return {name: getattr(costs, name) for name in names}


def _holding(program: Program, costs: Costs, *wanted: Holding) -> _Around:
    none = (0,) * costs.num_stages
    sizes = {holding: size if holding in wanted else none for holding, size in costs.sizes().items()}
    after = bytes_held(program.columns, sizes, program.versions).after
    return _Around.of(program, np.diff(after, prepend=0))


def _met(program: Program, buffer_bytes: Ints) -> _Around:
    """Return the bytes of buffer copies held around each action. Each checkpointed F keeps copies for its backward."""
    columns = program.columns
    recomputed = np.isin(columns.pair, columns.pair[columns.are(Kind.R)])
    size = np.where(recomputed, buffer_bytes[columns.stage], 0)
    return _Around.of(program, np.where(columns.are(Kind.F), size, 0) - np.where(columns.are(Kind.B, Kind.I), size, 0))


class _Gradients(NamedTuple):
    """The size in bytes of gradients, which are held from a stage's first backward to its update.

    Without an update, the gradients are held until the end of the step.

    If gradients are summed in a binary tree, the sums of complete subtrees are held as well, until the sum of all
    gradients is first used.
    """

    around: _Around
    #: A mask of the actions that allocate the gradients.
    first: Mask

    @classmethod
    def of(cls, program: Program, sizes: Mapping[str, Ints], *, in_tree: bool) -> "_Gradients":
        """Compute the size in bytes of the gradients that are held before and after each action of a program."""
        columns = program.columns
        whole = sizes["gradient_bytes"]
        deferred = sizes["deferred_gradient_bytes"]
        order = np.argsort(columns.stage, kind="stable")
        updates = columns.are(Kind.UPDATE)
        number = np.empty(len(columns), np.int64)
        # The number of updates before each action, with actions sorted by stage.
        number[order] = np.cumsum(updates[order]) - updates[order]
        change = np.zeros(len(columns), np.int64)
        first = np.zeros(len(columns), np.bool_)
        for kind, size in ((Kind.I, whole - deferred), (Kind.W, deferred)):
            rows = np.flatnonzero(columns.are(Kind.B, kind))  # the first of these actions allocates the gradients
            firsts = rows[np.unique(number[rows] * len(size) + columns.stage[rows], return_index=True)[1]]
            change[firsts] += size[columns.stage[firsts]]
            first[firsts] = True
            if in_tree:
                _add_subtrees(program, rows, size, change, first)
        if in_tree:
            _end_subtrees(program, whole, change)
        change[updates] -= whole[columns.stage[updates]]
        return cls(_Around.of(program, change), first)


def _add_subtrees(program: Program, rows: Ints, size: Ints, change: Ints, first: Mask) -> None:
    """Add the sums of complete subtrees to the bytes held.

    In every group of micro-batches except the first, the first backward allocates new gradients.

    Args:
        program: the program.
        rows: the rows of the backwards that add these gradients.
        size: for each stage, the size of these gradients in bytes.
        change: the bytes by which each action changes the memory held.
        first: a mask of the actions that allocate gradients.

    """
    groups = num_tree_groups(program.num_microbatches)
    columns = program.columns[rows]
    group = columns.microbatch // (program.num_microbatches // groups)
    held = np.asarray([copies_held(number) for number in range(groups)], np.int64)
    begins = np.unique(columns.stage * groups + group, return_index=True)[1]
    begins = begins[group[begins] > 0]
    change[rows[begins]] += size[columns.stage[begins]] * np.diff(held, prepend=0)[group[begins]]
    first[rows[begins]] = True


def _end_subtrees(program: Program, whole: Ints, change: Ints) -> None:
    """Subtract the sums of subtrees from the bytes held, before the first action that uses the sum of all gradients."""
    columns = program.columns
    rows = np.flatnonzero(columns.are(*SUM_USES))
    rows = rows[np.unique(columns.stage[rows], return_index=True)[1]]
    change[rows - 1] -= copies_held(num_tree_groups(program.num_microbatches) - 1) * whole[columns.stage[rows]]


def _transients(columns: Columns, sizes: Mapping[str, Ints], gradients: _Gradients) -> Ints:
    """Return the transient bytes of each action.

    An action's transient is its peak, minus the bytes held before the action and the bytes that the action keeps.
    """
    stage = columns.stage
    found = np.zeros(len(columns), np.int64)
    for kind in _TRANSIENT:
        rows = columns.are(kind)
        found[rows] = sizes[kind.row.transient][stage[rows]]
    updates = np.bincount(stage[columns.are(Kind.UPDATE)], minlength=int(stage.max(initial=0)) + 1)
    versioned = (updates > 1)[stage]
    whole = sizes["gradient_bytes"]
    fresh = sizes["first_backward_transient_bytes"]
    first = columns.are(Kind.B) & (gradients.first | versioned)  # each weight version gets its own gradients
    found[first] = fresh[stage[first]]
    handed = columns.are(Kind.B) & gradients.first & versioned  # these gradients are then moved to the current weights
    twice = 2 * whole + sizes["input_bytes"] + sizes["output_bytes"] - sizes["activation_bytes"]
    found[handed] = np.maximum(fresh, twice)[stage[handed]]
    first = columns.are(Kind.I) & gradients.first
    found[first] += (sizes["gradient_bytes"] - sizes["deferred_gradient_bytes"])[stage[first]]
    first = columns.are(Kind.W) & gradients.first
    found[first] = np.maximum(found[first], sizes["deferred_gradient_bytes"][stage[first]])
    late = columns.are(Kind.W) & versioned
    found[late] += whole[stage[late]]  # a W also makes the gradients of its weight version
    dropping = columns.are(Kind.F) & np.isin(columns.pair, columns.pair[columns.are(Kind.R)])
    found[dropping] = sizes["dropping_transient_bytes"][stage[dropping]]
    return found


def _waiting(program: Program, sizes: _SizeArrays, posted: int) -> Ints:
    """Return, for each action, the bytes held by values that pass between stages and by buffers of posted receives.

    The values are outputs and gradients that are in transit or have not been used yet.
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
    """The receives of all ranks, sorted by rank and, within each rank, in the order in which the rank runs them."""

    #: Row of the first action after the receive, in the program without transfers.
    place: Ints
    #: Row of the action that uses the value.
    taker: Ints
    #: Size in bytes.
    size: Ints
    #: The number of the channel. Each ordered pair of ranks has one channel for outputs and one for gradients.
    channel: Ints

    @classmethod
    def of(cls, program: Program, sizes: _SizeArrays) -> "_Received":
        """Return the receives that ``lower`` adds to a program without transfers."""
        columns = lower(program).columns
        at = np.flatnonzero(columns.are(*RECEIVES))
        received = columns[at]
        # The number of program actions before the receive.
        place = np.cumsum(~columns.are(*OTHER_END), dtype=np.int64)[at]
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
        """Yield the actions during which the buffers of posted receives are held, in the same form as ``_waits``.

        A message's buffer is allocated at the receive that is ``posted`` messages earlier on the same channel.
        """
        for channel in np.unique(self.channel).tolist() if posted else ():
            own = self.channel == channel
            place = self.place[own]
            count = int(own.sum())
            yield np.concatenate([np.repeat(place[:1], posted), place])[:count], place, self.size[own]
            last = np.array([self.taker[own].max() + 1])
            yield place[:1], last, np.array([count * _HEADER_BYTES])  # headers are held as long as their messages


def _waits(program: Program, sizes: _SizeArrays) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield the actions during which values that pass between stages are held.

    A value that is used on the rank that produced it is held until it is used. A value that is sent to another rank is
    held until the other rank has used it, and a message that the other rank produced afterwards has arrived. Each
    result has three arrays: the row from which each value is held, the first row at which the value is no longer held,
    and the size of the value in bytes.
    """
    columns = program.columns
    rank_of = program.orders.rank_of
    row, needed = (part[program.requirements.needed >= 0] for part in program.requirements)
    passing = (columns.stage[row] != columns.stage[needed]) & columns.are(*INPUT_USES)[row]
    row = row[passing]
    needed = needed[passing]
    forward = columns.are(Kind.F)[needed]
    recomputed = np.isin(columns.pair, columns.pair[columns.are(Kind.R)])
    backs = np.isin(columns.pair, columns.pair[columns.are(Kind.B, Kind.I)])
    holds = (columns.are(Kind.F) & backs & ~recomputed)[needed]  # activations outlive the message
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
