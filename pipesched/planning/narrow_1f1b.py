"""Narrow 1F1B: generates 1F1B programs with few micro-batches in flight, for tight memory limits.

A plan with such a program has the schedule `searched`, which can store a program and return it without a search.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipesched.order import Order, Shape, loop, schedule, v
from pipesched.planning.candidates import CHUNKS, Candidate
from pipesched.program.order import Schedule
from pipesched.program.placement import Placement

__all__ = ["is_windowed", "window_of", "windowed"]

_FEW_RANKS = 8  # up to this many ranks, every window is tried


@schedule("windowed-1f1b", placement=loop, chunks_per_rank=1)
def _windowed(rank: int, shape: Shape, *, window: int = 1, placement: Placement | None = None) -> Order:
    """1F1B with at most ``window`` micro-batches on a rank.

    With several chunks per rank, ``window`` is ignored: a rank finishes each micro-batch before it starts the next.
    """
    order = Order(shape)
    chunks = shape.chunks(rank)
    if len(chunks) == 1:
        for _ in range(min(window, shape.num_ranks - rank) - 1):
            order.F(*chunks)
    for _ in range(shape.num_microbatches):
        for chunk in chunks:
            order.F(chunk)
        for chunk in reversed(chunks):
            order.B(chunk)
    return order


def windowed(
    num_stages: int | None,
    ranks: Iterable[int],
    counts: Iterable[int],
    most_stages: int,
    placement: Placement | None = None,
) -> Iterator[Candidate]:
    """Yield candidates that have fewer micro-batches in flight than 1F1B.

    Args:
        num_stages: the number of stages, or None for any number.
        ranks: the numbers of ranks to try.
        counts: the numbers of micro-batches to try.
        most_stages: the maximum number of stages.
        placement: the rank of each stage. Default: several placements are tried.

    """
    counts = list(counts)
    for num_ranks in ranks:
        for own in _schedules(num_ranks, placement) if num_ranks > 1 else ():
            stages = num_ranks * own.chunks_per_rank
            if stages <= most_stages and num_stages in (None, stages):
                yield from (
                    Candidate(schedule=own, num_ranks=num_ranks, num_microbatches=count, splits=False)
                    for count in counts
                )


def window_of(schedule: Schedule) -> int | None:
    """Return the maximum number of micro-batches that a rank may hold under a schedule that this module created.

    Returns None for other schedules.
    """
    return schedule.options["window"] if is_windowed(schedule) else None


def is_windowed(schedule: Schedule) -> bool:
    """Return whether this module created the schedule."""
    return schedule.function is _windowed.function


def _schedules(num_ranks: int, placement: Placement | None) -> Iterator[Schedule]:
    if placement is not None and num_ranks == max(placement) + 1:
        yield _windowed.with_options(placement=placement, chunks_per_rank=len(placement) // num_ranks)
    every = range(1, num_ranks)
    few = every if num_ranks <= _FEW_RANKS else sorted({1, 2, *(num_ranks * eighth // 8 for eighth in range(1, 8))})
    for window in few:
        yield _windowed.with_options(window=window)
    for chunks in CHUNKS[1:]:
        for rule in (loop, v):
            yield replace(_windowed.with_options(chunks_per_rank=chunks), placement=rule)
