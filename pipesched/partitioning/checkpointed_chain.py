"""Checkpointed chain: searches one order of the blocks, with a choice of activation options for each layer.

The time of a stage is the shortest time in which its layers can run within the rank's memory (see `knapsack`). More
layers never make a stage faster. A run is a set of consecutive cuts. If a stage can start at each cut of a run, the
cuts at which the stage can end are also a run. The last start leads to the last end, so the search computes only this
end. A block that alone takes longer than the bound fits into no stage. Such a block splits a run of starts into two
runs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.bisection import INFINITE, Fails, FoundPartition
from pipesched.partitioning.knapsack import Knapsack
from pipesched.partitioning.slots import RankLayout, StageSlot, TransferCost

__all__ = ["CheckpointedChain"]

Run = tuple[int, int]  # consecutive cuts, given by the first and the last cut of the run


@dataclass(frozen=True)
class _Row:
    """The layers, sorted by the positions of their blocks in the order that is searched."""

    layers: Sequence[int]
    #: The index in ``layers`` of each block's first layer. The last entry is the number of layers.
    begins: Sequence[int]
    #: For each cut, a lower bound on the time of all blocks before the cut, in ticks.
    fastest: Sequence[int]


class CheckpointedChain:
    """Searches the partitions of one order of the blocks, with a choice of activation options for each layer.

    Args:
        order: the blocks, in the order to search.
        members: the layers of each block.
        options: the activation options of each layer.
        transfer: the transfer time at each cut.
        layout: the slots, that is, which stages can run on which ranks.
        spans: entry k is the first and the last cut at which stage k - 1 is allowed to end.

    """

    def __init__(
        self,
        order: list[int],
        members: Sequence[Sequence[int]],
        options: Sequence[Sequence[ActivationOption]],
        transfer: TransferCost,
        layout: RankLayout,
        spans: Sequence[Run],
    ) -> None:
        self._order = order
        self._end = len(order)
        self._transfer = transfer.ticks.tolist()
        self._layout = layout
        self._spans = spans
        in_order = [members[block] for block in order]
        fastest = [sum(min(c.ticks for c in options[layer]) for layer in block) for block in in_order]
        self._row = _Row(
            [layer for block in in_order for layer in block],
            [0, *accumulate(map(len, in_order))],
            [0, *accumulate(fastest)],
        )
        self.knapsack = Knapsack(options)
        self._items: dict[int, list[int]] = {}
        times: dict[tuple[object, ...], dict[Run, int]] = {}
        self._times = [times.setdefault((s.in_flight, s.limit, s.speed), {}) for s in layout.slots]
        self._alone: list[list[int]] = [[] for _ in layout.slots]

    # ---- the cost of a stage ----------------------------------------------------------------------------------------

    def _held(self, slot: StageSlot, begin: int, end: int) -> list[int]:
        if slot.in_flight not in self._items:
            self._items[slot.in_flight] = [self.knapsack.item(layer, slot.in_flight) for layer in self._row.layers]
        return self._items[slot.in_flight][self._row.begins[begin] : self._row.begins[end]]

    def time(self, slot: StageSlot, begin: int, end: int) -> int:
        """Return the shortest time in ticks of a stage between two cuts; INFINITE if memory is too small."""
        known = self._times[slot.stage]
        ticks = known.get((begin, end))
        if ticks is None:
            ticks = known[begin, end] = self.knapsack.least(self._held(slot, begin, end), slot.limit, slot.speed)
        return ticks

    def with_choices(self, found: FoundPartition) -> FoundPartition:
        """Choose an activation option for each layer, and return a copy of the partition with these options."""
        chosen: list[ActivationOption] = []
        for slot, (begin, end) in zip(found.slots, pairwise([0, *found.ends]), strict=True):
            chosen += self.knapsack.chosen(self._held(slot, begin, end), slot.limit, slot.speed)
        of_layer = dict(zip(self._row.layers, chosen, strict=True))
        return replace(found, chosen=tuple(of_layer[layer] for layer in range(len(of_layer))))

    # ---- reachable cuts ---------------------------------------------------------------------------------------------

    def probe(self, bound: int) -> FoundPartition | Fails:
        """Find a partition with a bottleneck of at most ``bound`` ticks. Earlier stages are as large as possible."""
        following = INFINITE
        bound = min(bound, INFINITE - 1)
        reached: list[list[Run]] = [[(0, 0)]]
        for slot in self._layout.slots:
            ends: list[Run] = []
            for begins in reached[-1]:
                for first, last in self._fitting(slot, begins, bound):
                    end = self._furthest(slot, last, bound)
                    ends.append((first + 1, end))
                    if end < self._end:
                        following = min(following, self.time(slot, last, end + 1))
            following = min(following, self._next_alone(slot, reached[-1], bound))
            if self._may_be_empty(slot):
                ends += reached[-1]
            ends = _joined(ends, *self._spans[slot.stage + 1])
            following = min(following, self._next_toll(ends, bound))
            reached.append(self._allowed(ends, bound))
        if not _holds(reached[-1], self._end):
            return Fails(following)
        return self._found(reached, bound)

    def _may_be_empty(self, slot: StageSlot) -> bool:
        return slot.stage >= self._layout.skippable

    def _single(self, slot: StageSlot) -> list[int]:
        """Return, for each block, the ticks of a stage with only this block. The last entry is the maximum."""
        if not self._alone[slot.stage]:
            kinds = [tuple(self._held(slot, block, block + 1)) for block in range(self._end)]
            ticks = {kind: self.knapsack.least(kind, slot.limit, slot.speed) for kind in {*kinds}}
            own = [ticks[kind] for kind in kinds]
            self._alone[slot.stage] = [*own, max(own)]
        return self._alone[slot.stage]

    def _fitting(self, slot: StageSlot, begins: Run, bound: int) -> Iterator[Run]:
        """Remove impossible starts from a run of stage starts, and yield the runs that remain.

        A start is impossible if the first block of the stage alone takes longer than the bound.
        """
        first = begins[0]
        last = min(begins[1], self._end - 1)
        single = self._single(slot)
        for begin in range(first, last + 1) if single[-1] > bound else ():
            if single[begin] > bound:
                if first < begin:
                    yield first, begin - 1
                first = begin + 1
        if first <= last:
            yield first, last

    def _next_alone(self, slot: StageSlot, begins: Sequence[Run], bound: int) -> int:
        """Return the smallest bound above ``bound`` that makes more starts possible; INFINITE if no bound does.

        ``begins`` are the runs of starts to consider. A start is possible if the first block of the stage alone takes
        no longer than the bound.
        """
        single = self._single(slot)
        if single[-1] <= bound:
            return INFINITE
        times = (single[begin] for first, last in begins for begin in range(first, min(last + 1, self._end)))
        return min((ticks for ticks in times if ticks > bound), default=INFINITE)

    def _furthest(self, slot: StageSlot, begin: int, bound: int) -> int:
        """Return the last cut at which a stage that starts at ``begin`` can end within the bound.

        The caller has checked that the first block of the stage alone is within the bound.
        """
        fastest = self._row.fastest
        speed = slot.speed
        within = fastest[begin] + bound * speed.numerator // speed.denominator
        last = bisect_right(fastest, within, begin + 1) - 1
        if self.time(slot, begin, last) <= bound:
            return last
        ends = range(begin + 2, last)
        return begin + 1 + bisect_right(ends, bound, key=lambda end: self.time(slot, begin, end))

    def _next_toll(self, ends: Sequence[Run], bound: int) -> int:
        if len(self._transfer) == 1:
            return INFINITE
        tolls = (self._transfer[end] for first, last in ends for end in range(first, last + 1))
        return min((ticks for ticks in tolls if ticks > bound), default=INFINITE)

    def _allowed(self, ends: list[Run], bound: int) -> list[Run]:
        """Remove the cuts whose transfer time exceeds the bound, and return the runs that remain."""
        if len(self._transfer) == 1:
            return ends
        return _joined([(e, e) for first, last in ends for e in range(first, last + 1) if self._transfer[e] <= bound])

    # ---- a partition ------------------------------------------------------------------------------------------------

    def _found(self, reached: Sequence[Sequence[Run]], bound: int) -> FoundPartition:
        ends = []
        slots = []
        stop = self._end
        for begins, slot in zip(reached[-2::-1], self._layout.slots[::-1], strict=True):
            begin = _last_before(begins, stop)
            if begin is not None and self.time(slot, begin, stop) <= bound:
                ends.append(stop)
                slots.append(slot)
                stop = begin
        return self._as_found(ends[::-1], slots[::-1])

    def _as_found(self, ends: list[int], slots: list[StageSlot]) -> FoundPartition:
        times = [self.time(slot, begin, end) for slot, (begin, end) in zip(slots, pairwise([0, *ends]), strict=True)]
        if len(self._transfer) > 1:
            times += [self._transfer[end] for end in ends]
        return FoundPartition(bottleneck=max(times), order=self._order, ends=ends, slots=slots)

    def settled(self, found: FoundPartition) -> FoundPartition:
        """Return the partition with the least total time of all stages and the same bottleneck as ``found``.

        On ties, the times of the stages are as even as possible. The result includes the activation option of each
        layer. If ``found`` has fewer stages than there are slots, the result has the cuts of ``found``.
        """
        slots = self._layout.slots
        fastest = self._row.fastest
        bottleneck = found.bottleneck
        if len(found.slots) < len(slots):
            return self.with_choices(found)
        # For each stage: {end cut: (total ticks, sum of squared ticks, start cut of the stage)}.
        best: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
        rooms = [bottleneck * slot.speed.numerator // slot.speed.denominator for slot in slots]
        left = sum(rooms)
        for slot, room in zip(slots, rooms, strict=True):
            left -= room
            first, high = self._spans[slot.stage + 1]
            first = max(first, bisect_left(fastest, fastest[-1] - left))  # later stages must run the rest
            ends: dict[int, tuple[int, int, int]] = {}
            for begin, (ticks, squares, _) in best[-1].items():
                last = bisect_right(fastest, fastest[begin] + room, begin, high + 1) - 1
                for end in range(max(first, begin + 1), last + 1):
                    own = self.time(slot, begin, end) if self._toll_of(end) <= bottleneck else INFINITE
                    value = ticks + own, squares + own * own, begin
                    if own <= bottleneck and (end not in ends or value < ends[end]):
                        ends[end] = value
            best.append(ends)
        cuts = [self._end]
        for ends in best[:0:-1]:
            cuts.append(ends[cuts[-1]][2])
        return self.with_choices(self._as_found(cuts[-2::-1], list(slots)))

    def _toll_of(self, cut: int) -> int:
        return self._transfer[cut] if len(self._transfer) > 1 else 0


def _joined(runs: Sequence[Run], first: int = 0, last: int = INFINITE) -> list[Run]:
    """Merge runs that touch or overlap, and restrict them to the cuts from ``first`` to ``last``."""
    joined: list[Run] = []
    for low, high in sorted(runs):
        begin = max(low, first)
        end = min(high, last)
        if begin > end:
            continue
        if joined and begin <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _holds(runs: Sequence[Run], cut: int) -> bool:
    return any(first <= cut <= last for first, last in runs)


def _last_before(runs: Sequence[Run], cut: int) -> int | None:
    """Return the last cut before ``cut`` that lies in one of the runs, or None if no cut does."""
    at = bisect_left(runs, (cut, 0))
    return min(runs[at - 1][1], cut - 1) if at else None
