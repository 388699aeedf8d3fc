"""Several stages a rank: cuts for which the busiest rank, not the slowest stage, is as fast as can be.

From the cuts of the fastest slowest stage, and from even ones, one cut after the other moves to where the busiest of
all ranks has the least to do, and of such places to where ranks are most alike, until none moves. Then some cuts are
moved at random, always in the same way, and what follows is kept where it is better.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesched.columns import Ints
from pipesched.partitioning.bisection import Found
from pipesched.partitioning.blocks import cuts_of
from pipesched.partitioning.problem import Problem
from pipesched.partitioning.search import Solution, filled_up, solve
from pipesched.partitioning.slots import Rank, fixed_order

__all__ = ["solved"]

_ROUNDS = 100  # of moving every cut once; some five are enough
_KICKS = 60

Key = tuple[int, int, float]


def solved(problem: Problem, most_ideals: int) -> Solution:
    """The partition of the smallest bottleneck, as far as that can be searched.

    Where ranks have several stages, where to begin is searched exactly, and the rest is a descent: a gap to the bound
    may stay.
    """
    slots = problem.line_up.slots
    if not problem.line_up.shares_ranks:
        return solve(problem, most_ideals)
    alike = fixed_order([Rank()] * len(slots), [1] * len(slots), exactly=bool(problem.pins), pinned=0)
    begin = solve(replace(problem, line_up=alike), most_ideals)
    if begin.found is None:
        return begin
    descents = [_Descent(problem, order, cuts) for order, cuts in _begins(problem, begin, len(slots))]
    best = min(descents, key=_Descent.run)
    best.kicked(problem.lower)
    excess, bottleneck, _ = best.key
    found = None if excess else Found(bottleneck, best.order, best.cuts[1:], list(slots))
    return Solution(found, problem.lower, bottleneck == problem.lower and not excess, begin.ideals, begin.probes)


def _begins(problem: Problem, begin: Solution, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Orders with as many stages: of the fastest slowest stage, and without pins of even shares of work."""
    own = list(range(len(problem.blocks)))
    if begin.found and problem.pins:
        yield begin.found.order, [0, *begin.found.ends]
        return
    orders = [own] if begin.found is None or begin.found.order == own else [begin.found.order, own]
    for order in orders:
        work = cuts_of(problem.blocks, order).work
        even = np.searchsorted(work, np.arange(1, count) * (int(work[-1]) / count)).clip(1, len(order) - 1)
        yield order, filled_up(sorted({0, len(order), *even.tolist()}), work.tolist(), count)
        if begin.found and order == begin.found.order:
            yield order, filled_up([0, *begin.found.ends], work.tolist(), count)


class _Descent:
    """One order and where its stages are cut, the first and the last cut included."""

    def __init__(self, problem: Problem, order: list[int], cuts: list[int]) -> None:
        self.order, self.cuts = order, cuts
        self._slots, self._ranks = problem.line_up.slots, problem.line_up.ranks
        places = cuts_of(problem.blocks, order)
        toll = problem.toll(places)
        self._spans = problem.spans(order)
        self._toll = np.broadcast_to(toll.ticks, len(places))
        self._blocking = toll.blocking
        self._work = [(places.work * slot.speed.denominator, slot.speed.numerator) for slot in self._slots]
        self._memory = [slot.memory(places) for slot in self._slots]

    def run(self) -> Key:
        """Move cuts until none moves; excess of memory, the busiest rank's ticks, and the sum of squares then."""
        self.key = self._key()
        for _ in range(_ROUNDS):
            before = self.key
            for index in range(1, len(self._slots)):
                self.key = min(self.key, self._moved(index, self.key))
            if self.key == before:
                break
        return self.key

    def kicked(self, lower: int) -> None:
        """Move some neighbouring cuts anywhere and descend again, many times; stay where that gains nothing."""
        generator = random.Random(0)
        for _ in range(_KICKS if len(self._slots) > 2 else 0):
            if self.key[:2] == (0, lower):
                break
            key, cuts = self.key, list(self.cuts)
            first = generator.randrange(1, len(self._slots) - 1)
            last = min(len(self._slots), first + generator.randint(2, 4))
            between = range(cuts[first - 1] + 1, cuts[last])
            self.cuts[first:last] = sorted(generator.sample(between, last - first))
            if not self._keeps_pins() or self.run() >= key:
                self.key, self.cuts = key, cuts

    def _keeps_pins(self) -> bool:
        return all(low <= cut <= high for cut, (low, high) in zip(self.cuts, self._spans, strict=True))

    def _moved(self, index: int, key: Key) -> Key:
        """Move a cut to its best place, of equal ones the first; stay where none is better than ``key``."""
        (low, high), here = self._spans[index], self.cuts[index]
        places = np.arange(max(low, self.cuts[index - 1] + 1), min(high, self.cuts[index + 1] - 1) + 1)
        excess, slowest, squares = self._keys(index, places)
        best = np.lexsort((places, squares, slowest, excess))[0]
        moved = (int(excess[best]), int(slowest[best]), float(squares[best]))
        self.cuts[index] = int(places[best]) if moved < key else here
        return moved

    def _key(self) -> Key:
        excess, slowest, squares = self._keys(0, np.zeros(1, np.int64))
        return int(excess[0]), int(slowest[0]), float(squares[0])

    def _keys(self, index: int, places: Ints) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """What the partition is worth with one cut at each of the places."""
        cuts: list[Any] = [*self.cuts[:index], places, *self.cuts[index + 1 :]]
        loads: list[Any] = [0] * len(self._ranks)
        held: list[Any] = [0] * len(self._ranks)
        links: list[Any] = []
        for stage, slot in enumerate(self._slots):
            work, per_tick = self._work[stage]
            loads[slot.rank] = loads[slot.rank] - (work[cuts[stage]] - work[cuts[stage + 1]]) // per_tick
            held[slot.rank] = held[slot.rank] + self._memory[stage][cuts[stage + 1]] - self._memory[stage][cuts[stage]]
            before = self._slots[stage - 1].rank
            if stage and before != slot.rank:
                links.append(self._toll[cuts[stage]])
        if self._blocking:
            self._wait(loads, cuts)
            links = []
        every = np.stack(np.broadcast_arrays(*loads, places))[:-1]
        slowest = np.stack(np.broadcast_arrays(*loads, *links, places))[:-1].max(axis=0)
        excess = sum((more - rank.limit).clip(0) for more, rank in zip(held, self._ranks, strict=True) if rank.limit)
        return np.broadcast_to(excess, len(places)), slowest, (every.astype(np.float64) ** 2).sum(axis=0)

    def _wait(self, loads: list[Any], cuts: list[Any]) -> None:
        """Add what both ranks wait while what crosses a cut between them is sent."""
        for stage in range(1, len(self._slots)):
            ranks = {self._slots[stage - 1].rank, self._slots[stage].rank}
            for rank in ranks if len(ranks) > 1 else ():
                loads[rank] = loads[rank] + self._toll[cuts[stage]]
