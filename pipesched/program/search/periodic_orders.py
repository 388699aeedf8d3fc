"""Periodic orders: orders that repeat a unit in every period, and the moves that change the unit.

In each period, every stage runs the actions of a fixed number of micro-batches, the size of the unit. The unit says in
which sequence a rank runs these actions, and which micro-batch each action has in period 0. In each later period, the
micro-batch of each action is higher by the size.

Orders for any number of micro-batches repeat the unit, and leave out the actions of micro-batches that do not exist. So
the first periods become the warm-up, and the last periods the cool-down.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import Sequences, assign
from pipesched.program.search.moves import ascends
from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, OrderProblem, Tables

__all__ = [
    "OrderUnit",
    "Timed",
    "assign_rank",
    "assign_unit",
    "blank_unit",
    "fuse",
    "shift",
    "shortest_period",
    "split",
    "unit_of",
    "unroll",
]

#: The sets of kinds that a stage runs in ascending order of micro-batches.
_ASCENDING = ((FORWARD,), (INPUT_GRAD, BACKWARD), (WEIGHT_GRAD, BACKWARD))


class OrderUnit(NamedTuple):
    """The sequence of each rank's actions in a period."""

    #: The first slot of each rank, followed by the number of all slots.
    first: Whole
    #: The number of actions of each rank. The remaining slots of the rank are unused.
    lengths: Whole
    #: The action in each slot: stage x KINDS + kind.
    actions: Whole
    #: The micro-batch of each action in period 0. It can be negative.
    microbatches: Whole


class Timed(NamedTuple):
    """An action with the time at which it starts."""

    start: int
    #: Stage x KINDS + kind.
    action: int
    #: The micro-batch, counted from the first micro-batch of the unit.
    microbatch: int


def blank_unit(problem: OrderProblem, size: int) -> OrderUnit:
    """Return a unit without actions."""
    first = [0]
    for chunks in problem.chunks:
        first.append(first[-1] + 3 * len(chunks) * size)
    none = [0] * first[-1]
    return OrderUnit(whole(first), whole([0] * problem.num_ranks), whole(none), whole(none))


def shortest_period(timed: Iterable[Sequence[Timed]]) -> int:
    """Return the shortest period for which each stage runs all micro-batches in ascending order.

    Args:
        timed: the actions of successive micro-batches, for each rank in its order.

    """
    starts: dict[tuple[int, ...], list[int]] = {}
    for own in timed:
        for each in own:
            stage, kind = divmod(each.action, KINDS)
            for kinds in _ASCENDING:
                if kind in kinds:
                    starts.setdefault((stage, *kinds), []).append(each.start)
    return 1 + max(row[-1] - row[0] for row in starts.values())


def unit_of(problem: OrderProblem, timed: Sequence[Iterable[Timed]], period: int, size: int) -> OrderUnit:
    """Return the unit that starts each of these actions once in every period, at the given time.

    Its orders do not deadlock, unless actions that take no time start at the same time. With a longer period, ranks
    hold fewer micro-batches.

    Args:
        problem: the problem.
        timed: the actions of the micro-batches, for each rank.
        period: the time from the start of a period to the start of the next one.
        size: the number of micro-batches.

    """
    unit = blank_unit(problem, size)
    for rank, actions in enumerate(timed):
        slot = unit.first[rank]
        for each in sorted(actions, key=lambda each: each.start % period):
            unit.actions[slot] = each.action
            unit.microbatches[slot] = each.microbatch - each.start // period * size
            slot += 1
        unit.lengths[rank] = slot - unit.first[rank]
    return unit


@compiled
def assign_unit(source: OrderUnit, target: OrderUnit) -> None:
    """Copy a unit to another unit of the same size."""
    assign(source.lengths, target.lengths)
    assign(source.actions, target.actions)
    assign(source.microbatches, target.microbatches)


@compiled
def assign_rank(source: OrderUnit, target: OrderUnit, rank: int) -> None:
    """Copy the sequence of one rank."""
    target.lengths[rank] = source.lengths[rank]
    for at in range(source.first[rank], source.first[rank] + source.lengths[rank]):
        target.actions[at] = source.actions[at]
        target.microbatches[at] = source.microbatches[at]


@compiled
def unroll(tables: Tables, unit: OrderUnit, size: int, rank: int, orders: Sequences) -> None:
    """Write a rank's order for all micro-batches. ``held`` is not updated."""
    count = tables.num_microbatches
    begin = unit.first[rank]
    stop = begin + unit.lengths[rank]
    lowest = unit.microbatches[begin]
    highest = lowest
    for at in range(begin, stop):
        lowest = min(lowest, unit.microbatches[at])
        highest = max(highest, unit.microbatches[at])
    slot = tables.first[rank]
    busy = 0
    for period in range(-(highest // size), (count - 1 - lowest) // size + 1):
        for at in range(begin, stop):
            microbatch = unit.microbatches[at] + period * size
            if 0 <= microbatch < count:
                action = unit.actions[at]
                code = (action // KINDS * count + microbatch) * KINDS + action % KINDS
                orders.slots[slot] = code
                busy += tables.seconds[code]
                slot += 1
    orders.lengths[rank] = slot - tables.first[rank]
    orders.busy[rank] = busy


@compiled
def ordered(action: int, microbatch: int, other: int, microbatch_of_other: int) -> bool:
    """Return whether the order of two actions of one rank is fixed.

    Actions of different stages may change places, even if one waits for the other.
    """
    if action // KINDS != other // KINDS:
        return False
    return microbatch == microbatch_of_other or ascends(action % KINDS, other % KINDS)


@compiled
def shift(unit: OrderUnit, size: int, rank: int, at: int, distance: int) -> int:
    """Move the action in slot ``at`` by up to ``distance`` slots, and return the number of slots moved.

    The action can move to the previous or the next period. It stops next to an action that it must not pass.
    """
    begin = unit.first[rank]
    stop = begin + unit.lengths[rank]
    actions = unit.actions
    microbatches = unit.microbatches
    step = 1 if distance > 0 else -1
    moved = 0
    while moved != distance:
        to = at + step
        added = 0
        if to < begin:
            to = stop - 1
            added = -size
        elif to == stop:
            to = begin
            added = size
        if ordered(actions[at], microbatches[at], actions[to], microbatches[to] + added):
            break
        action = actions[at]
        microbatch = microbatches[at]
        actions[at] = actions[to]
        microbatches[at] = microbatches[to] + added
        actions[to] = action
        microbatches[to] = microbatch - added
        at = to
        moved += step
    return moved


@compiled
def split(unit: OrderUnit, size: int, rank: int, at: int, distance: int) -> None:
    """Replace the B in slot ``at`` by an I and a W.

    If ``distance`` is positive, the W then moves to the right by up to this number of slots. Otherwise, the I moves to
    the left.
    """
    actions = unit.actions
    microbatches = unit.microbatches
    for slot in range(unit.first[rank] + unit.lengths[rank], at, -1):
        actions[slot] = actions[slot - 1]
        microbatches[slot] = microbatches[slot - 1]
    unit.lengths[rank] += 1
    actions[at] += INPUT_GRAD - BACKWARD
    actions[at + 1] += WEIGHT_GRAD - BACKWARD
    shift(unit, size, rank, at + 1 if distance > 0 else at, distance)


@compiled
def fuse(unit: OrderUnit, size: int, rank: int, at: int) -> bool:
    """Move the I or W in slot ``at`` to the W or I of the same micro-batch, and replace both by a B.

    Return False if another action blocks the way. The action may then have moved.
    """
    begin = unit.first[rank]
    length = unit.lengths[rank]
    actions = unit.actions
    microbatches = unit.microbatches
    kind = actions[at] % KINDS
    partner = actions[at] + INPUT_GRAD + WEIGHT_GRAD - 2 * kind
    microbatch = microbatches[at]
    slot = begin
    while slot < begin + length and (actions[slot] != partner or (microbatches[slot] - microbatch) % size != 0):
        slot += 1
    away = (microbatch - microbatches[slot]) // size * length + slot - at
    beside = away - 1 if kind == INPUT_GRAD else away + 1
    if beside != 0 and shift(unit, size, rank, at, beside) != beside:
        return False
    at = begin + (at - begin + beside) % length
    slot = begin + (at - begin + away - beside) % length
    actions[slot] += BACKWARD - actions[slot] % KINDS
    unit.lengths[rank] -= 1
    for kept in range(at, begin + length - 1):
        actions[kept] = actions[kept + 1]
        microbatches[kept] = microbatches[kept + 1]
    return True
