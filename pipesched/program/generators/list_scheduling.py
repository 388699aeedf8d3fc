"""List scheduling: writes the orders of all ranks while a virtual clock runs (Graham 1969).

List scheduling is for placements without a known closed-form order. A free rank starts the ready action with the
highest priority. B comes before F. Among several ready B (or several ready F), the action of the micro-batch with the
fewest remaining stages comes first.

With a memory limit, this rule alone could deadlock: later micro-batches could fill the memory of a rank, so that the
oldest micro-batch, for which all others wait, does not fit. Therefore a forward starts only if its rank could still
finish all micro-batches that it then holds, one after the other from the oldest, without exceeding the limit (the
banker's algorithm, Dijkstra 1965). The oldest micro-batch can then always proceed, and all actions run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from pipesched.errors import ScheduleError
from pipesched.program.order import Order, Shape
from pipesched.units import counted

__all__ = ["backward_first", "whole_waves"]


def whole_waves(shape: Shape) -> int:
    """Return the number of waves in a `v` placement. A wave is one pass down the ranks and back up.

    Raises ScheduleError if the number of chunks per rank is odd, because the last wave would then be only half a wave.
    """
    waves, half = divmod(shape.chunks_per_rank, 2)
    if half:
        even = 2 * max(1, waves)
        raise ScheduleError(
            f"a schedule of waves needs an even number of chunks per rank, because each wave runs down the ranks and "
            f"back up; got chunks_per_rank={shape.chunks_per_rank}; cut the model into {even * shape.num_ranks} stages "
            f"for {counted(shape.num_ranks, 'rank')} (chunks_per_rank={even})"
        )
    return waves


def backward_first(
    shape: Shape, *, max_in_flight: int, windows: Iterable[int], forward_time: int = 1, backward_time: int = 2
) -> list[Order]:
    """Write the orders of a chain of stages by greedy list scheduling, without splitting B.

    The program is exact (see `Program.exact`). The orders are written for each window, and those with the shortest
    makespan are returned, because running ahead as far as memory allows can be slower.

    Args:
        shape: the ranks, micro-batches and placement.
        max_in_flight: the maximum number of (stage, micro-batch) pairs in flight on a rank; at least the
            rank's number of chunks.
        windows: the windows to try. A window is the number of micro-batches by which a rank's forwards may be ahead of
            its oldest unfinished micro-batch.
        forward_time: the time of a forward, the same for all stages, in any unit.
        backward_time: the time of a B, the same for all stages, in the same unit.

    Raises:
        ScheduleError: ``max_in_flight`` is less than the number of chunks per rank.

    """
    if max_in_flight < shape.chunks_per_rank:
        raise ScheduleError(
            f"every chunk of a rank needs room for one micro-batch, so max_in_flight must be at least the number of "
            f"chunks per rank; max_in_flight is {max_in_flight}, but a rank has "
            f"{counted(shape.chunks_per_rank, 'chunk')}; pass max_in_flight={shape.chunks_per_rank} or more"
        )
    runs = []
    for window in sorted({min(max(1, window), shape.num_microbatches) for window in windows}):
        clock = _Clock(shape)
        ranks = [_ListRank(clock, rank, max_in_flight, window) for rank in range(shape.num_ranks)]
        runs.append((_run(clock, ranks, forward_time, backward_time), [rank.order for rank in ranks]))
    return min(runs, key=itemgetter(0))[1]


def _run(clock: "_Clock", ranks: list["_ListRank"], forward_time: int, backward_time: int) -> int:
    """Run all ranks to the end, and return the makespan."""
    left = 2 * clock.shape.num_stages * clock.shape.num_microbatches
    while left:
        for rank in ranks:
            if rank.free_at <= clock.now:
                left -= rank.starts_backward(backward_time) or rank.starts_forward(forward_time)
        clock.now = min(rank.free_at for rank in ranks if rank.free_at > clock.now)
    return max(rank.free_at for rank in ranks)


@dataclass
class _Clock:
    """The virtual clock: the current time, and the end times of F and B, indexed by stage and micro-batch."""

    shape: Shape
    now: int = 0
    forwards: list[list[int]] = field(init=False)
    backwards: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = [[] for _ in range(self.shape.num_stages)]
        self.backwards = [[] for _ in range(self.shape.num_stages)]

    def ended(self, ends: list[int], microbatch: int) -> bool:
        """Return whether a micro-batch's forward or backward has ended on a stage.

        ``ends`` holds the end times of the stage's forwards or of its backwards.
        """
        return microbatch < len(ends) and ends[microbatch] <= self.now

    def forward_is_ready(self, stage: int) -> bool:
        """Return whether the stage's next forward has its input."""
        microbatch = len(self.forwards[stage])
        if microbatch == self.shape.num_microbatches:
            return False
        return stage == 0 or self.ended(self.forwards[stage - 1], microbatch)

    def backward_is_ready(self, stage: int) -> bool:
        """Return whether the stage's next backward can start: its forward and the next stage's backward have ended."""
        microbatch = len(self.backwards[stage])
        last = stage == self.shape.num_stages - 1
        return self.ended(self.forwards[stage], microbatch) and (
            last or self.ended(self.backwards[stage + 1], microbatch)
        )


class _ListRank:
    """One rank: the order written so far, and the time at which the rank becomes free."""

    def __init__(self, clock: _Clock, rank: int, max_in_flight: int, window: int) -> None:
        self.order = Order(clock.shape)
        self.free_at = 0
        self._clock = clock
        self._chunks = clock.shape.chunks(rank)
        self._max_in_flight = max_in_flight
        self._window = window

    def starts_backward(self, time: int) -> bool:
        """Start the ready backward nearest to the first stage. Return whether one started."""
        clock = self._clock
        stage = next((stage for stage in self._chunks if clock.backward_is_ready(stage)), None)
        return stage is not None and self._start(self.order.B, stage, clock.backwards, time)

    def starts_forward(self, time: int) -> bool:
        """Start the ready forward that fits in memory and is nearest to the last stage. Return whether one started."""
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
        """Return whether the stage's next forward is within the window (see `backward_first`) and fits in memory.

        After this forward, the rank must still be able to finish all its micro-batches within the memory limit.
        """
        started = {chunk: len(self._clock.forwards[chunk]) + (chunk == stage) for chunk in self._chunks}
        finished = {chunk: len(self._clock.backwards[chunk]) for chunk in self._chunks}
        free = self._max_in_flight - sum(started.values()) + sum(finished.values())
        oldest = min(finished.values())
        if free < 0 or started[stage] > oldest + self._window:
            return False
        for microbatch in range(oldest, max(started.values())):
            if free >= len(self._chunks):  # enough for any micro-batch, and each gives back all that it takes
                return True
            if sum(count <= microbatch for count in started.values()) > free:
                return False
            free += sum(finished[chunk] <= microbatch < started[chunk] for chunk in self._chunks)
        return True
