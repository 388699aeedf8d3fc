"""Evaluation: computes the makespan of the orders of all ranks, and checks the limits of the ranks.

The ranks run in turn, each until the input of its next action is missing. This repeats until all actions have ended, or
until no rank can continue (a deadlock).
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.problem import KINDS, Tables

__all__ = ["MOST", "UNFIT", "RunTimes", "Sequences", "assign", "copy", "evaluate", "hold", "run_times", "sequences"]

#: The result, instead of a makespan, for orders that deadlock, exceed a limit or take longer than allowed.
UNFIT = -1
#: A maximum makespan that no orders exceed.
MOST = 1 << 61


class Sequences(NamedTuple):
    """The orders of all ranks, as codes of actions in slots."""

    #: The code of the action in each slot. Slots after the end of a rank's order are unused.
    slots: Whole
    #: The number of actions of each rank.
    lengths: Whole
    #: The sum of the times of each rank's actions.
    busy: Whole
    #: For each resource and slot, the amount that the slot's rank holds after the slot's action.
    held: Whole


class RunTimes(NamedTuple):
    """The preallocated buffers of an evaluation."""

    #: The end times of actions, numbered as in ``Tables.yields``.
    done: Whole
    #: The next slot of each rank.
    at: Whole
    #: The time at which each rank is free.
    free_at: Whole
    #: The time that each rank can still wait without exceeding the maximum makespan.
    spare: Whole


def sequences(tables: Tables) -> Sequences:
    """Return empty orders."""
    slots = len(tables.rank_of_slot)
    ranks = [0] * tables.num_ranks
    return Sequences(whole([0] * slots), whole(ranks), whole(ranks), whole([0] * (slots * tables.num_resources)))


def run_times(tables: Tables) -> RunTimes:
    """Allocate the buffers of an evaluation."""
    ranks = [0] * tables.num_ranks
    return RunTimes(whole(tables.blank), whole(ranks), whole(ranks), whole(ranks))


@compiled
def assign(source: Whole, target: Whole) -> None:
    """Copy the numbers in ``source`` to ``target``, a sequence of the same length."""
    for at in range(len(source)):
        target[at] = source[at]


@compiled
def copy(source: Sequences, target: Sequences) -> None:
    """Copy all orders."""
    assign(source.slots, target.slots)
    assign(source.lengths, target.lengths)
    assign(source.busy, target.busy)
    assign(source.held, target.held)


@compiled
def evaluate(tables: Tables, times: RunTimes, orders: Sequences, most: int) -> int:
    """Return the makespan of the orders, or UNFIT if they deadlock or take longer than ``most``."""
    slots = orders.slots
    needs = tables.needs
    lag = tables.lag
    seconds = tables.seconds
    yields = tables.yields
    done = times.done
    assign(tables.blank, done)
    left = 0
    for rank in range(tables.num_ranks):
        times.at[rank] = tables.first[rank]
        times.free_at[rank] = 0
        times.spare[rank] = most - orders.busy[rank]
        if times.spare[rank] < 0:
            return UNFIT
        left += orders.lengths[rank]
    while left > 0:
        before = left
        for rank in range(tables.num_ranks):
            slot = times.at[rank]
            stop = tables.first[rank] + orders.lengths[rank]
            now = times.free_at[rank]
            while slot < stop:
                code = slots[slot]
                ready = done[needs[code]]
                if ready < 0:
                    break
                ready += lag[code]
                if ready > now:
                    times.spare[rank] -= ready - now
                    if times.spare[rank] < 0:
                        return UNFIT
                    now = ready
                now += seconds[code]
                done[yields[code]] = now
                slot += 1
            left -= slot - times.at[rank]
            times.at[rank] = slot
            times.free_at[rank] = now
        if left == before:
            return UNFIT
    makespan = 0
    for rank in range(tables.num_ranks):
        makespan = max(makespan, times.free_at[rank])
    return makespan


@compiled
def hold(tables: Tables, orders: Sequences, rank: int, begin: int, stop: int) -> bool:
    """Update ``held`` from slot ``begin`` to ``stop``; return whether the rank stays within its limits there.

    The amounts in ``held`` before ``begin`` must be up to date.
    """
    count = len(tables.rank_of_slot)
    codes = tables.num_stages * tables.num_microbatches * KINDS
    fits = True
    for resource in range(tables.num_resources):
        limit = tables.limits[resource * tables.num_ranks + rank]
        held = 0 if begin == tables.first[rank] else orders.held[resource * count + begin - 1]
        for slot in range(begin, stop):
            code = resource * codes + orders.slots[slot]
            held += tables.takes[code]
            if held > limit:
                fits = False
            held -= tables.gives[code]
            orders.held[resource * count + slot] = held
    return fits
