"""Periodic search: simulated annealing of a unit that orders repeat in every period.

A step with many micro-batches consists mostly of equal periods. A change of the unit changes all of them, so the search
needs far fewer changes than annealing the orders of the whole step. The search evaluates the orders of a few
micro-batches, and extrapolates their makespan to all micro-batches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipesched.program.search.annealing import DRAWS, PATIENCE, Cooling, heats
from pipesched.program.search.compiled import Whole, compiled
from pipesched.program.search.evaluation import MOST, UNFIT, Clocks, Sequences, clocks, evaluate, hold, sequences
from pipesched.program.search.periodic_orders import (
    Timed,
    Unit,
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
from pipesched.program.search.problem import BACKWARD, FORWARD, KINDS, WEIGHT_GRAD, Problem, Tables
from pipesched.program.search.random_numbers import draw, start, state

__all__ = ["PeriodicSearch"]

_SIZES = (1, 2, 3, 4)  # the numbers of micro-batches of a unit
_PERIODS = 4  # the minimum number of periods of the evaluated orders
_MOMENTS = 3  # the number of moments of a step from which a unit is taken
_LONGER = 16  # each period tried is longer than the previous one by 1/16
_HOT, _COLD = 0.3, 0.03
_NEAR, _FAR = 3, 12  # the maximum distance in slots of a short and of a long move


class PeriodicSearch:
    """Searches for a unit whose orders have a short makespan.

    Args:
        problem: the problem. All its micro-batches take the same times and amounts.
        fewer: the problem with fewer micro-batches, for which orders are evaluated.

    Attributes:
        ran: the number of orders evaluated so far.

    """

    def __init__(self, problem: Problem, fewer: Problem) -> None:
        self.ran = 0
        self._problem = problem
        self._fewer = fewer
        self._tables = fewer.tables
        self._orders = sequences(self._tables)
        self._clocks = clocks(self._tables)

    def run(self, sources: Sequence[tuple[Tables, Sequences]], steps: int) -> Sequences | None:
        """Try random changes to the best units of the given orders; keep most changes that do not take longer.

        Args:
            sources: orders of ``problem`` or of ``fewer``, each with its tables.
            steps: the number of changes to try. Half of them are for units of different sizes, and half for the best
                of these units.

        Returns:
            Orders for all micro-batches, which may exceed a limit; None if no unit was found.

        """
        sizes = [size for size in _SIZES if size * _PERIODS <= self._tables.num_microbatches]
        started = [found for size in sizes if (found := self._start(sources, size)) is not None]
        if not started:
            return None
        annealed = [self._annealed(found, steps // 2 // len(started), seed=0) for found in started]
        best = self._annealed(min(annealed, key=lambda found: found.makespan), steps // 2, seed=1)
        orders = sequences(self._problem.tables)
        for rank in range(self._problem.num_ranks):
            unroll(self._problem.tables, best.unit, best.size, rank, orders)
        return orders

    def _start(self, sources: Sequence[tuple[Tables, Sequences]], size: int) -> "_Found | None":
        """Return the best unit of this size in which actions start at the same times as in the given orders."""
        found: list[_Found] = []
        for tables, orders in sources:
            busiest = max(map(int, orders.busy)) * size // tables.num_microbatches
            for timed in _moments(tables, orders, size):
                found += self._fitting(timed, busiest, size)
        return min(found, key=lambda each: each.makespan, default=None)

    def _fitting(self, timed: Sequence[Sequence[Timed]], busiest: int, size: int) -> Iterator["_Found"]:
        """Yield the unit with the shortest period, at least ``busiest``, for which its orders fit."""
        period = max(busiest, shortest_period(timed))
        life = max(each.start for own in timed for each in own)
        while period <= life:
            unit = unit_of(self._fewer, timed, period, size)
            makespan = self._estimate(unit, size)
            if makespan != UNFIT:
                yield _Found(makespan, size, unit)
                return
            period += period // _LONGER + 1

    def _estimate(self, unit: Unit, size: int) -> int:
        """Write the orders of a unit. Return their extrapolated makespan, or UNFIT if they exceed a limit."""
        self.ran += 1
        fits = True
        for rank in range(self._tables.num_ranks):
            fits &= bool(_write(self._tables, unit, size, rank, self._orders))
        if not fits:
            return UNFIT
        return int(_extrapolated(self._tables, self._clocks, self._orders, self._span(size), MOST))

    def _span(self, size: int) -> "_Span":
        count = self._tables.num_microbatches
        return _Span(count // 2 // size * size, self._problem.num_microbatches - count)

    def _annealed(self, found: "_Found", steps: int, seed: int) -> "_Found":
        """Anneal a unit, and return the best unit found."""
        size = found.size
        best, unit, kept = (blank_unit(self._fewer, size) for _ in range(3))
        assign_unit(found.unit, best)
        assign_unit(found.unit, unit)
        self._estimate(unit, size)
        memory = _Memory(self._clocks, self._orders, kept, state())
        start(memory.random, seed)
        mean = sum(map(int, self._orders.busy)) / sum(map(int, self._orders.lengths))
        heat = heats(Cooling(_HOT, _COLD, steps), mean)
        run = _Run(size, self._span(size), found.makespan, max(1, steps // len(heat)), heat, PATIENCE)
        makespan, ran = _anneal(self._tables, memory, unit, best, run)
        self.ran += int(ran)
        return _Found(int(makespan), size, best)


class _Found(NamedTuple):
    """A unit, the number of its micro-batches, and the extrapolated makespan of its orders."""

    makespan: int
    size: int
    unit: Unit


class _Span(NamedTuple):
    """How a makespan is extrapolated to more micro-batches."""

    #: The number of micro-batches, the last ones, from which the time of a period is measured.
    microbatches: int
    #: The number of micro-batches that are not evaluated.
    more: int


class _Memory(NamedTuple):
    """The preallocated buffers of an annealing run."""

    clocks: Clocks
    #: The orders of the current unit.
    orders: Sequences
    #: One rank's sequence before a change.
    kept: Unit
    #: The state of the random number generator.
    random: Whole


class _Run(NamedTuple):
    """The parameters of an annealing run."""

    size: int
    span: _Span
    makespan: int
    #: The number of changes at each temperature.
    steps: int
    #: The temperatures, in 1/256 of a unit of time.
    heat: Whole
    patience: Whole


def _moments(tables: Tables, orders: Sequences, size: int) -> Iterator[list[list[Timed]]]:
    """Yield the timed actions of ``size`` micro-batches for each rank, for several moments of a step."""
    own = clocks(tables)
    evaluate(tables, own, orders, MOST)
    count = tables.num_microbatches
    ranks = [_timed(tables, own, orders, rank) for rank in range(tables.num_ranks)]
    for moment in range(1, _MOMENTS + 1):
        first = count * moment // (_MOMENTS + 2)
        chosen = [[each for each in timed if first <= each.microbatch < first + size] for timed in ranks]
        origin = min(each.start for timed in chosen for each in timed)
        yield [[Timed(each.start - origin, each.action, each.microbatch - first) for each in timed] for timed in chosen]


def _timed(tables: Tables, clocks: Clocks, orders: Sequences, rank: int) -> list[Timed]:
    """Return a rank's actions with their starts. ``clocks`` holds the end times of all F, I and B."""
    now = 0
    timed = []
    begin = int(tables.first[rank])
    for code in map(int, orders.slots[begin : begin + int(orders.lengths[rank])]):
        pair, kind = divmod(code, KINDS)
        stage, microbatch = divmod(pair, tables.num_microbatches)
        seconds = int(tables.seconds[code])
        now = now + seconds if kind == WEIGHT_GRAD else int(clocks.done[tables.yields[code]])
        timed.append(Timed(now - seconds, stage * KINDS + kind, microbatch))
    return timed


@compiled
def _write(tables: Tables, unit: Unit, size: int, rank: int, orders: Sequences) -> bool:
    """Write a rank's order, and return whether it is within the limits."""
    unroll(tables, unit, size, rank, orders)
    begin = tables.first[rank]
    return tables.num_resources == 0 or hold(tables, orders, rank, begin, begin + orders.lengths[rank])


@compiled
def _extrapolated(tables: Tables, clocks: Clocks, orders: Sequences, span: _Span, most: int) -> int:
    """Return the makespan of the orders, extrapolated to all micro-batches.

    Return UNFIT if the orders deadlock. If the result would be above ``most``, it may also be UNFIT.
    """
    count = tables.num_microbatches
    busiest = 0
    for rank in range(tables.num_ranks):
        busiest = max(busiest, orders.busy[rank])
    makespan = evaluate(tables, clocks, orders, most - span.more * busiest // count)
    if makespan == UNFIT:
        return UNFIT
    growth = 0
    for row in range(2 * tables.num_stages):
        last = row * count + count - 1
        growth = max(growth, clocks.done[last] - clocks.done[last - span.microbatches])
    return makespan + span.more * growth // span.microbatches


@compiled
def _anneal(tables: Tables, memory: _Memory, unit: Unit, best: Unit, run: _Run) -> tuple[int, int]:
    """Anneal ``unit``, write the best unit to ``best``, and return its makespan and the number of evaluated orders."""
    random = memory.random
    orders = memory.orders
    current = run.makespan
    shortest = run.makespan
    ran = 0
    for heat in run.heat:
        for _ in range(run.steps):
            rank = draw(random) % tables.num_ranks
            at = unit.first[rank] + draw(random) % unit.lengths[rank]
            bits = draw(random)
            rise = heat * run.patience[bits % DRAWS] >> 24
            most = current + rise + rise * run.span.more // tables.num_microbatches
            assign_rank(unit, memory.kept, rank)
            found = UNFIT
            if _change(tables, unit, run.size, rank, at, bits // DRAWS):
                ran += 1
                if _write(tables, unit, run.size, rank, orders):
                    found = _extrapolated(tables, memory.clocks, orders, run.span, most)
            if found == UNFIT or found > most:
                assign_rank(memory.kept, unit, rank)
                _write(tables, unit, run.size, rank, orders)
                continue
            current = found
            if found < shortest:
                shortest = found
                assign_unit(unit, best)
    return shortest, ran


@compiled
def _change(tables: Tables, unit: Unit, size: int, rank: int, at: int, bits: int) -> bool:
    """Change a rank's sequence at the action in a slot. Return whether the change succeeded."""
    kind = unit.actions[at] % KINDS
    combines = tables.fuses and kind != FORWARD and bits % 16 < 5
    bits //= 16
    most = _NEAR if bits % 5 < 3 else _FAR
    bits //= 5
    distance = 1 + bits // 2 % most
    if bits % 2:
        distance = -distance
    if not combines:
        return shift(unit, size, rank, at, distance) != 0
    if kind != BACKWARD:
        return fuse(unit, size, rank, at)
    split(unit, size, rank, at, distance)
    return True
