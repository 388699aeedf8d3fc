"""Bars: the bars and gaps of a timeline as plain numbers. Times are in seconds from the start of the trace."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pipesched.program.actions import Kind
from pipesched.simulation.trace import Span, Trace

__all__ = ["Bar", "bars", "chunks_visited", "collective_bars", "gaps", "kinds", "num_chunks", "redundancy_bars"]


class Bar(NamedTuple):
    """One bar of a timeline: a compute span, a collective (a reduction or a gather) or a copy for redundancy."""

    rank: int
    #: The position of the stage among the stages of the rank.
    chunk: int
    kind: Kind
    stage: int
    microbatch: int  # or the number that the kind has instead, such as the bucket of a reduction
    start_s: float
    end_s: float
    #: In an overlapping pair, -1 for the forward (upper half) and 1 for the backward (lower half); otherwise 0.
    half: int = 0


def bars(trace: Trace) -> Iterator[Bar]:
    """Yield a bar for each compute span, rank by rank in time order. In an overlapping pair, the forward is first."""
    zero = trace.start_s
    for rank, row in enumerate(trace.by_rank):
        chunk = {stage: k for k, stage in enumerate(sorted({span.action.stage for span in row}))}
        joined = [False, *(_overlap(one, other) for one, other in pairwise(row)), False]
        for span, second, first in zip(row, joined, joined[1:], strict=False):  # a row can be empty
            (stage, kind, microbatch, _), _, start, end, _ = span
            yield Bar(
                rank=rank,
                chunk=chunk[stage],
                kind=kind,
                stage=stage,
                microbatch=microbatch,
                start_s=start - zero,
                end_s=end - zero,
                half=second - first,
            )


def collective_bars(trace: Trace) -> Iterator[Bar]:
    """Yield a bar for each collective, rank by rank in time order."""
    zero = trace.start_s
    for rank, row in enumerate(trace.collectives_by_rank):
        chunk = {stage: k for k, stage in enumerate(sorted({span.action.stage for span in trace.by_rank[rank]}))}
        for (stage, kind, number, _), _, start, end, _ in row:
            yield Bar(rank, chunk.get(stage, 0), kind, stage, number, start - zero, end - zero)


def redundancy_bars(trace: Trace) -> Iterator[Bar]:
    """Yield a bar for each MIRROR, KEEP and REPLAY, rank by rank in time order."""
    zero = trace.start_s
    chunk: dict[int, int] = {}
    for row in trace.by_rank:
        chunk |= {stage: k for k, stage in enumerate(sorted({span.action.stage for span in row}))}
    for rank, row in enumerate(trace.redundancy_by_rank):
        for (stage, kind, number, _), _, start, end, _ in row:
            yield Bar(rank, chunk.get(stage, 0), kind, stage, number, start - zero, end - zero)


def _overlap(one: Span, other: Span) -> bool:
    """Return whether two spans form an overlapping pair: have the same start, the same end and a duration above 0."""
    return one.start_s == other.start_s < one.end_s == other.end_s


def gaps(trace: Trace, rank: int) -> list[tuple[float, float]]:
    """Return the intervals of the makespan in which a rank is idle, as (start, end) pairs in seconds."""
    idle = []
    first = trace.start_s
    busy_until = first
    last = first + trace.makespan_s
    for span in trace.by_rank[rank]:
        if span.start_s > busy_until:
            idle.append((busy_until, span.start_s))
        busy_until = max(busy_until, span.end_s)
    if busy_until < last:
        idle.append((busy_until, last))
    return [(start - first, end - first) for start, end in idle]


def kinds(*traces: Trace) -> list[Kind]:
    """Return the kinds that a timeline shows, in the order of `Kind`: all but messages and copies of activations."""
    rows = (row for own in traces for row in (*own.by_rank, *own.collectives_by_rank, *own.redundancy_by_rank))
    present = {span.action.kind for row in rows for span in row}
    return [kind for kind in Kind if kind in present]


def num_chunks(*traces: Trace) -> int:
    """Return the largest number of chunks that any rank runs."""
    rows = (row for trace in traces for row in trace.by_rank)
    return max((len({span.action.stage for span in row}) for row in rows), default=0)


def chunks_visited(trace: Trace) -> int:
    """Return the largest number of a rank's chunks that process the same micro-batch.

    Bidirectional schedules place two chunks on each rank, but only one of them processes a given micro-batch.
    """
    visited = {
        (rank, span.action.microbatch, span.action.stage) for rank, row in enumerate(trace.by_rank) for span in row
    }
    counts = Counter((rank, microbatch) for rank, microbatch, _ in visited)
    return max(counts.values(), default=0)
