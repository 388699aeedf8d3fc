"""Lowering: passes that add communication, recomputation, offloading, updates, collectives and redundancy."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipesched.checks import as_list, is_count, is_whole, shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES, Columns, Ints, Mask, Orders
from pipesched.program.actions import OTHER_END, Action, Kind
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint
from pipesched.program.dependencies import BACKWARDS, WEIGHT_USES
from pipesched.program.gathers import check_gathers
from pipesched.program.program import Program, check_program
from pipesched.program.reductions import check_reductions
from pipesched.program.redundancy import redundant_orders
from pipesched.program.validation import check_places

__all__ = [
    "add_gathers",
    "add_norms",
    "add_offloading",
    "add_recompute",
    "add_reductions",
    "add_redundancy",
    "add_updates",
    "forward_then_backward",
    "halves",
    "lower",
]


def lower(program: Program) -> Program:
    """Add communication to a program, so that an executor can run it.

    Args:
        program: a program with compute actions. A program that already has transfers is returned unchanged.

    Returns:
        The same program with a send after each action whose result another rank needs, and the matching receives.

    Raises:
        ScheduleError: a stage is on a rank that does not exist, or an action is not on the rank of its stage.

    """
    check_program(program)
    check_places(program)
    return _add_communication(program)


def _add_communication(program: Program) -> Program:
    """Add a send after each action whose result another rank needs, and a receive before the action that needs it.

    A channel (sending rank, receiving rank, kind) is first in, first out, so its receives are in the order of its
    sends. Each receive is as late as possible: just before the action that consumes its message, or just before an
    earlier action that consumes a later message of the same channel. Overlapping actions stay together: the receives of
    both come before the first action, the sends of both after the second. A program that already has transfers is
    returned unchanged.
    """
    if program.index.has(*OTHER_END):
        return program
    columns = program.columns
    messages = _MessageArrays.of(program)
    sends = Columns.numbered(messages.giver, messages.send, messages.microbatch, messages.taker)
    receives = Columns.numbered(messages.taker, _RECEIVE_OF[messages.send], messages.microbatch, messages.giver)
    behind = messages.sender + columns.joined[messages.sender]
    before = _places(program, messages)
    before -= columns.overlapping[before]
    parts = [(before, receives, 0), (np.arange(len(columns)), columns, 1), (behind, sends, 2)]
    return replace(program, orders=_inserted(program.orders, parts))


#: For each code of a send or receive, the code of the matching receive or send; for any other code, the code itself.
_RECEIVE_OF = np.array([CODES[OTHER_END.get(kind, kind)] for kind in CODES])


class _MessageArrays(NamedTuple):
    """The messages between ranks. Each array has one entry per message."""

    #: The row of the action that produces the message.
    sender: Ints
    #: The row of the action that needs the message.
    consumer: Ints
    #: The stage that sends.
    giver: Ints
    #: The stage that receives.
    taker: Ints
    microbatch: Ints
    #: The code of SEND_F or SEND_B.
    send: Ints

    @classmethod
    def of(cls, program: Program) -> "_MessageArrays":
        """Return all messages, sorted by producing row, then by receiving stage."""
        columns = program.columns
        row, needed = (part[program.messages] for part in program.requirements)
        order = np.lexsort((columns.stage[row], needed))
        row = row[order]
        needed = needed[order]
        forward = columns.kind[needed] == CODES[Kind.F]
        send = np.where(forward, CODES[Kind.SEND_F], CODES[Kind.SEND_B])
        return cls(
            sender=needed,
            consumer=row,
            giver=columns.stage[needed],
            taker=columns.stage[row],
            microbatch=columns.microbatch[row],
            send=send,
        )


def _places(program: Program, messages: _MessageArrays) -> Ints:
    """Return, for each message, the row before which its receive is inserted.

    This is the first row that consumes the message or a later message of the same channel.
    """
    rank_of = program.orders.rank_of
    ends = rank_of[messages.sender] * program.num_ranks + rank_of[messages.consumer]
    channel = ends * 2 + (messages.send == CODES[Kind.SEND_B])
    order = np.lexsort((messages.sender, channel))[::-1]  # each channel's last message first
    _, segment = np.unique(-channel[order], return_inverse=True)
    step = len(program.columns) + 1
    lowered = messages.consumer[order] - segment.reshape(-1) * step  # below all values of the previous channel
    places = np.empty(len(order), np.int64)
    places[order] = np.minimum.accumulate(lowered) + segment.reshape(-1) * step
    return places


def _inserted(orders: Orders, parts: Sequence[tuple[Ints, Columns, int]]) -> Orders:
    """Merge several groups of actions into new orders of all ranks.

    ``parts`` holds a tuple (rows, actions, turn) for each group. ``rows[i]`` is the row of ``orders`` at which
    ``actions[i]`` is placed. If several actions have the same row, those with the lower turn come first.
    """
    turns = 4
    keys = np.concatenate([rows * turns + turn for rows, _, turn in parts])
    merged = Columns.joined_up([columns for _, columns, _ in parts])
    order = np.argsort(keys, kind="stable")
    offsets = np.searchsorted(keys[order], orders.offsets * turns)
    return Orders(merged[order], offsets.astype(np.int64))


def add_recompute(program: Program, mode: Checkpoint) -> Program:
    """Insert an R just before the backward of each checkpointed forward.

    "except_last" adds no R for a (stage, micro-batch) pair if its rank runs no other B, I, W or R between the pair's F
    and its backward. The rank frees nothing in this time, so recomputing the pair would not lower the peak. In 1F1B,
    this applies to all pairs of the last rank, and to the first pair of every other rank.

    Options for named layers add no R. A recomputed layer runs its forward again inside its stage's backward.

    Args:
        program: the program.
        mode: "never", "always", "except_last", or options for named layers.

    Returns:
        The program with an R for each recomputed pair.

    Raises:
        ScheduleError: the mode is unknown.

    """
    if isinstance(mode, Mapping) or as_checkpoint(mode, ()) == "never" or program.forward_only:
        return program
    columns = program.columns
    pair = columns.pair
    spared = np.isin(pair, pair[columns.are(Kind.R)])
    if mode == "except_last":
        spared |= _next_back(program)
    rows = np.flatnonzero(columns.are(*BACKWARDS) & ~spared)
    recomputes = Columns.numbered(columns.stage[rows], np.full(len(rows), CODES[Kind.R]), columns.microbatch[rows])
    before = rows - columns.overlapping[rows]
    parts = [(before, recomputes, 0), (np.arange(len(columns)), columns, 1)]
    return replace(program, orders=_inserted(program.orders, parts))


def _next_back(program: Program) -> Mask:
    """Return a mask of each B and I whose rank runs no other B, I, W or R between the forward and this action."""
    columns = program.columns
    rows = np.flatnonzero(columns.are(*BACKWARDS, Kind.W, Kind.R))
    forwards = program.index.rows(Kind.F, columns.stage[rows], columns.microbatch[rows])
    before = np.concatenate([[-1], rows[:-1]])
    next_back = np.zeros(len(columns), np.bool_)
    next_back[rows] = forwards > before
    return next_back


def add_offloading(program: Program, stages: Collection[int], *, ahead: int = 1) -> Program:
    """Offload the activations of some stages to the host between forward and backward.

    OFFLOAD follows the F, so that its copy runs during the next compute action. FREE follows that action. FETCH comes
    ``ahead`` compute actions before the backward, so that its copy runs during those actions. Two overlapping actions
    count as one. A (stage, micro-batch) pair is not offloaded if no action would run between its FREE and its FETCH, or
    if it is recomputed (R).

    Args:
        program: the program.
        stages: the stages to offload. If several chains share weights, pass stages of the first chain; the stages
            of other chains with the same weights are then also offloaded.
        ahead: the number of compute actions that run between a FETCH and its backward. Default: 1.

    """
    if not stages or program.forward_only:
        return program
    columns = program.columns
    rank_of = program.orders.rank_of
    acts = np.flatnonzero(columns.compute & ~columns.overlapping)  # the first row of each action or overlapping pair
    going = [stage for stage, part in enumerate(program.weights) if part in stages]
    backs = np.flatnonzero(columns.are(*BACKWARDS) & np.isin(columns.stage, going))
    pairs = columns[backs]
    forwards = program.index.rows(Kind.F, pairs.stage, pairs.microbatch)
    begin, end = (np.searchsorted(acts, rows, side="right") - 1 for rows in (forwards, backs))
    kept = (program.index.rows(Kind.R, pairs.stage, pairs.microbatch) < 0) & (end - begin > ahead + 2)
    kept &= rank_of[forwards] == rank_of[backs]
    begin = begin[kept]
    end = end[kept]
    pairs = pairs[kept]

    def copies(kind: Kind) -> Columns:
        return Columns.numbered(pairs.stage, np.full(len(pairs), CODES[kind]), pairs.microbatch)

    ends = acts + columns.joined[acts]
    parts = [
        (acts[end - ahead], copies(Kind.FETCH), 0),
        (np.arange(len(columns)), columns, 1),
        (ends[begin + 1], copies(Kind.FREE), 2),
        (ends[begin], copies(Kind.OFFLOAD), 3),
    ]
    return replace(program, orders=_inserted(program.orders, parts))


def add_updates(program: Program) -> Program:
    """Append an UPDATE for each stage to its rank's order. A program that already has updates is returned unchanged."""
    if program.has_updates or program.forward_only:
        return program
    stages = sorted(range(program.num_stages), key=lambda stage: (program.placement[stage], stage))
    ends = program.orders.offsets[1:][[program.placement[stage] for stage in stages]]
    count = len(stages)
    updates = Columns.numbered(np.array(stages), np.full(count, CODES[Kind.UPDATE]), np.zeros(count, np.int64))
    rows = np.arange(len(program.columns))
    return replace(program, orders=_inserted(program.orders, [(ends - 1, updates, 1), (rows, program.columns, 0)]))


def add_norms(program: Program) -> Program:
    """Insert a NORM after the last gradient of each stage, for updates that need the norm of all gradients.

    In a program with REDUCEs, all NORMs of a rank come after the rank's last gradient and last REDUCE instead. A NORM
    waits for the REDUCEs of its stage, so an earlier NORM would keep the rank from computing.

    A program that has no updates, or already has norms, is returned unchanged. Each stage must have one update.
    """
    if not program.has_updates or program.has_norms:
        return program
    columns = program.columns
    stages, after = _last_of_stages(columns, Kind.B, Kind.W, Kind.REDUCE, Kind.RESHARD)
    if any(program.buckets):
        order = np.argsort(after)
        stages = stages[order]
        of_rank = np.asarray(program.placement)[stages]
        last = np.zeros(program.num_ranks, np.int64)
        last[of_rank] = after[order]  # if a rank has several stages, numpy keeps the last value
        after = last[of_rank]
    norms = Columns.numbered(stages, np.full(len(stages), CODES[Kind.NORM]), np.zeros(len(stages), np.int64))
    parts = [(np.arange(len(columns)), columns, 0), (after, norms, 1)]
    return replace(program, orders=_inserted(program.orders, parts))


def add_reductions(program: Program, buckets: int | Sequence[int]) -> Program:
    """Insert the REDUCEs of each stage after its last gradient, for training with several replicas.

    A program is returned unchanged if it already has REDUCEs or has no gradients. A program with weights that several
    stages hold (chimera, dualpipe) is also returned unchanged, because the gradients of such weights are complete only
    after the step.

    Args:
        program: the program of one replica, before or after `add_gathers`, `add_updates`, `add_norms` or `lower`.
        buckets: the number of buckets of a stage: one number for all stages, or one for each stage. A stage with 0
            buckets, such as a frozen one, gets no REDUCE.

    Returns:
        The program with the actions ``<stage>REDUCE<bucket>``, in ascending order.

    Raises:
        ScheduleError: a number of buckets is invalid, or a stage has several updates, as in an asynchronous schedule.

    """
    counts = _bucket_counts(buckets, program.num_stages)
    if any(program.buckets) or program.num_weights < program.num_stages or program.forward_only:
        return program
    if program.has_norms and counts.any():
        without = replace(program, orders=program.orders.where(~program.columns.are(Kind.NORM)))
        return add_norms(add_reductions(without, buckets))
    columns = program.columns
    stages, after = _last_of_stages(columns, Kind.B, Kind.W, Kind.RESHARD)
    count = counts[stages]
    numbers = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    stages = np.repeat(stages, count)
    reductions = Columns.numbered(stages, np.full(len(stages), CODES[Kind.REDUCE]), numbers)
    parts = [(np.arange(len(columns)), columns, 0), (np.repeat(after, count), reductions, 1)]
    made = replace(program, orders=_inserted(program.orders, parts))
    check_reductions(made)
    return made


def add_gathers(
    program: Program, *, keep: bool = True, prefetch: int = 1, stages: Collection[int] | None = None
) -> Program:
    """Insert UNSHARD and RESHARD actions, for weights that are split across replicas.

        add_gathers(schedules.get("interleaved-1f1b").program(4, 8), keep=False)

    The RESHARD directly follows the last use of the weights, before the REDUCEs of the stage. The full weights are
    therefore freed before the REDUCEs make their copies, so the memory peak is lower.

    With ``keep=True``, each stage gathers its weights once, before its first forward, and keeps them until its last
    backward. With ``keep=False``, a stage frees its weights whenever more than ``prefetch`` actions of other stages of
    its rank follow, and gathers them again later. A rank with a single stage still gathers only once, because freeing
    the weights would not lower its peak.

    A program is returned unchanged if it already has UNSHARDs, or if several stages hold the same weights (chimera,
    dualpipe).

    Args:
        program: the program of one replica, before or after `add_reductions`, `add_updates` or `add_norms`. You
            can call `add_recompute` and `lower` before or after this function.
        keep: whether a stage keeps its gathered weights from its first to its last use. Default: True.
        prefetch: the number of compute actions between an UNSHARD and the first use of its weights. The rank can run
            these actions during the gather. Two overlapping actions count as one. Default: 1.
        stages: the stages whose weights are gathered. Default: all stages.

    Returns:
        The program with the actions ``<stage>UNSHARD<n>`` and ``<stage>RESHARD<n>``, numbered from 0 on each stage.

    Raises:
        ScheduleError: ``prefetch`` or a stage is invalid, or a stage has several updates, as in an asynchronous
            schedule.

    """
    chosen = _gathered_stages(program, prefetch, stages)
    if program.has_gathers or program.num_weights < program.num_stages:
        return program
    columns = program.columns
    rows = np.flatnonzero(columns.are(*WEIGHT_USES))
    firsts = rows[~columns.overlapping[rows]]  # one row for each action or overlapping pair
    turn = np.cumsum(~columns.overlapping[rows]) - 1  # the index in ``firsts`` of each use
    begins = np.searchsorted(firsts, program.orders.offsets[:-1])[program.orders.rank_of[rows]]  # of each use's rank
    order = np.argsort(columns.stage[rows], kind="stable")[np.isin(np.sort(columns.stage[rows]), chosen)]
    stage = columns.stage[rows][order]
    turn = turn[order]
    new = np.ones(len(order), np.bool_)  # whether the use is the first after an UNSHARD
    new[1:] = stage[1:] != stage[:-1]
    if not keep:
        new[1:] |= np.diff(turn) > prefetch + 1
    last = np.append(new[1:], True)[: len(new)]
    issued = firsts[np.maximum(turn[new] - prefetch, begins[order][new])]
    used = rows[order][last]
    ends = used + columns.joined[used]
    of = stage[new]
    numbers = np.arange(len(of)) - np.searchsorted(of, of)

    def made(kind: Kind, by: Ints) -> Columns:
        return Columns.numbered(of[by], np.full(len(of), CODES[kind]), numbers[by])

    in_use = np.argsort(turn[new], kind="stable")  # of UNSHARDs at the same row, the one needed first comes first
    parts = [
        (issued[in_use], made(Kind.UNSHARD, in_use), 0),
        (np.arange(len(columns)), columns, 1),
        (ends, made(Kind.RESHARD, np.arange(len(of))), 2),
    ]
    gathered = replace(program, orders=_inserted(program.orders, parts))
    check_gathers(gathered)
    return gathered


def add_redundancy(program: Program, *, replicas: bool = False) -> Program:
    """Insert a MIRROR, a KEEP and a REPLAY for each stage at the start, so that a job survives the loss of a rank.

        add_redundancy(add_updates(schedules.get("1f1b").program(4, 8)))

    A rank first runs the MIRRORs of its stages, then their KEEPs, then the REPLAYs of the stages whose copies it holds.
    With replicas, which hold the same weights anyway, and for a single rank, only KEEPs are added.

    A program is returned unchanged if it has no updates or already has redundancy, or if several stages hold the same
    weights (chimera, dualpipe), which are updated after the step.

    Args:
        program: the program of one replica, after `add_updates`.
        replicas: whether other replicas hold the same weights. Default: False.

    Returns:
        The program with the actions ``<stage>MIRROR0``, ``<stage>KEEP0`` and ``<stage>REPLAY0``.

    Raises:
        ScheduleError: a stage has several updates, as in an asynchronous schedule.

    """
    if not program.has_updates or program.has_redundancy or program.num_weights < program.num_stages:
        return program
    return replace(program, orders=redundant_orders(program, sends=program.num_ranks > 1 and not replicas))


def _gathered_stages(program: Program, prefetch: int, stages: Collection[int] | None) -> Sequence[int]:
    """Return the stages whose weights are gathered. Raises ScheduleError if a stage or ``prefetch`` is invalid."""
    if not is_count(prefetch, 0):
        raise ScheduleError(
            f"prefetch must be a whole number of actions, at least 0; got {shown(prefetch)}; for example, pass 1"
        )
    every = range(program.num_stages)
    rule = f"stages must be a list of stages, 0..{program.num_stages - 1}, or None for all"
    chosen = every if stages is None else as_list(stages, rule, "for example, pass [0, 1]")
    if not all(is_count(stage, 0) and stage < program.num_stages for stage in chosen):
        raise ScheduleError(f"{rule}; got {shown(stages)}; for example, pass [0, 1]")
    return chosen


def _bucket_counts(buckets: int | Sequence[int], num_stages: int) -> Ints:
    """Return the number of buckets of each stage. Raises ScheduleError for invalid numbers."""
    rule = f"buckets must be a whole number, at least 0, or one number for each of {num_stages} stages"
    remedy = "for example, pass buckets=4"
    counts = [buckets] * num_stages if is_whole(buckets) else as_list(buckets, rule, remedy)
    if len(counts) != num_stages or not all(is_count(count, 0) for count in counts):
        raise ScheduleError(f"{rule}; got {shown(buckets)}; {remedy}")
    return np.array(counts, np.int64)


def _last_of_stages(columns: Columns, *kinds: Kind) -> tuple[Ints, Ints]:
    """Return the stages with actions of these kinds, and the row of each stage's last such action.

    If this action overlaps with the next action, the row is that of the next action.
    """
    rows = np.flatnonzero(columns.are(*kinds))
    stages, last = np.unique(columns.stage[rows][::-1], return_index=True)
    after = rows[::-1][last]
    return stages, after + columns.joined[after]


def forward_then_backward(program: Program) -> Program:
    """Return a program without updates in which each rank runs all its forwards (F), then all its backwards (B).

    The forwards of a rank keep their order, and so do its backwards. The result is GPipe with the same placement. If
    the given program is valid, so is the result: removing actions and moving forwards to the front adds no dependency
    cycle.
    """
    columns = program.columns
    backward = columns.are(*BACKWARDS)
    rows = np.flatnonzero(columns.are(Kind.F) | backward)
    kinds = np.where(backward, CODES[Kind.B], columns.kind)
    kept = Columns.numbered(columns.stage[rows], kinds[rows], columns.microbatch[rows])
    order = np.lexsort((rows, backward[rows], program.orders.rank_of[rows]))
    offsets = np.searchsorted(rows, program.orders.offsets)
    return replace(program, orders=Orders(kept[order], offsets.astype(np.int64)), versions=())


def halves(program: Program) -> tuple[tuple[tuple[Action, ...], ...], tuple[tuple[Action, ...], ...]]:
    """Split each rank's order of a lowered `forward_then_backward` program into a forward and a backward half.

    Returns:
        The forward halves of all ranks, and the backward halves of all ranks.

    """
    forward_kinds = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    cuts = [
        next((i for i, action in enumerate(order) if action.kind not in forward_kinds), len(order))
        for order in program.orders
    ]
    pairs = list(zip(program.orders, cuts, strict=True))
    return tuple(order[:cut] for order, cut in pairs), tuple(order[cut:] for order, cut in pairs)
