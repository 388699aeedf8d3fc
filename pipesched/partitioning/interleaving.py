"""Interleaving: chooses cuts for ranks with several stages, using descent to minimise the busiest rank's time.

The descent starts from the cuts that minimise the time of the slowest stage, and from cuts that divide the work evenly.
It moves one cut at a time to the position at which the busiest rank takes the least time, until no move helps. Of
equally good positions, it chooses the position at which the ranks' times are most even. The search then kicks the cuts:
it moves some cuts at random, with a fixed seed, descends again, and keeps the new cuts if they are better.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipesched.partitioning.bisection import FoundPartition
from pipesched.partitioning.blocks import cuts_of
from pipesched.partitioning.checkpointed_interleaving import CheckpointedRanks
from pipesched.partitioning.problem import CutProblem
from pipesched.partitioning.search import PartitionSolution, filled_up, solve
from pipesched.partitioning.slots import RankCapacity, fixed_order

__all__ = ["solved"]

_ROUNDS = 100  # maximum number of rounds; a round moves each cut at most once, and about five rounds are enough
_KICKS = 60
_MOVES = 400  # upper bound on the number of kicks x the number of stages

Key = tuple[int, int, float]


def solved(problem: CutProblem, most_ideals: int) -> PartitionSolution:
    """Find the partition with the smallest bottleneck.

    If ranks have several stages, an exact search finds only the starting point. The descent from this point may end
    with a bottleneck above the optimum.
    """
    slots = problem.layout.slots
    if not problem.layout.shares_ranks:
        return solve(problem, most_ideals)
    alike = fixed_order([RankCapacity()] * len(slots), [1] * len(slots), exactly=bool(problem.pins), pinned=0)
    begin = solve(replace(problem, layout=alike, options=()), most_ideals)
    if begin.found is None:
        return begin
    found = _with_choices(problem, begin) if problem.options else _descended(problem, begin).found
    exact = found is not None and found.bottleneck == problem.lower
    return replace(begin, found=found, lower=problem.lower, exact=exact)


def _descended(problem: CutProblem, begin: PartitionSolution) -> "_Descent":
    descents = [_Descent(problem, *begun) for begun in _begins(problem, begin, len(problem.layout.slots))]
    best = min(descents, key=_Descent.run)
    best.kicked(problem.lower)
    return best


def _with_choices(problem: CutProblem, begin: PartitionSolution) -> FoundPartition | None:
    """Choose cuts and activation options by descent from two starting points. The blocks stay in graph order.

    The starting points are the best cuts with all activations kept on the device, without and with memory limits.
    """
    layout = problem.layout
    kept = CheckpointedRanks(problem, range(len(problem.blocks)))
    begins = [
        _descended(replace(problem, layout=limits, options=()), begin) for limits in (layout.without_limits, layout)
    ]
    found = [kept.descended(descent.cuts) for descent in begins if descent.order == kept.order]
    return min((each for each in found if each), key=lambda each: each.bottleneck, default=None)


def _begins(problem: CutProblem, begin: PartitionSolution, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the starting points of the descent. A starting point is an order of the blocks and the cuts of this order.

    The cuts minimise the time of the slowest stage. If there are no pins, this function also yields cuts that divide
    the work evenly.
    """
    in_order = list(range(len(problem.blocks)))
    if begin.found and problem.pins:
        yield begin.found.order, [0, *begin.found.ends]
        return
    orders = [in_order] if begin.found is None or begin.found.order == in_order else [begin.found.order, in_order]
    for order in orders:
        work = cuts_of(problem.blocks, order).work
        even = np.searchsorted(work, np.arange(1, count) * (int(work[-1]) / count)).clip(1, len(order) - 1)
        yield order, filled_up(sorted({0, len(order), *even.tolist()}), work.tolist(), count)
        if begin.found and order == begin.found.order:
            yield order, filled_up([0, *begin.found.ends], work.tolist(), count)


class _Descent:
    """The descent along one order of the blocks.

    ``cuts`` are the current cuts, including the start and the end of the order.
    """

    def __init__(self, problem: CutProblem, order: list[int], cuts: list[int]) -> None:
        self.order = order
        self.cuts = cuts
        self._seen: set[tuple[int, ...]] = set()  # cuts from which the descent has already run
        self._slots, self._ranks = slots, _ = problem.layout.slots, problem.layout.ranks
        places = cuts_of(problem.blocks, order)
        transfer = problem.transfer(places)
        self._spans = problem.spans(order)
        self._transfer: list[int] = np.broadcast_to(transfer.ticks, len(places)).tolist()
        self._blocking = transfer.blocking
        work = {scale: (places.work * scale).tolist() for scale in {slot.speed.denominator for slot in slots}}
        self._work: list[tuple[list[int], int]] = [
            (work[slot.speed.denominator], slot.speed.numerator) for slot in slots
        ]
        by_in_flight = {slot.in_flight: slot for slot in slots}
        held = {count: slot.memory(places).tolist() for count, slot in by_in_flight.items()}
        self._memory: list[list[int]] = [held[slot.in_flight] for slot in slots]

    def run(self) -> Key:
        """Move cuts until no move improves the partition.

        Returns:
            The sort key of the partition: the number of bytes above the memory limits, the ticks of the busiest rank or
            link, and the sum of the ranks' squared ticks.

        """
        self._count()
        for _ in range(_ROUNDS):
            self._seen.add(tuple(self.cuts))
            moved = [self._move(index) for index in range(1, len(self._slots))]
            if not any(moved):
                break
        self.key = self._key()
        return self.key

    @property
    def found(self) -> FoundPartition | None:
        """The partition; None if a rank exceeds its memory limit."""
        excess, bottleneck, _ = self.key
        if excess:
            return None
        return FoundPartition(bottleneck=bottleneck, order=self.order, ends=self.cuts[1:], slots=list(self._slots))

    def kicked(self, lower: int) -> None:
        """Repeatedly move some neighbouring cuts at random, then descend. Undo moves that bring no improvement."""
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
        """Compute the load and the memory of each rank, and the busy time of each link, for the current cuts."""
        self._loads = [0] * len(self._ranks)
        self._held = [0] * len(self._ranks)
        self._busy = [0] * len(self._slots)
        for stage, slot in enumerate(self._slots):
            begin, end = self.cuts[stage : stage + 2]
            self._loads[slot.rank] += self._ticks(stage, begin, end)
            self._held[slot.rank] += self._bytes(stage, begin, end)
            if stage:
                self._pay(stage, 1)

    def _ticks(self, stage: int, begin: int, end: int) -> int:
        work, per_tick = self._work[stage]
        return -((work[begin] - work[end]) // per_tick)

    def _bytes(self, stage: int, begin: int, end: int) -> int:
        memory = self._memory[stage]
        return memory[end] - memory[begin]

    def _pay(self, index: int, times: int) -> None:
        """Add the transfer time at a cut to the totals, or subtract it if ``times`` is -1.

        If stages wait for transfers, the totals are the loads of both ranks; otherwise, the busy time of the link.
        """
        before = self._slots[index - 1].rank
        after = self._slots[index].rank
        transfer = times * self._transfer[self.cuts[index]] if before != after else 0
        if self._blocking:
            self._loads[before] += transfer
            self._loads[after] += transfer
        else:
            self._busy[index] += transfer

    def _key(self) -> Key:
        excess = sum(self._excess(rank, held) for rank, held in enumerate(self._held))
        return excess, max(*self._loads, *self._busy), float(sum(load**2 for load in self._loads))

    def _excess(self, rank: int, held: int) -> int:
        limit = self._ranks[rank].limit
        return max(0, held - limit) if limit else 0

    def _move(self, index: int) -> bool:
        """Move a cut to the first position that gives the smallest `_key`. Returns whether this decreased the key."""
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
        """Return the positions of a cut at which the ranks on both sides are no slower than the currently slowest rank.

        If a rank exceeds its memory limit, all positions from ``first`` to ``last`` are returned.
        """
        excess, slowest, _ = now
        if not excess:
            (here, per_tick), (behind, per_tick_behind) = self._work[index - 1 : index + 1]
            room, room_behind = (slowest - self._loads[slot.rank] for slot in self._slots[index - 1 : index + 1])
            most = here[self.cuts[index - 1]] + room * per_tick
            least = behind[self.cuts[index + 1]] - room_behind * per_tick_behind
            return range(bisect_left(behind, least, first, last), bisect_right(here, most, first, last + 1))
        return range(first, last + 1)

    def _count_beside(self, index: int, times: int) -> None:
        """Add the costs of a cut to the totals: the transfer time, and the time and memory of the stages on both sides.

        If ``times`` is -1, subtract the costs instead.
        """
        for stage in (index - 1, index):
            rank = self._slots[stage].rank
            begin = self.cuts[stage]
            end = self.cuts[stage + 1]
            self._loads[rank] += times * self._ticks(stage, begin, end)
            self._held[rank] += times * self._bytes(stage, begin, end)
        self._pay(index, times)

    def _key_at(self, index: int, place: int, others: int) -> Key:
        """Return the `_key` of the partition with the cut at ``place``.

        ``others`` is the largest load of any rank or link, excluding the stages and the transfer at this cut.
        """
        rank = self._slots[index - 1].rank
        next_rank = self._slots[index].rank
        begin = self.cuts[index - 1]
        end = self.cuts[index + 1]
        load = self._loads[rank] + self._ticks(index - 1, begin, place)
        held = self._held[rank] + self._bytes(index - 1, begin, place)
        next_load = self._ticks(index, place, end)
        next_held = self._bytes(index, place, end)
        if rank == next_rank:
            load = load + next_load
            held = held + next_held
            return self._excess(rank, held), max(load, others), float(load) ** 2
        next_load = self._loads[next_rank] + next_load
        next_held = self._held[next_rank] + next_held
        transfer = self._transfer[place]
        if self._blocking:
            load = load + transfer
            next_load = next_load + transfer
        excess = self._excess(rank, held) + self._excess(next_rank, next_held)
        return excess, max(load, next_load, transfer, others), float(load) ** 2 + float(next_load) ** 2
