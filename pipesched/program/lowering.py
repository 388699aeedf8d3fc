"""Lowering: passes ``Program -> Program`` that add what the author of a schedule leaves out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipesched.program.action_arrays import CODES, Columns, Ints, Mask, Orders
from pipesched.program.actions import OTHER_END, Action, Kind
from pipesched.program.checkpoint_options import Checkpoint, as_checkpoint
from pipesched.program.dependencies import BACKWARDS
from pipesched.program.program import Program, check_program
from pipesched.program.validation import check_places

__all__ = [
    "add_offloading",
    "add_recompute",
    "add_updates",
    "forward_then_backward",
    "halves",
    "lower",
]


def lower(program: Program) -> Program:
    """Turn a compute-only program into one that an executor runs: adds communication.

    Raises ScheduleError for stages and actions on ranks that there are not.
    """
    check_program(program)
    check_places(program)
    return _add_communication(program)


def _add_communication(program: Program) -> Program:
    """Add a send behind each producer and a receive before each consumer on another rank.

    A channel is (sending rank, receiving rank, kind), first in first out. Receives stand in the order of the sends
    of their channel: each as late as its consumer allows, and earlier where a later message is used first. Actions
    that overlap stay together: receives for both come before the first, sends of both behind the second.
    A program that already has transfers is returned as it is.
    """
    if program.index.has(*OTHER_END):
        return program
    columns = program.columns
    messages = _Messages.of(program)
    sends = Columns.numbered(messages.giver, messages.send, messages.microbatch, messages.taker)
    receives = Columns.numbered(messages.taker, _RECEIVE_OF[messages.send], messages.microbatch, messages.giver)
    behind = messages.sender + columns.joined[messages.sender]
    before = _places(program, messages)
    before -= columns.overlapping[before]
    parts = [(before, receives, 0), (np.arange(len(columns)), columns, 1), (behind, sends, 2)]
    return replace(program, orders=_inserted(program.orders, parts))


#: By the code of a send, the code of its receive; of other kinds their own.
_RECEIVE_OF = np.array([CODES[OTHER_END.get(kind, kind)] for kind in CODES])


class _Messages(NamedTuple):
    """What travels between ranks. sender, consumer: the rows that yield and that need it; giver, taker: stages."""

    sender: Ints
    consumer: Ints
    giver: Ints
    taker: Ints
    microbatch: Ints
    send: Ints  # the code of SEND_F or SEND_B

    @classmethod
    def of(cls, program: Program) -> "_Messages":
        """All messages, by sender; those of one sender by where they go."""
        columns = program.columns
        row, needed = (part[program.crossing] for part in program.requirements)
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


def _places(program: Program, messages: _Messages) -> Ints:
    """The row before which each message is received: before its consumer, and before whatever its channel's later
    messages are received for.
    """
    rank_of = program.orders.rank_of
    ends = rank_of[messages.sender] * program.num_ranks + rank_of[messages.consumer]
    channel = ends * 2 + (messages.send == CODES[Kind.SEND_B])
    order = np.lexsort((messages.sender, channel))[::-1]  # each channel's last message first
    _, segment = np.unique(-channel[order], return_inverse=True)
    step = len(program.columns) + 1
    lowered = messages.consumer[order] - segment.reshape(-1) * step  # a channel's values lie below those before it
    places = np.empty(len(order), np.int64)
    places[order] = np.minimum.accumulate(lowered) + segment.reshape(-1) * step
    return places


def _inserted(orders: Orders, parts: Sequence[tuple[Ints, Columns, int]]) -> Orders:
    """Merge parts, each (row of the orders that an action belongs to, the actions, its turn at that row)."""
    turns = 4
    keys = np.concatenate([rows * turns + turn for rows, _, turn in parts])
    merged = Columns.joined_up([columns for _, columns, _ in parts])
    order = np.argsort(keys, kind="stable")
    offsets = np.searchsorted(keys[order], orders.offsets * turns)
    return Orders(merged[order], offsets.astype(np.int64))


def add_recompute(program: Program, mode: Checkpoint) -> Program:
    """Put an R just before each backward whose forward is checkpointed.

    never: none. always: all. except_last: all but those whose backward is the next on their rank, with no other B, I, W
    or R in between: what such a pair keeps, its R would make before anything else is freed, so the peak is that of
    always. It is each rank's first micro-batch, and of 1F1B every one on the last rank. Layers that are named run
    again inside their own backward: no R is theirs. Raises ScheduleError for another mode.
    """
    if isinstance(mode, Mapping) or as_checkpoint(mode, ()) == "never" or program.forward_only:
        return program
    columns = program.columns
    pair = columns.pair
    spared = np.isin(pair, pair[columns.are(Kind.R)])
    if mode == "except_last":
        spared |= _next_back(program)
    rows = np.flatnonzero(columns.are(*BACKWARDS) & ~spared)
    again = Columns.numbered(columns.stage[rows], np.full(len(rows), CODES[Kind.R]), columns.microbatch[rows])
    before = rows - columns.overlapping[rows]
    parts = [(before, again, 0), (np.arange(len(columns)), columns, 1)]
    return replace(program, orders=_inserted(program.orders, parts))


def _next_back(program: Program) -> Mask:
    """Which rows are backwards that nothing which frees or recomputes separates from their forward."""
    columns = program.columns
    rows = np.flatnonzero(columns.are(*BACKWARDS, Kind.W, Kind.R))
    forwards = program.index.rows(Kind.F, columns.stage[rows], columns.microbatch[rows])
    before = np.concatenate([[-1], rows[:-1]])
    found = np.zeros(len(columns), np.bool_)
    found[rows] = forwards > before
    return found


def add_offloading(program: Program, stages: Collection[int], *, ahead: int = 1) -> Program:
    """Take what some stages save to the host between forward and backward, where that frees memory for a while.

    OFFLOAD stands behind the F, and its copy runs beside the next action that computes; behind that one FREE gives the
    memory back, once the copy has ended. FETCH stands ``ahead`` such actions in front of the backward, and its copy
    runs beside them. A pair whose memory would come back before another action has run keeps it, and so does one that
    is recomputed (R). Of an overlapping pair both actions are one. stages: where several run on the same weights, of
    one chain.
    """
    if not stages or program.forward_only:
        return program
    columns = program.columns
    rank_of = program.orders.rank_of
    acts = np.flatnonzero(columns.compute & ~columns.overlapping)  # the first row of each
    going = [stage for stage, part in enumerate(program.weights) if part in stages]
    backs = np.flatnonzero(columns.are(*BACKWARDS) & np.isin(columns.stage, going))
    own = columns[backs]
    forwards = program.index.rows(Kind.F, own.stage, own.microbatch)
    begin, end = (np.searchsorted(acts, rows, side="right") - 1 for rows in (forwards, backs))
    kept = (program.index.rows(Kind.R, own.stage, own.microbatch) < 0) & (end - begin > ahead + 2)
    kept &= rank_of[forwards] == rank_of[backs]
    begin = begin[kept]
    end = end[kept]
    own = own[kept]

    def copies(kind: Kind) -> Columns:
        return Columns.numbered(own.stage, np.full(len(own), CODES[kind]), own.microbatch)

    ends = acts + columns.joined[acts]
    parts = [
        (acts[end - ahead], copies(Kind.FETCH), 0),
        (np.arange(len(columns)), columns, 1),
        (ends[begin + 1], copies(Kind.FREE), 2),
        (ends[begin], copies(Kind.OFFLOAD), 3),
    ]
    return replace(program, orders=_inserted(program.orders, parts))


def add_updates(program: Program) -> Program:
    """Put an UPDATE of each stage at the end of its rank's order. A program that has updates is returned as it is."""
    if program.has_updates or program.forward_only:
        return program
    stages = sorted(range(program.num_stages), key=lambda stage: (program.placement[stage], stage))
    ends = program.orders.offsets[1:][[program.placement[stage] for stage in stages]]
    count = len(stages)
    updates = Columns.numbered(np.array(stages), np.full(count, CODES[Kind.UPDATE]), np.zeros(count, np.int64))
    rows = np.arange(len(program.columns))
    return replace(program, orders=_inserted(program.orders, [(ends - 1, updates, 1), (rows, program.columns, 0)]))


def forward_then_backward(program: Program) -> Program:
    """All forwards in the program's order, then all backwards in its order, whole: GPipe over the same placement.

    Updates are left out: the caller's optimizer steps.

    What another program's validity proves holds here: taking actions out, or putting all forwards first, adds no wait.
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
    """The orders of such a program, lowered, up to each rank's last forward or its send; and the rest."""
    forward_kinds = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    cuts = [
        next((i for i, action in enumerate(order) if action.kind not in forward_kinds), len(order))
        for order in program.orders
    ]
    pairs = list(zip(program.orders, cuts, strict=True))
    return tuple(order[:cut] for order, cut in pairs), tuple(order[cut:] for order, cut in pairs)
