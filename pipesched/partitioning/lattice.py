"""Lattice: looks for a partition within a bound among all orders of a graph, by dynamic programming on order ideals.

A stage is the difference between two order ideals (see `order_ideals`). The cost of a stage is the difference between
two numbers, one for the ideal at the end of the stage and one for the ideal at the start. For each slot and each ideal
at which a stage can end, it is therefore enough to store the best ideal for the start of the stage. These start ideals
are computed level by level, for all slots and ideals of a level together.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.bisection import INFINITE, Fails, FoundPartition
from pipesched.partitioning.order_ideals import Ideals
from pipesched.partitioning.pareto_fronts import Front
from pipesched.partitioning.slots import RankLayout, StageSlot, TransferCost
from pipesched.program.action_arrays import Ints

__all__ = ["Lattice"]

Bools = NDArray[np.bool_]


class Lattice:
    """Searches the partitions of a graph: each stage starts and ends at an order ideal.

    Args:
        ideals: all order ideals of the blocks.
        transfer: the transfer time at each ideal's cut.
        layout: the slots, that is, which stages can run on which ranks.
        allowed: entry k is a mask of the ideals at which stage k - 1 is allowed to end. Stages without an entry can end
            at any ideal.
        ceiling: the bottleneck of a known partition. Larger bounds are not probed.

    """

    def __init__(
        self, ideals: Ideals, transfer: TransferCost, layout: RankLayout, allowed: Mapping[int, Bools], ceiling: int
    ) -> None:
        self._ideals = ideals
        self._transfer = transfer
        self._layout = layout
        self._allowed = allowed
        slots = layout.slots
        cuts = ideals.cuts
        speeds = sorted({slot.speed for slot in slots})
        weighed = [next(s for s in slots if s.speed == speed).weighed(cuts, transfer) for speed in speeds]
        self._ends, self._begins = (np.stack(column) for column in zip(*weighed, strict=True))
        self._kind = np.array([speeds.index(slot.speed) for slot in slots])
        self._sources = np.array([slot.source for slot in slots])
        targets = np.array([slot.target for slot in slots])
        self._first_of_target = np.searchsorted(targets, np.arange(1, layout.num_states))
        self._memory: Ints | None = None
        if layout.capped:
            self._memory = np.stack([slot.memory(cuts) for slot in slots])
            most = int(self._memory.max())
            self._caps = np.array([most if slot.limit is None else slot.limit for slot in slots])
        self._least = np.minimum.reduceat(cuts.work, ideals.levels[:-1])
        self._most = np.maximum.reduceat(cuts.work, ideals.levels[:-1])
        self._bands = self._bands_below(ceiling)

    def probe(self, bound: int) -> FoundPartition | Fails:
        """Find a partition within the bound.

        Prefers the partition with the fewest stages and, on ties, the fewest bytes across the last cut.
        """
        layout = self._layout
        ideals = self._ideals
        limits = np.array([min(bound * slot.speed.numerator, INFINITE - 1) for slot in layout.slots])
        closed = np.zeros((len(layout.slots), len(ideals)), bool)
        crossing = (
            self._transfer.ticks[self._transfer.ticks > bound] if not self._transfer.blocking else np.zeros(0, np.int64)
        )
        open_cuts = self._transfer.ticks <= bound if len(crossing) else None
        following = int(crossing.min(initial=INFINITE))
        front = Front(len(layout.slots), capped=layout.capped)
        for level in range(len(ideals.levels) - 1):
            first, last = ideals.levels[level : level + 2]
            rows = slice(*self._bands[level])
            if level:
                front = front.down(ideals, level, rows)
                ends = self._column(self._ends, rows, first, last)
                costs = front.costs(rows, ends, self._least_memory(rows, first, last))
                within = costs <= limits[rows, None]
                more = np.where(within, INFINITE, costs).min(axis=1, initial=INFINITE)
                following = min([following, *self._times(more, rows)])
                closed[rows, first:last] = within if open_cuts is None else within & open_cuts[first:last]
                self._keep_pins(closed, first, last)
            begun = self._reached(closed[:, first:last], empty=not level)[self._sources[rows]]
            front.begin(rows, begun, self._column(self._begins, rows, first, last), self._memory_of(rows, first, last))
        reached = self._reached(closed[:, -1:], empty=len(ideals) == 1)[:, 0]
        state = next((state for state in layout.accepted if reached[state]), None)
        return Fails(following) if state is None else self._found(state, closed, limits)

    def _bands_below(self, bound: int) -> list[tuple[int, int]]:
        """Return, for each level, the range of slots whose stages can end at an ideal of this level.

        The range depends on the work that all other slots can do within the bound.
        """
        count = len(self._layout.slots)
        if not self._layout.in_line:
            return [(0, count)] * len(self._least)
        total = int(self._most[-1])
        able = [bound * slot.speed.numerator // slot.speed.denominator + 1 for slot in self._layout.slots]
        up_to = np.array([min(total, done) for done in accumulate(able)])
        behind = np.array([min(total, done) for done in accumulate(reversed(able))][::-1])
        first = np.searchsorted(up_to, self._least)
        last = np.searchsorted(-behind, self._most - total, "right")
        return list(zip(np.minimum(first, count - 1).tolist(), np.maximum(last, 1).tolist(), strict=True))

    def _column(self, of_kinds: Ints, rows: slice, first: int, last: int) -> Ints:
        part = of_kinds[:, first:last]
        return part if len(of_kinds) == 1 else part[self._kind[rows]]

    def _memory_of(self, rows: slice, first: int, last: int) -> Ints | None:
        return None if self._memory is None else self._memory[rows, first:last]

    def _least_memory(self, rows: slice, first: int, last: int) -> Ints | None:
        """For each slot and each ideal at which a stage can end, return the fewest bytes of the blocks before it.

        The size of all blocks up to the end is fixed. With fewer bytes before the stage, the stage itself would have
        more bytes than the slot's memory limit.
        """
        if self._memory is None:
            return None
        return np.asarray(self._memory[rows, first:last] - self._caps[rows, None])

    def _times(self, costs: Ints, rows: slice) -> list[int]:
        slots = self._layout.slots[rows]
        return [slot.time(cost) for slot, cost in zip(slots, costs.tolist(), strict=True) if cost < INFINITE // 2]

    def _keep_pins(self, closed: Bools, first: int, last: int) -> None:
        for index, slot in enumerate(self._layout.slots):
            if slot.stage + 1 in self._allowed:
                closed[index, first:last] &= self._allowed[slot.stage + 1][first:last]

    def _reached(self, closed: Bools, *, empty: bool) -> Bools:
        """Return a mask of the reachable pairs of a state and an ideal, with shape (states, ideals).

        A pair is reachable if the blocks of the ideal can be divided into stages that lead to the state. Stages that
        are allowed to stay empty can be skipped. ``empty`` is True if the only ideal is the empty set.
        """
        reached = np.zeros((self._layout.num_states, closed.shape[1]), bool)
        reached[0] = empty
        reached[1:] = np.logical_or.reduceat(closed, self._first_of_target, axis=0)
        if self._layout.in_line:
            some = self._layout.skippable
            np.logical_or.accumulate(reached[some:], axis=0, out=reached[some:])
        return reached

    def _reached_in(self, state: int, closed: Bools) -> Bools:
        """Return a mask of the ideals whose blocks can be divided into the stages that lead to ``state``."""
        skippable = self._layout.skippable if self._layout.in_line else self._layout.num_states
        fewest = min(state, skippable)
        rows = [index for index, slot in enumerate(self._layout.slots) if fewest <= slot.target <= state]
        reached = np.logical_or.reduce(closed[rows], axis=0) if rows else np.zeros(closed.shape[1], bool)
        reached[0] = fewest == 0
        return np.asarray(reached)

    # ---- the stages ------------------------------------------------------------------------------------------------

    def _found(self, state: int, closed: Bools, limits: Ints) -> FoundPartition:
        ideal = len(self._ideals) - 1
        stages: list[tuple[StageSlot, list[int]]] = []
        bottleneck = 0
        while ideal:
            reached = self._reached(closed[:, ideal : ideal + 1], empty=False)[:, 0]
            while self._layout.in_line and state > self._layout.skippable and reached[state - 1]:
                state -= 1
            index, begin, below = self._begin(state, ideal, closed, limits)
            slot = self._layout.slots[index]
            kind = self._kind[index]
            bottleneck = max(bottleneck, slot.time(int(self._ends[kind, ideal] - self._begins[kind, begin])))
            if not self._transfer.blocking and len(self._transfer.ticks) > 1:
                bottleneck = max(bottleneck, int(self._transfer.ticks[begin]))
            stages.append((slot, self._between(begin, ideal, below)))
            state = slot.source
            ideal = begin
        stages.reverse()
        order = [block for _, members in stages for block in members]
        ends = np.cumsum([len(members) for _, members in stages]).tolist()
        return FoundPartition(bottleneck=bottleneck, order=order, ends=ends, slots=[slot for slot, _ in stages])

    def _begin(self, state: int, ideal: int, closed: Bools, limits: Ints) -> tuple[int, int, Bools]:
        """Find the stage that ends at an ideal.

        Returns the index of the stage's slot, the ideal at which the stage starts, and the mask that `_below` returns.
        """
        sent = self._ideals.cuts.sent_bytes
        for index, slot in enumerate(self._layout.slots):
            if slot.target == state and closed[index, ideal]:
                end = self._ends[self._kind[index], ideal]
                begins = self._begins[self._kind[index]]
                fits = begins >= end - limits[index]
                if self._memory is not None:
                    fits &= self._memory[index] >= self._memory[index, ideal] - self._caps[index]
                below = self._below(ideal, int(self._ends[self._kind[index], ideal] - limits[index]), index)
                reached = self._reached_in(slot.source, closed)
                chosen = np.flatnonzero(fits & below & reached)
                if len(chosen):
                    return index, int(chosen[sent[chosen].argmin()]), below
        raise RuntimeError(f"internal error in the search for a partition: no stage leads to state {state}")

    def _below(self, ideal: int, least: int, index: int) -> Bools:
        """Return a mask of the ideals contained in ``ideal`` whose work is at least ``least``.

        If there were less work before a stage that ends at ``ideal``, the stage would take longer than the bound.
        """
        ideals = self._ideals
        ends = self._ends[self._kind[index]]
        below = np.zeros(len(ideals), bool)
        below[ideal] = True
        for level in range(bisect_right(ideals.levels, ideal) - 1, 0, -1):
            steps = self._steps(level)
            parents = ideals.parents[steps][below[ideals.children[steps]]]
            parents = parents[ends[parents] >= least]
            if not len(parents):
                break
            below[parents] = True
        below[ideal] = False
        return below

    def _between(self, begin: int, ideal: int, below: Bools) -> list[int]:
        """Return the blocks of the stage between two ideals, in ascending order."""
        ideals = self._ideals
        above = np.zeros(len(ideals), bool)
        above[begin] = below[ideal] = True
        bottom, top = (bisect_right(ideals.levels, at) - 1 for at in (begin, ideal))
        for level in range(bottom + 1, top + 1):
            steps = self._steps(level)
            children = ideals.children[steps][above[ideals.parents[steps]]]
            above[children[below[children]]] = True
        members = []
        while ideal != begin:
            steps = slice(ideals.steps[ideal], ideals.steps[ideal + 1])
            step = int(above[ideals.parents[steps]].argmax()) + int(ideals.steps[ideal])
            members.append(int(ideals.added[step]))
            ideal = int(ideals.parents[step])
        return sorted(members)

    def _steps(self, level: int) -> slice:
        first, last = self._ideals.levels[level : level + 2]
        return slice(self._ideals.steps[first], self._ideals.steps[last])
