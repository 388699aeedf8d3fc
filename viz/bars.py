"""Bars: what a timeline shows, as plain numbers. Times are in seconds from the trace's start."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pipesched.program.actions import Kind
from pipesched.simulation.trace import Span, Trace

__all__ = ["Bar", "bars", "chunks_visited", "gaps", "kinds", "num_chunks"]


class Bar(NamedTuple):
    """One compute span. chunk: the place of its stage among the stages that its rank runs. half: of an overlapping
    pair -1 for the forward, drawn above, and 1 for the backward, below; 0 for what runs alone.
    """

    rank: int
    chunk: int
    kind: Kind
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    half: int = 0


def bars(trace: Trace) -> Iterator[Bar]:
    """Every compute span of a trace, rank by rank in time order; of an overlapping pair the forward first."""
    zero = trace.start_s
    for rank, row in enumerate(trace.by_rank):
        chunk = {stage: k for k, stage in enumerate(sorted({span.action.stage for span in row}))}
        joined = [False, *(_overlap(one, other) for one, other in pairwise(row)), False]
        for span, second, first in zip(row, joined, joined[1:], strict=False):  # a row may be empty
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


def _overlap(one: Span, other: Span) -> bool:
    """Two that take the same time, and any time at all."""
    return one.start_s == other.start_s < one.end_s == other.end_s


def gaps(trace: Trace, rank: int) -> list[tuple[float, float]]:
    """A rank's bubble: the (start, end) of its idle times inside the makespan."""
    idle = []
    first = trace.start_s
    now = first
    last = first + trace.makespan_s
    for span in trace.by_rank[rank]:
        if span.start_s > now:
            idle.append((now, span.start_s))
        now = max(now, span.end_s)
    if now < last:
        idle.append((now, last))
    return [(start - first, end - first) for start, end in idle]


def kinds(*traces: Trace) -> list[Kind]:
    """The compute kinds that occur, in the order of the table of kinds."""
    present = {span.action.kind for trace in traces for row in trace.by_rank for span in row}
    return [kind for kind in Kind if kind in present]


def num_chunks(*traces: Trace) -> int:
    """The most chunks that a rank runs."""
    rows = (row for trace in traces for row in trace.by_rank)
    return max((len({span.action.stage for span in row}) for row in rows), default=0)


def chunks_visited(trace: Trace) -> int:
    """The most chunks of a rank that one micro-batch runs on: of two pipelines that cross on the ranks only one."""
    visited = {
        (rank, span.action.microbatch, span.action.stage) for rank, row in enumerate(trace.by_rank) for span in row
    }
    counts = Counter((rank, microbatch) for rank, microbatch, _ in visited)
    return max(counts.values(), default=0)
