"""Periodic search: simulated annealing of a unit that orders repeat in every period.

A step with many micro-batches consists mostly of equal periods. A change of the unit changes all of them, so the search
needs far fewer changes than annealing the orders of the whole step. The search evaluates the orders of a few
micro-batches, and extrapolates their makespan to all micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipesched.program.search.annealing import DRAWS, AnnealingRun, Cooling, distance_of, rise, run_of
from pipesched.program.search.compiled import Whole, compiled
from pipesched.program.search.evaluation import MOST, UNFIT, RunTimes, Sequences, evaluate, hold, run_times, sequences
from pipesched.program.search.periodic_orders import (
    OrderUnit,
    Timed,
    assign_rank,
    assign_unit,
    blank_unit,
    fuse,
    shift,
    shortest_period,
    split,
    unit_of,
    unroll,
)
from pipesched.program.search.problem import BACKWARD, FORWARD, KINDS, WEIGHT_GRAD, OrderProblem, Tables
from pipesched.program.search.random_numbers import draw, start, state

__all__ = ["PeriodicSearch"]

_SIZES = (1, 2, 3, 4)  # the numbers of micro-batches of a unit
_PERIODS = 4  # the minimum number of periods of the evaluated orders
_MOMENTS = 3  # the number of moments of a step from which a unit is taken
_LONGER = 16  # each period tried is longer than the previous one by 1/16
_HOT, _COLD = 0.3, 0.03
_FAR = 12  # the maximum distance of a move in slots


class PeriodicSearch:
    """Searches for a unit whose orders have a short makespan.

    Args:
        problem: the problem. All its micro-batches take the same times and amounts.
        fewer: the problem with fewer micro-batches, for which orders are evaluated.

    Attributes:
        ran: the number of orders evaluated so far.

    """

    def __init__(self, problem: OrderProblem, fewer: OrderProblem) -> None:
        self.ran = 0
        self._problem = problem
        self._fewer = fewer
        self._tables = fewer.tables
        self._orders = sequences(self._tables)
        self._times = run_times(self._tables)

    def run(self, sources: Sequence[tuple[Tables, Sequences]], steps: int, goal: int) -> Iterator[Sequences]:
        """Improve the best units of the given orders by simulated annealing.

        Args:
            sources: orders of ``problem`` or of ``fewer``, each with its tables.
            steps: the number of units to try. Of the steps that remain after the first units, half change the best
                unit of each size, and half change the best of all units.
            goal: the makespan at which the annealing of a unit ends.

        Yields:
            Orders for all micro-batches, the best first. They may exceed a limit, because a rank may hold more
            micro-batches than in the evaluated orders.

        """
        timed = [_Source(tables, orders) for tables, orders in sources]
        sizes = [size for size in _SIZES if size * _PERIODS <= self._tables.num_microbatches]
        found = [unit for size in sizes if (unit := self._start(timed, size)) is not None]
        left = max(0, steps - self.ran)
        if found and left:
            found = [self._annealed(each, left // 2 // len(found), goal, seed=0) for each in found]
            found.append(self._annealed(min(found), left // 2, goal, seed=1))
        for each in sorted(found):
            orders = sequences(self._problem.tables)
            for rank in range(self._problem.num_ranks):
                unroll(self._problem.tables, each.unit, each.size, rank, orders)
            yield orders

    def _start(self, sources: Sequence["_Source"], size: int) -> "_Found | None":
        """Return the best unit of this size in which actions start at the same times as in the given orders."""
        every = (
            self._fitting(timed, source.busiest * size, size) for source in sources for timed in source.moments(size)
        )
        return min((found for found in every if found is not None), default=None)

    def _fitting(self, timed: Sequence[Sequence[Timed]], busiest: int, size: int) -> "_Found | None":
        """Return a unit with a short period whose orders fit, by bisection; None if none fits."""
        shortest = max(busiest, shortest_period(timed))
        longest = max(each.start for own in timed for each in own)
        periods = [shortest]
        while periods[-1] < longest:
            periods.append(periods[-1] + periods[-1] // _LONGER + 1)
        found = None
        low, high = 0, len(periods)
        while low < high:
            middle = (low + high) // 2
            unit = unit_of(self._fewer, timed, periods[middle], size)
            makespan = self._estimate(unit, size)
            if makespan == UNFIT:
                low = middle + 1
            else:
                high = middle
                found = _Found(makespan, size, unit)
        return found

    def _estimate(self, unit: OrderUnit, size: int) -> int:
        """Write the orders of a unit. Return their extrapolated makespan; UNFIT if they deadlock or exceed a limit."""
        self.ran += 1
        for rank in range(self._tables.num_ranks):
            if not _write(self._tables, unit, size, rank, self._orders):
                return UNFIT
        return int(_extrapolated(self._tables, self._times, self._orders, self._span(size), MOST))

    def _span(self, size: int) -> "_Span":
        count = self._tables.num_microbatches
        return _Span(count // 2 // size * size, self._problem.num_microbatches - count)

    def _annealed(self, found: "_Found", steps: int, goal: int, seed: int) -> "_Found":
        """Anneal a unit, and return the best unit found."""
        size = found.size
        best, unit, kept = (blank_unit(self._fewer, size) for _ in range(3))
        assign_unit(found.unit, best)
        assign_unit(found.unit, unit)
        self._estimate(unit, size)  # writes the orders that the changes start from
        memory = _UnitBuffers(self._times, self._orders, kept, state())
        start(memory.random, seed)
        run = run_of(self._orders, found.makespan, Cooling(_HOT, _COLD, steps), goal)
        period = _Period(size, self._span(size))
        makespan, ran = _anneal(self._tables, memory, unit, best, run, period)
        self.ran += int(ran)
        return _Found(int(makespan), size, best)


@dataclass(order=True)
class _Found:
    """A unit, the number of its micro-batches, and the extrapolated makespan of its orders."""

    makespan: int
    size: int
    unit: OrderUnit = field(compare=False)


class _Source:
    """Orders from which units are taken.

    Args:
        tables: the problem.
        orders: orders that do not deadlock.

    Attributes:
        busiest: the largest time of a rank's actions, divided by the number of micro-batches.

    """

    def __init__(self, tables: Tables, orders: Sequences) -> None:
        own = run_times(tables)
        evaluate(tables, own, orders, MOST)
        self._count = tables.num_microbatches
        self._ranks = [_timed(tables, own, orders, rank) for rank in range(tables.num_ranks)]
        self.busiest = max(map(int, orders.busy)) // self._count

    def moments(self, size: int) -> Iterator[list[list[Timed]]]:
        """Yield the actions of ``size`` micro-batches for each rank, for several moments of a step."""
        for moment in range(1, _MOMENTS + 1):
            first = self._count * moment // (_MOMENTS + 2)
            ranks = [[each for each in timed if first <= each.microbatch < first + size] for timed in self._ranks]
            origin = min(each.start for timed in ranks for each in timed)
            yield [[Timed(each.start - origin, each.action, each.microbatch - first) for each in own] for own in ranks]


class _Span(NamedTuple):
    """How a makespan is extrapolated to more micro-batches."""

    #: The time of a period is measured over this number of micro-batches, the last ones.
    microbatches: int
    #: The number of micro-batches that are not evaluated.
    more: int


class _UnitBuffers(NamedTuple):
    """The preallocated buffers of an annealing run."""

    times: RunTimes
    #: The orders of the current unit.
    orders: Sequences
    #: One rank's sequence before a change.
    kept: OrderUnit
    #: The state of the random number generator.
    random: Whole


class _Period(NamedTuple):
    """The number of micro-batches of a unit, and how the makespan of its orders is extrapolated."""

    size: int
    span: _Span


def _timed(tables: Tables, times: RunTimes, orders: Sequences, rank: int) -> list[Timed]:
    """Return a rank's actions with their starts. ``times`` holds the end times of all F, I and B."""
    now = 0
    timed = []
    begin = int(tables.first[rank])
    for code in map(int, orders.slots[begin : begin + int(orders.lengths[rank])]):
        pair, kind = divmod(code, KINDS)
        stage, microbatch = divmod(pair, tables.num_microbatches)
        seconds = int(tables.seconds[code])
        now = now + seconds if kind == WEIGHT_GRAD else int(times.done[tables.yields[code]])
        timed.append(Timed(now - seconds, stage * KINDS + kind, microbatch))
    return timed


@compiled
def _write(tables: Tables, unit: OrderUnit, size: int, rank: int, orders: Sequences) -> bool:
    """Write a rank's order, and return whether it is within the limits."""
    unroll(tables, unit, size, rank, orders)
    begin = tables.first[rank]
    return tables.num_resources == 0 or hold(tables, orders, rank, begin, begin + orders.lengths[rank])


@compiled
def _extrapolated(tables: Tables, times: RunTimes, orders: Sequences, span: _Span, most: int) -> int:
    """Return the makespan of the orders, extrapolated to all micro-batches.

    Return UNFIT if the orders deadlock, or if the result is above ``most``.
    """
    count = tables.num_microbatches
    busiest = 0
    for rank in range(tables.num_ranks):
        busiest = max(busiest, orders.busy[rank])
    added = span.more * busiest // count
    makespan = evaluate(tables, times, orders, most - added)
    if makespan == UNFIT:
        return UNFIT
    growth = 0
    for row in range(2 * tables.num_stages):
        last = row * count + count - 1
        growth = max(growth, times.done[last] - times.done[last - span.microbatches])
    makespan += max(added, span.more * growth // span.microbatches)
    return makespan if makespan <= most else UNFIT


@compiled
def _anneal(
    tables: Tables, memory: _UnitBuffers, unit: OrderUnit, best: OrderUnit, run: AnnealingRun, period: _Period
) -> tuple[int, int]:
    """Anneal ``unit``, write the best unit to ``best``, and return its makespan and the number of evaluated orders."""
    random = memory.random
    orders = memory.orders
    current = run.makespan
    shortest = run.makespan
    ran = 0
    for heat in run.heat:
        for _ in range(run.steps):
            if shortest <= run.goal:
                return shortest, ran
            rank = draw(random) % tables.num_ranks
            at = unit.first[rank] + draw(random) % unit.lengths[rank]
            bits = draw(random)
            more = rise(run, heat, bits)
            most = current + more + more * period.span.more // tables.num_microbatches
            assign_rank(unit, memory.kept, rank)
            if not _change(tables, unit, period.size, rank, at, bits // DRAWS):
                assign_rank(memory.kept, unit, rank)
                continue
            ran += 1
            found = UNFIT
            if _write(tables, unit, period.size, rank, orders):
                found = _extrapolated(tables, memory.times, orders, period.span, most)
            if found == UNFIT:
                assign_rank(memory.kept, unit, rank)
                _write(tables, unit, period.size, rank, orders)
                continue
            current = found
            if found < shortest:
                shortest = found
                assign_unit(unit, best)
    return shortest, ran


@compiled
def _change(tables: Tables, unit: OrderUnit, size: int, rank: int, at: int, bits: int) -> bool:
    """Change a rank's sequence at the action in a slot. Return whether the change succeeded."""
    kind = unit.actions[at] % KINDS
    combines = tables.fuses and kind != FORWARD and bits % 16 < 5
    distance = distance_of(bits // 16, _FAR)
    if not combines:
        return shift(unit, size, rank, at, distance) != 0
    if kind != BACKWARD:
        return fuse(unit, size, rank, at)
    split(unit, size, rank, at, distance)
    return True
