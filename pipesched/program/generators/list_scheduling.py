"""List scheduling: the orders of all ranks at once, written down while a virtual clock runs (Graham 1969).

For placements without a rule in closed form. Whenever a rank is free it starts the first action of a list of priorities
that can start now: a backward before a forward, and of either the one that is furthest on its way.

A limit on memory can stop such a rule for ever: a rank is full of young micro-batches while the oldest one, without
which nobody goes on, finds no place. So a forward starts only where all micro-batches that its rank holds could then
be finished within the limit one after the other, the oldest first (the banker's algorithm, Dijkstra 1965). The oldest
micro-batch of all may therefore always go on, on every rank, and the clock never stops before the end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from pipesched.errors import ScheduleError
from pipesched.program.order import Order, Shape

__all__ = ["backward_first", "whole_waves"]


def whole_waves(shape: Shape) -> int:
    """How many times a `v` placement goes down the ranks and up again. Raises ScheduleError for half a wave."""
    waves, half = divmod(shape.chunks_per_rank, 2)
    if half:
        even = 2 * max(1, waves)
        raise ScheduleError(
            f"a wave holds 2 stages on each rank, one down the ranks and one up; asked for {shape.chunks_per_rank}; "
            f"cut the model into {even * shape.num_ranks} stages for {shape.num_ranks} ranks (chunks_per_rank={even})"
        )
    return waves


def backward_first(
    shape: Shape, *, max_in_flight: int, windows: Iterable[int], forward_time: int = 1, backward_time: int = 2
) -> list[Order]:
    """The orders that greedy list scheduling writes for a chain of stages, with full backwards; valid and exact.

    max_in_flight: at most so many (stage, micro-batch) pairs on a rank, at least its chunks.
    windows: a rank's forwards are less than so many micro-batches ahead of its oldest unfinished one, at least 1. Of
    several windows the one that ends first is taken: running ahead as far as memory lets can be slower.
    forward_time, backward_time: of every stage alike, in any unit.
    """
    if max_in_flight < shape.chunks_per_rank:
        raise ScheduleError(
            f"a micro-batch needs a place in each chunk of a rank; {max_in_flight} may be in flight, a rank has "
            f"{shape.chunks_per_rank} chunks; pass max_in_flight={shape.chunks_per_rank} or more"
        )
    runs = []
    for window in sorted({min(max(1, window), shape.num_microbatches) for window in windows}):
        clock = _Clock(shape)
        ranks = [_Rank(clock, rank, max_in_flight, window) for rank in range(shape.num_ranks)]
        runs.append((_run(clock, ranks, forward_time, backward_time), [rank.order for rank in ranks]))
    return min(runs, key=itemgetter(0))[1]


def _run(clock: "_Clock", ranks: list["_Rank"], forward_time: int, backward_time: int) -> int:
    """Run to the end; returns the makespan."""
    left = 2 * clock.shape.num_stages * clock.shape.num_microbatches
    while left:
        for rank in ranks:
            if rank.free_at <= clock.now:
                left -= rank.starts_backward(backward_time) or rank.starts_forward(forward_time)
        clock.now = min(rank.free_at for rank in ranks if rank.free_at > clock.now)
    return max(rank.free_at for rank in ranks)


@dataclass
class _Clock:
    """What every rank sees: the time, and when each stage's forwards and backwards end, by micro-batch."""

    shape: Shape
    now: int = 0
    forwards: list[list[int]] = field(init=False)
    backwards: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = [[] for _ in range(self.shape.num_stages)]
        self.backwards = [[] for _ in range(self.shape.num_stages)]

    def ended(self, ends: list[int], microbatch: int) -> bool:
        """Whether this one of a stage's forwards or backwards has ended."""
        return microbatch < len(ends) and ends[microbatch] <= self.now

    def forward_is_ready(self, stage: int) -> bool:
        """Whether the input of the stage's next forward is there."""
        microbatch = len(self.forwards[stage])
        if microbatch == self.shape.num_microbatches:
            return False
        return stage == 0 or self.ended(self.forwards[stage - 1], microbatch)

    def backward_is_ready(self, stage: int) -> bool:
        """Whether the stage's own forward and the next stage's backward are done for the stage's next backward."""
        microbatch = len(self.backwards[stage])
        last = stage == self.shape.num_stages - 1
        return self.ended(self.forwards[stage], microbatch) and (
            last or self.ended(self.backwards[stage + 1], microbatch)
        )


class _Rank:
    """One rank: its order so far, and when it is free again."""

    def __init__(self, clock: _Clock, rank: int, max_in_flight: int, window: int) -> None:
        self.order = Order(clock.shape)
        self.free_at = 0
        self._clock = clock
        self._chunks = clock.shape.chunks(rank)
        self._max_in_flight = max_in_flight
        self._window = window

    def starts_backward(self, time: int) -> bool:
        """Start a backward if one is ready; the nearest to the first stage is the furthest on its way."""
        clock = self._clock
        stage = next((stage for stage in self._chunks if clock.backward_is_ready(stage)), None)
        return stage is not None and self._start(self.order.B, stage, clock.backwards, time)

    def starts_forward(self, time: int) -> bool:
        """Start a forward if one is ready and has a place; the deepest stage is the furthest on its way."""
        clock = self._clock
        ready = (stage for stage in reversed(self._chunks) if clock.forward_is_ready(stage) and self._has_place(stage))
        stage = next(ready, None)
        return stage is not None and self._start(self.order.F, stage, clock.forwards, time)

    def _start(self, write: Callable[[int], None], stage: int, ends: list[list[int]], time: int) -> bool:
        write(stage)
        self.free_at = self._clock.now + time
        ends[stage].append(self.free_at)
        return True

    def _has_place(self, stage: int) -> bool:
        """Whether all that the rank holds can still be finished within the limit if this stage's forward starts."""
        started = {chunk: len(self._clock.forwards[chunk]) + (chunk == stage) for chunk in self._chunks}
        finished = {chunk: len(self._clock.backwards[chunk]) for chunk in self._chunks}
        free = self._max_in_flight - sum(started.values()) + sum(finished.values())
        oldest = min(finished.values())
        if free < 0 or started[stage] > oldest + self._window:
            return False
        for microbatch in range(oldest, max(started.values())):
            if sum(count <= microbatch for count in started.values()) > free:
                return False
            free += sum(finished[chunk] <= microbatch < started[chunk] for chunk in self._chunks)
        return True
