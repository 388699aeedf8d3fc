"""Interleaving: cuts for which the busiest rank, not the slowest stage, is as fast as can be.

From the cuts of the fastest slowest stage, and from even ones, one cut after the other moves to where the busiest of
all ranks has the least to do, and of such places to where ranks are most alike, until none moves. Then some cuts are
moved at random, always in the same way, and what follows is kept where it is better.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipesched.partitioning.bisection import Found
from pipesched.partitioning.blocks import cuts_of
from pipesched.partitioning.checkpointed_interleaving import CheckpointedRanks
from pipesched.partitioning.problem import Problem
from pipesched.partitioning.search import Solution, filled_up, solve
from pipesched.partitioning.slots import Rank, fixed_order

__all__ = ["solved"]

_ROUNDS = 100  # of moving every cut once; some five are enough
_KICKS = 60
_MOVES = 400  # of single cuts in a round of all, in large problems

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
    begin = solve(replace(problem, line_up=alike, options=()), most_ideals)
    if begin.found is None:
        return begin
    found = _with_choices(problem, begin) if problem.options else _descended(problem, begin).found
    exact = found is not None and found.bottleneck == problem.lower
    return replace(begin, found=found, lower=problem.lower, exact=exact)


def _descended(problem: Problem, begin: Solution) -> "_Descent":
    descents = [_Descent(problem, *begun) for begun in _begins(problem, begin, len(problem.line_up.slots))]
    best = min(descents, key=_Descent.run)
    best.kicked(problem.lower)
    return best


def _with_choices(problem: Problem, begin: Solution) -> Found | None:
    """From the best cuts without limits of memory, and from those with limits where all is held; in the own order."""
    line_up = problem.line_up
    kept = CheckpointedRanks(problem, range(len(problem.blocks)))
    begins = [
        _descended(replace(problem, line_up=limits, options=()), begin) for limits in (line_up.without_limits, line_up)
    ]
    found = [kept.descended(descent.cuts) for descent in begins if descent.order == kept.order]
    return min((one for one in found if one), key=lambda one: one.bottleneck, default=None)


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
        self.order = order
        self.cuts = cuts
        self._seen: set[tuple[int, ...]] = set()  # from where it is known to which key cuts lead
        self._slots, self._ranks = slots, _ = problem.line_up.slots, problem.line_up.ranks
        places = cuts_of(problem.blocks, order)
        toll = problem.toll(places)
        self._spans = problem.spans(order)
        self._toll: list[int] = np.broadcast_to(toll.ticks, len(places)).tolist()
        self._blocking = toll.blocking
        work = {each: (places.work * each).tolist() for each in {slot.speed.denominator for slot in slots}}
        self._work: list[tuple[list[int], int]] = [
            (work[slot.speed.denominator], slot.speed.numerator) for slot in slots
        ]
        alike = {slot.in_flight: slot for slot in slots}
        held = {count: slot.memory(places).tolist() for count, slot in alike.items()}
        self._memory: list[list[int]] = [held[slot.in_flight] for slot in slots]

    def run(self) -> Key:
        """Move cuts until none moves; excess of memory, the busiest rank's ticks, and the sum of squares then."""
        self._count()
        for _ in range(_ROUNDS):
            self._seen.add(tuple(self.cuts))
            moved = [self._move(index) for index in range(1, len(self._slots))]
            if not any(moved):
                break
        self.key = self._key()
        return self.key

    @property
    def found(self) -> Found | None:
        """The partition; none where a rank is too small for its stages."""
        excess, bottleneck, _ = self.key
        if excess:
            return None
        return Found(bottleneck=bottleneck, order=self.order, ends=self.cuts[1:], slots=list(self._slots))

    def kicked(self, lower: int) -> None:
        """Move some neighbouring cuts anywhere and descend again, many times; stay where that gains nothing."""
        generator = random.Random(0)
        for _ in range(min(_KICKS, _MOVES // len(self._slots)) if len(self._slots) > 2 else 0):
            if self.key[:2] == (0, lower):
                break
            key = self.key
            cuts = list(self.cuts)
            first = generator.randrange(1, len(self._slots) - 1)
            last = min(len(self._slots), first + generator.randint(2, 4))
            between = range(cuts[first - 1] + 1, cuts[last])
            self.cuts[first:last] = sorted(generator.sample(between, last - first))
            if tuple(self.cuts) in self._seen or not self._keeps_pins() or self.run() >= key:
                self.key = key
                self.cuts = cuts

    def _keeps_pins(self) -> bool:
        return all(low <= cut <= high for cut, (low, high) in zip(self.cuts, self._spans, strict=True))

    def _count(self) -> None:
        """What each rank computes, waits and holds with these cuts, and how long each link between ranks is busy."""
        self._loads = [0] * len(self._ranks)
        self._held = [0] * len(self._ranks)
        self._busy = [0] * len(self._slots)
        for stage, slot in enumerate(self._slots):
            here, there = self.cuts[stage : stage + 2]
            self._loads[slot.rank] += self._ticks(stage, here, there)
            self._held[slot.rank] += self._bytes(stage, here, there)
            if stage:
                self._pay(stage, 1)

    def _ticks(self, stage: int, begin: int, end: int) -> int:
        work, per_tick = self._work[stage]
        return -((work[begin] - work[end]) // per_tick)

    def _bytes(self, stage: int, begin: int, end: int) -> int:
        memory = self._memory[stage]
        return memory[end] - memory[begin]

    def _pay(self, index: int, times: int) -> None:
        """Count what crossing a cut costs those beside it, or with -1 no longer."""
        one = self._slots[index - 1].rank
        other = self._slots[index].rank
        toll = times * self._toll[self.cuts[index]] if one != other else 0
        if self._blocking:
            self._loads[one] += toll
            self._loads[other] += toll
        else:
            self._busy[index] += toll

    def _key(self) -> Key:
        excess = sum(self._excess(rank, held) for rank, held in enumerate(self._held))
        return excess, max(*self._loads, *self._busy), float(sum(load**2 for load in self._loads))

    def _excess(self, rank: int, held: int) -> int:
        limit = self._ranks[rank].limit
        return max(0, held - limit) if limit else 0

    def _move(self, index: int) -> bool:
        """Move a cut to its best place, of equal ones the first; whether one is better than where it is."""
        low, high = self._spans[index]
        here = self.cuts[index]
        first = max(low, self.cuts[index - 1] + 1)
        last = min(high, self.cuts[index + 1] - 1)
        if first >= last:
            return False
        self._count_beside(index, -1)
        others = max(*self._loads, *self._busy)
        now = self._key_at(index, here, others)
        places = self._as_good(index, now, first, last)
        best = min((self._key_at(index, place, others), place) for place in places)
        if best[0] < now:
            self.cuts[index] = best[1]
        self._count_beside(index, 1)
        return best[0] < now

    def _as_good(self, index: int, now: Key, first: int, last: int) -> range:
        """The places of a cut, from the first to the last, where neither stage beside it alone is too much."""
        excess, slowest, _ = now
        if not excess:
            (here, per_tick), (behind, per_tick_behind) = self._work[index - 1 : index + 1]
            room, room_behind = (slowest - self._loads[slot.rank] for slot in self._slots[index - 1 : index + 1])
            most = here[self.cuts[index - 1]] + room * per_tick
            least = behind[self.cuts[index + 1]] - room_behind * per_tick_behind
            return range(bisect_left(behind, least, first, last), bisect_right(here, most, first, last + 1))
        return range(first, last + 1)

    def _count_beside(self, index: int, times: int) -> None:
        """Count the two stages beside a cut, or with -1 no longer."""
        for stage in (index - 1, index):
            rank = self._slots[stage].rank
            begin = self.cuts[stage]
            end = self.cuts[stage + 1]
            self._loads[rank] += times * self._ticks(stage, begin, end)
            self._held[rank] += times * self._bytes(stage, begin, end)
        self._pay(index, times)

    def _key_at(self, index: int, place: int, others: int) -> Key:
        """The key of the ranks beside a cut, which is at that place; the rest of them is counted."""
        one = self._slots[index - 1].rank
        other = self._slots[index].rank
        before = self.cuts[index - 1]
        behind = self.cuts[index + 1]
        load = self._loads[one] + self._ticks(index - 1, before, place)
        held = self._held[one] + self._bytes(index - 1, before, place)
        more = self._ticks(index, place, behind)
        more_held = self._bytes(index, place, behind)
        if one == other:
            load = load + more
            held = held + more_held
            return self._excess(one, held), max(load, others), float(load) ** 2
        more = self._loads[other] + more
        more_held = self._held[other] + more_held
        toll = self._toll[place]
        if self._blocking:
            load = load + toll
            more = more + toll
        excess = self._excess(one, held) + self._excess(other, more_held)
        return excess, max(load, more, toll, others), float(load) ** 2 + float(more) ** 2
