"""Moves: small changes of one rank's order that keep every stage's micro-batches in ascending order.

Three moves are enough to reach every order: an action moves by some slots on its rank, an I and its W become a B, or a
B becomes an I and a W.
"""

from pipesched.program.search.compiled import compiled
from pipesched.program.search.evaluation import Sequences, hold
from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, Tables

__all__ = ["ascends", "fuse", "rotate", "shift", "split"]


@compiled
def ordered(tables: Tables, a: int, b: int) -> bool:
    """Return whether the order of two actions of one rank is fixed. The result does not depend on their current order.

    The order is fixed in three cases:

    - The actions belong to the same stage and the same micro-batch.
    - They belong to the same stage, and both are F, both are I or B, or both are W or B.
    - They belong to different stages, and one waits for the other.
    """
    pair = a // KINDS
    other = b // KINDS
    if pair == other:
        return True
    if pair // tables.num_microbatches != other // tables.num_microbatches:
        return tables.needs[a] == tables.yields[b] or tables.needs[b] == tables.yields[a]
    return ascends(a % KINDS, b % KINDS)


@compiled
def ascends(kind: int, other: int) -> bool:
    """Return whether a stage runs these two kinds of actions in ascending order of micro-batches."""
    return kind == other or (kind == BACKWARD and other != FORWARD) or (other == BACKWARD and kind != FORWARD)


@compiled
def rotate(orders: Sequences, slot: int, to: int) -> None:
    """Move an action from a slot to another slot of its rank. The actions in between move by one slot."""
    slots = orders.slots
    code = slots[slot]
    step = 1 if to > slot else -1
    while slot != to:
        slots[slot] = slots[slot + step]
        slot += step
    slots[to] = code


@compiled
def reach(tables: Tables, orders: Sequences, rank: int, slot: int, distance: int) -> int:
    """Return the slot that an action reaches if it moves by ``distance`` slots.

    If another action blocks the way, the action stops next to it.
    """
    slots = orders.slots
    code = slots[slot]
    begin = tables.first[rank]
    stop = begin + orders.lengths[rank]
    step = 1 if distance > 0 else -1
    to = slot
    while to != slot + distance:
        beyond = to + step
        if beyond < begin or beyond >= stop or ordered(tables, code, slots[beyond]):
            break
        to = beyond
    return to


@compiled
def shift(tables: Tables, orders: Sequences, rank: int, slot: int, distance: int) -> int:
    """Move an action by up to ``distance`` slots. Return its new slot, or its old slot if nothing has changed."""
    to = reach(tables, orders, rank, slot, distance)
    if to == slot:
        return slot
    rotate(orders, slot, to)
    if tables.num_resources and not hold(tables, orders, rank, min(slot, to), max(slot, to) + 1):
        rotate(orders, to, slot)
        hold(tables, orders, rank, min(slot, to), max(slot, to) + 1)
        return slot
    return to


@compiled
def fuse(tables: Tables, orders: Sequences, rank: int, slot: int, early: bool) -> bool:
    """Replace an I and its W by a B. ``slot`` is the slot of the I or of the W.

    The B gets the slot of the I if ``early`` is true, otherwise the slot of the W.

    Returns whether the order has changed. The limits are not checked, and ``held`` is not updated.
    """
    slots = orders.slots
    begin = tables.first[rank]
    stop = begin + orders.lengths[rank]
    code = slots[slot]
    backward = code - code % KINDS + BACKWARD
    step = 1 if code % KINDS == INPUT_GRAD else -1
    partner = slot + step
    while begin <= partner < stop and slots[partner] // KINDS != code // KINDS:
        partner += step
    first = min(slot, partner)
    last = max(slot, partner)
    if early:
        if reach(tables, orders, rank, last, first + 1 - last) != first + 1:
            return False
    elif reach(tables, orders, rank, first, last - 1 - first) != last - 1:
        return False
    orders.busy[rank] += tables.seconds[backward] - tables.seconds[slots[first]] - tables.seconds[slots[last]]
    removed = last if early else first
    slots[first if early else last] = backward
    for moved in range(removed, stop - 1):
        slots[moved] = slots[moved + 1]
    orders.lengths[rank] -= 1
    return True


@compiled
def split(tables: Tables, orders: Sequences, rank: int, slot: int, distance: int) -> None:
    """Replace a B by an I in its slot and a W up to ``distance`` slots later. ``held`` is not updated."""
    slots = orders.slots
    stop = tables.first[rank] + orders.lengths[rank]
    backward = slots[slot]
    inputs = backward - BACKWARD + INPUT_GRAD
    weights = backward - BACKWARD + WEIGHT_GRAD
    for moved in range(stop, slot + 1, -1):
        slots[moved] = slots[moved - 1]
    slots[slot] = inputs
    slots[slot + 1] = weights
    orders.lengths[rank] += 1
    orders.busy[rank] += tables.seconds[inputs] + tables.seconds[weights] - tables.seconds[backward]
    rotate(orders, slot + 1, reach(tables, orders, rank, slot + 1, distance))
