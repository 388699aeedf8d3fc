"""Building blocks: Pipeline Parallelism with Controllable Memory (Qi et al. 2024,
arXiv:2405.15362).

A building block says in which slot one micro-batch runs its forward and its input gradient on every stage. Repeated at
an interval that leaves no two passes of a rank in one slot, it is a schedule, and the time that activations live in
the block, over the interval, is how many of them a rank holds. Weight gradients fill the slots in between.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pipesched.errors import ScheduleError
from pipesched.program.order import Order, Shape

__all__ = ["repeated"]


class Pass(NamedTuple):
    """The forward or the input gradient of a stage, for its next micro-batch."""

    stage: int
    backward: bool


#: Passes that have ended, each with its micro-batch.
Ended = set[tuple[Pass, int]]


def repeated(
    shape: Shape, block: Mapping[int, tuple[int, int]], *, interval: int, max_in_flight: int, early_forwards: bool
) -> list[Order]:
    """The orders of all ranks: the block for each micro-batch, ``interval`` slots apart, with the gaps squeezed out.

    On a clock of equal passes every rank runs the first pass of the block that is ready and, where none is or memory
    is full, a weight gradient. So input gradients move up where what stands before them has to wait.
    block: for each stage the slots of the forward and of the input gradient of micro-batch 0.
    max_in_flight: how many (stage, micro-batch) pairs a rank may hold at once.
    early_forwards: whether forwards, too, may move up, as far as the rest of the block then stays within that limit.
    Raises ScheduleError for a block that no rank can follow.
    """
    ranks = [_Rank(shape, rank, block, interval, max_in_flight) for rank in range(shape.num_ranks)]
    ended: Ended = set()
    while left := sum(rank.left for rank in ranks):
        ended |= {run for rank in ranks if (run := rank.run_slot(ended, early_forwards))}
        if left == sum(rank.left for rank in ranks):
            raise ScheduleError(
                f"a block runs each pass after what it needs, within memory; {left} actions wait for each other with "
                f"{max_in_flight} micro-batches in flight; move slots of {dict(block)}, or raise the limit"
            )
    return [rank.order for rank in ranks]


class _Rank:
    """One rank: what it has still to run, in the block's order, and what it has written."""

    def __init__(
        self, shape: Shape, rank: int, block: Mapping[int, tuple[int, int]], interval: int, max_in_flight: int
    ) -> None:
        slots = [
            (slot + interval * microbatch, Pass(stage, bool(backward)))
            for stage in shape.chunks(rank)
            for backward, slot in enumerate(block[stage])
            for microbatch in range(shape.num_microbatches)
        ]
        self.order = Order(shape)
        self.left = 3 * shape.num_microbatches * len(shape.chunks(rank))  # actions still to write
        self._passes = [each for _, each in sorted(slots)]
        self._distinct = len(set(self._passes))
        self._last_stage = shape.num_stages - 1
        self._count: Counter[Pass] = Counter()
        self._limit = max_in_flight
        self._held = 0  # pairs, from F to the end of W
        self._owed: list[int] = []  # the stages of the weight gradients that can run, the oldest first

    def run_slot(self, ended: Ended, early_forwards: bool) -> tuple[Pass, int] | None:
        """Run what one slot has time for, if anything can run. Returns the pass, with its micro-batch."""
        position = self._choose(ended, early_forwards)
        if position is None or (self._held == self._limit and not self._passes[position].backward):
            self._run_weight_gradient()
            return None
        return self._run(self._passes.pop(position))

    def _choose(self, ended: Ended, early_forwards: bool) -> int | None:
        """The position of the first pass that can run; a later one of its stage and kind never runs before it."""
        seen: set[Pass] = set()
        for position, each in enumerate(self._passes):
            if each in seen:
                continue
            may_move = position == 0 or each.backward or (early_forwards and self._fits_before(position))
            if may_move and self._is_ready(each, ended):
                return position
            seen.add(each)
            if len(seen) == self._distinct:
                break
        return None

    def _is_ready(self, each: Pass, ended: Ended) -> bool:
        stage, backward = each
        microbatch = self._count[each]
        needs = [Pass(stage, False)] if backward else []
        if backward and stage < self._last_stage:
            needs.append(Pass(stage + 1, True))
        elif not backward and stage > 0:
            needs.append(Pass(stage - 1, False))
        return all((need, microbatch) in ended for need in needs)

    def _fits_before(self, position: int) -> bool:
        """Whether all that stands before a forward can still run after it: each weight gradient as soon as it can."""
        held = self._held - len(self._owed) + 1
        if held > self._limit:
            return False
        for _, backward in self._passes[:position]:
            held += -1 if backward else 1
            if held > self._limit:
                return False
        return True

    def _run(self, each: Pass) -> tuple[Pass, int]:
        microbatch = self._count[each]
        self._count[each] += 1
        self.left -= 1
        if each.backward:
            self.order.I(each.stage)
            self._owed.append(each.stage)
        else:
            self.order.F(each.stage)
            self._held += 1
        return each, microbatch

    def _run_weight_gradient(self) -> None:
        if self._owed:
            self.order.W(self._owed.pop(0))
            self.left -= 1
            self._held -= 1
