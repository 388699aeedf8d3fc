"""Chain: given one order of the blocks, looks for a partition in which no stage takes longer than a bound.

Usually the probe puts as many layers into each stage as the bound allows, which leaves the fewest layers for later
stages. This can miss a partition in three situations:

- Stages wait for transfers. A stage with fewer layers can then take longer, because it can send larger tensors.
- Stages must not be empty, and the ranks have different speeds or memory limits. The layers that remain for a later
  rank can then be too large for it.
- Ranks have memory limits and can be used in any order.

In these situations the probe computes, slot by slot, all cuts at which a stage can end.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.bisection import INFINITE, Fails, FoundPartition
from pipesched.partitioning.blocks import Cuts
from pipesched.partitioning.slots import RankLayout, StageSlot, TransferCost
from pipesched.program.action_arrays import Ints

__all__ = ["ChainSearch"]

Bools = NDArray[np.bool_]


class ChainSearch:
    """Searches the partitions of one order of the blocks.

    Args:
        order: the blocks, in the order to search.
        cuts: the total costs of the layers before each cut of this order.
        transfer: the transfer time at each cut.
        layout: the slots, that is, which stages can run on which ranks.
        spans: entry k is the first and the last cut at which stage k - 1 is allowed to end.

    """

    def __init__(
        self, order: list[int], cuts: Cuts, transfer: TransferCost, layout: RankLayout, spans: Sequence[tuple[int, int]]
    ) -> None:
        self._order = order
        self._end = len(cuts) - 1
        self._transfer = transfer
        self._layout = layout
        self._spans = spans
        weighed = {speed: slot.weighed(cuts, transfer) for speed, slot in _each(layout, "speed")}
        memory = {held: slot.memory(cuts) for held, slot in _each(layout, "in_flight")} if layout.capped else {}
        self._weighed = [weighed[slot.speed] for slot in layout.slots]
        self._memory = [None if slot.limit is None else memory[slot.in_flight] for slot in layout.slots]
        self._fills = not transfer.blocking and _later_is_better(layout)
        if self._fills:
            prefix = {speed: ends.tolist() for speed, (ends, _) in weighed.items()}
            held = {count: sums.tolist() for count, sums in memory.items()}
            self._sums = [
                (prefix[slot.speed], slot.speed.numerator, None if slot.limit is None else held[slot.in_flight])
                for slot in layout.slots
            ]

    def probe(self, bound: int) -> FoundPartition | Fails:
        """Find a partition with a bottleneck of at most ``bound`` ticks.

        Each stage gets as many layers as the bound allows, unless this could miss a partition.
        """
        return self._fill(bound) if self._fills else self._reach(bound)

    # ---- filling ----------------------------------------------------------------------------------------------------

    def _fill(self, bound: int) -> FoundPartition | Fails:
        layout = self._layout
        end = self._end
        spans = self._spans
        snap, following = self._allowed(bound)
        highs = self._highs(snap)
        reach = [0, *[-1] * (layout.num_states - 1)]
        closed_by: list[tuple[int, bool] | None] = [None] * layout.num_states
        for index, slot in enumerate(layout.slots):
            start = reach[slot.source]
            if start < 0:
                continue
            prefix, per_tick, held = self._sums[index]
            stop = bisect_right(prefix, prefix[start] + bound * per_tick, start) - 1
            if stop < end:
                following = min(following, -((prefix[start] - prefix[stop + 1]) // per_tick))
            if held is not None and slot.limit is not None:
                stop = min(stop, bisect_right(held, held[start] + slot.limit, start) - 1)
            stop = min(stop, highs[slot.stage + 1])
            if snap is not None:
                stop = snap[stop]
            if stop <= start:
                if slot.stage < layout.skippable:
                    continue
                stop = start
            if stop > reach[slot.target] and stop >= spans[slot.stage + 1][0]:
                reach[slot.target] = stop
                closed_by[slot.target] = index, stop > start
        state = next((state for state in layout.accepted if reach[state] == end), None)
        return Fails(following) if state is None else self._filled(state, reach, closed_by)

    def _allowed(self, bound: int) -> tuple[list[int] | None, int]:
        """For each cut c, return the last allowed cut up to c. Also return the next bound that allows more cuts.

        A cut is allowed if the transfer time at the cut is within the bound. If all cuts are allowed, the first result
        is None.
        """
        ticks = self._transfer.ticks
        beyond = ticks[ticks > bound]
        if not len(beyond):
            return None, INFINITE
        places = np.where(ticks <= bound, np.arange(len(ticks)), 0)
        return np.maximum.accumulate(places).tolist(), int(beyond.min())

    def _highs(self, snap: list[int] | None) -> list[int]:
        """For each k, return the last cut at which the first k stages can end so that each later stage gets a block.

        A later stage that is allowed to stay empty needs no block. ``snap`` is the first result of `_allowed`.
        """
        highs = [high for _, high in self._spans]
        for stage in reversed(range(len(highs) - 1)):
            behind = highs[stage + 1] - (stage < self._layout.skippable)
            highs[stage] = min(highs[stage], behind if snap is None or behind < 0 else snap[behind])
        return highs

    def _filled(self, state: int, reach: list[int], closed_by: list[tuple[int, bool] | None]) -> FoundPartition:
        ends = []
        used = []
        while closed := closed_by[state]:
            index, has_blocks = closed
            if has_blocks:
                ends.append(reach[state])
                used.append(index)
            state = self._layout.slots[index].source
        return self._found(ends[::-1], used[::-1])

    def _found(self, ends: list[int], used: list[int]) -> FoundPartition:
        slots = [self._layout.slots[index] for index in used]
        places = zip(used, slots, pairwise([0, *ends]), strict=True)
        times = [slot.time(int(self._weighed[at][0][b] - self._weighed[at][1][a])) for at, slot, (a, b) in places]
        if not self._transfer.blocking and len(self._transfer.ticks) > 1:
            times += self._transfer.ticks[ends].tolist()
        return FoundPartition(bottleneck=max(times), order=self._order, ends=ends, slots=slots)

    # ---- reaching ---------------------------------------------------------------------------------------------------

    def _reach(self, bound: int) -> FoundPartition | Fails:
        layout = self._layout
        reached = np.zeros((layout.num_states, self._end + 1), bool)
        reached[0, 0] = True
        beyond = np.flatnonzero(self._transfer.ticks > bound) if not self._transfer.blocking else np.zeros(0, np.int64)
        following = int(self._transfer.ticks[beyond].min(initial=INFINITE))
        for index, slot in enumerate(layout.slots):
            costs = self._costs(index, reached[slot.source])
            low, high = self._spans[slot.stage + 1]
            costs[:low] = costs[high + 1 :] = INFINITE
            costs[beyond] = INFINITE
            limit = min(bound * slot.speed.numerator, INFINITE - 1)
            reached[slot.target] |= costs <= limit
            more = costs[costs > limit].min(initial=INFINITE)
            following = min(following, INFINITE if more >= INFINITE else slot.time(int(more)))
            if layout.in_line and slot.stage >= layout.skippable:
                skipped = reached[slot.source].copy()
                skipped[:low] = skipped[high + 1 :] = False
                reached[slot.target] |= skipped
        state = next((state for state in layout.accepted if reached[state, -1]), None)
        return Fails(following) if state is None else self._reached(state, reached, bound)

    def _costs(self, index: int, starts: Bools) -> Ints:
        """Return, for each cut, the least cost of a slot's stage that ends at this cut.

        The cost is INFINITE if no start is possible. ``starts`` is a mask of the cuts at which the stage can start.
        """
        ends, begins = self._weighed[index]
        values = np.where(starts, begins, -INFINITE)
        memory = self._memory[index]
        limit = self._layout.slots[index].limit
        if memory is None or limit is None:
            best = np.maximum.accumulate(np.concatenate([[-INFINITE], values[:-1]]))
        else:
            best = _window_maxima(values, np.searchsorted(memory, memory - limit))
        return np.where(best > -INFINITE, ends - best, INFINITE)

    def _reached(self, state: int, reached: Bools, bound: int) -> FoundPartition:
        """Build the partition from the reachable cuts, last stage first. Each stage starts at the earliest such cut."""
        ends = []
        used = []
        stop = self._end
        while stop:
            if self._layout.in_line and state > self._layout.skippable and reached[state - 1, stop]:
                state -= 1
                continue
            index, start = self._begin(state, stop, reached, bound)
            ends.append(stop)
            used.append(index)
            state = self._layout.slots[index].source
            stop = start
        return self._found(ends[::-1], used[::-1])

    def _begin(self, state: int, stop: int, reached: Bools, bound: int) -> tuple[int, int]:
        for index, slot in enumerate(self._layout.slots):
            if slot.target == state:
                ends, begins = self._weighed[index]
                fits = reached[slot.source, :stop] & (ends[stop] - begins[:stop] <= bound * slot.speed.numerator)
                memory = self._memory[index]
                if memory is not None and slot.limit is not None:
                    fits &= memory[stop] - memory[:stop] <= slot.limit
                if fits.any():
                    return index, int(fits.argmax())
        raise RuntimeError(f"internal error in the search for a partition: no stage leads to state {state}")


def _later_is_better(layout: RankLayout) -> bool:
    """Return whether a stage that starts at a later cut can always end at the same cut or a later cut.

    If so, no partition is missed if each stage gets as many layers as possible.
    """
    if layout.exactly or layout.skippable:
        return len({(rank.speed, rank.limit) for rank in layout.ranks}) == 1 and not layout.capped
    return layout.in_line or not layout.capped


def _each(layout: RankLayout, name: str) -> list[tuple[object, StageSlot]]:
    """Return the distinct values of a slot attribute, each with one slot that has this value."""
    return list({getattr(slot, name): slot for slot in layout.slots}.items())


def _window_maxima(values: Ints, lefts: Ints) -> Ints:
    """Return, for each index i, the maximum of ``values[lefts[i]:i]``; -INFINITE if this slice is empty."""
    places = np.arange(len(values))
    best = np.full(len(values), -INFINITE)
    table = values
    width = 1
    length = places - lefts
    while width < len(values) + 1:
        chosen = np.flatnonzero((length >= width) & (length < 2 * width))
        best[chosen] = np.maximum(table[lefts[chosen]], table[places[chosen] - width])
        table = np.maximum(table, np.concatenate([table[width:], np.full(min(width, len(table)), -INFINITE)]))
        width *= 2
    return best
