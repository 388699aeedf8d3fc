"""Building blocks: schedules that run every micro-batch in the same time slots (Qi et al. 2024, arXiv:2405.15362).

A building block contains the time slots of one micro-batch's forward and input gradient on every stage. The block is
repeated at an interval such that no two passes of a rank are in the same slot. If a rank holds the activations of one
micro-batch for t slots, it holds the activations of t / interval micro-batches at once. Weight gradients fill the
remaining slots.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pipesched.errors import ScheduleError
from pipesched.program.order import Order, Shape

__all__ = ["repeated"]


class Pass(NamedTuple):
    """The forward or the input gradient of a stage, for the stage's next micro-batch."""

    stage: int
    backward: bool


#: The passes that have ended, each with its micro-batch.
Ended = set[tuple[Pass, int]]


def repeated(
    shape: Shape, block: Mapping[int, tuple[int, int]], *, interval: int, max_in_flight: int, early_forwards: bool
) -> list[Order]:
    """Write the orders of all ranks by repeating a block for each micro-batch and closing the gaps.

    Each pass takes one slot. In each slot, a rank runs the first of its remaining passes that can run. Input gradients
    may overtake passes that are not ready. If no pass can run, or if the first that can run is a forward and memory is
    full, the rank runs a weight gradient instead.

    Args:
        shape: the ranks, micro-batches and placement.
        block: for each stage, the slots of the forward and the input gradient for micro-batch 0.
        interval: the number of slots between the starts of consecutive micro-batches.
        max_in_flight: the maximum number of (stage, micro-batch) pairs in flight on a rank.
        early_forwards: whether forwards may also overtake passes that are not ready, provided that the overtaken passes
            still fit within ``max_in_flight``.

    Raises:
        ScheduleError: a pass of the block comes before a pass that it needs, or the block exceeds ``max_in_flight``.

    """
    ranks = [_BlockRank(shape, rank, block, interval, max_in_flight) for rank in range(shape.num_ranks)]
    ended: Ended = set()
    while left := sum(rank.left for rank in ranks):
        ended |= {run for rank in ranks if (run := rank.run_slot(ended, early_forwards))}
        if left == sum(rank.left for rank in ranks):
            raise ScheduleError(
                f"every pass of a block must come after its dependencies and fit within the memory limit; with "
                f"max_in_flight={max_in_flight}, {left} actions wait for each other; "
                f"change the slots in {dict(block)}, or raise max_in_flight"
            )
    return [rank.order for rank in ranks]


class _BlockRank:
    """One rank: its remaining passes, sorted by their slots in the repeated blocks, and the order written so far."""

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
        self._passes = [a_pass for _, a_pass in sorted(slots)]
        self._distinct = len(set(self._passes))
        self._last_stage = shape.num_stages - 1
        self._count: Counter[Pass] = Counter()
        self._limit = max_in_flight
        self._held = 0  # (stage, micro-batch) pairs in flight, from F to the end of W
        self._owed: list[int] = []  # stages of the weight gradients that can run, oldest first

    def run_slot(self, ended: Ended, early_forwards: bool) -> tuple[Pass, int] | None:
        """Run one action, if any can run. Return the pass and its micro-batch, or None if no pass ran."""
        position = self._choose(ended, early_forwards)
        if position is None or (self._held == self._limit and not self._passes[position].backward):
            self._run_weight_gradient()
            return None
        return self._run(self._passes.pop(position))

    def _choose(self, ended: Ended, early_forwards: bool) -> int | None:
        """Return the position in ``_passes`` of the first pass that can run, or None.

        Passes of the same stage and kind never overtake each other.
        """
        seen: set[Pass] = set()
        for position, a_pass in enumerate(self._passes):
            if a_pass in seen:
                continue
            may_move = position == 0 or a_pass.backward or (early_forwards and self._fits_before(position))
            if may_move and self._is_ready(a_pass, ended):
                return position
            seen.add(a_pass)
            if len(seen) == self._distinct:
                break
        return None

    def _is_ready(self, a_pass: Pass, ended: Ended) -> bool:
        stage, backward = a_pass
        microbatch = self._count[a_pass]
        needs = [Pass(stage, False)] if backward else []
        if backward and stage < self._last_stage:
            needs.append(Pass(stage + 1, True))
        elif not backward and stage > 0:
            needs.append(Pass(stage - 1, False))
        return all((need, microbatch) in ended for need in needs)

    def _fits_before(self, position: int) -> bool:
        """Return whether the passes before ``position`` still fit in memory after the forward at ``position`` has run.

        Weight gradients are assumed to run immediately.
        """
        held = self._held - len(self._owed) + 1
        if held > self._limit:
            return False
        for _, backward in self._passes[:position]:
            held += -1 if backward else 1
            if held > self._limit:
                return False
        return True

    def _run(self, a_pass: Pass) -> tuple[Pass, int]:
        microbatch = self._count[a_pass]
        self._count[a_pass] += 1
        self.left -= 1
        if a_pass.backward:
            self.order.I(a_pass.stage)
            self._owed.append(a_pass.stage)
        else:
            self.order.F(a_pass.stage)
            self._held += 1
        return a_pass, microbatch

    def _run_weight_gradient(self) -> None:
        if self._owed:
            self.order.W(self._owed.pop(0))
            self.left -= 1
            self._held -= 1
