"""Headline: the one line that heads every picture."""

from pipesched.simulation.trace import Trace
from pipesched.units import quote_time
from pipesched.viz.bars import chunks_visited

__all__ = ["headline"]


def headline(trace: Trace, label: str | None = None) -> str:
    """One line: the label (the trace's name unless given), makespan, bubble, and the peak in flight of any rank."""
    name = trace.name if label is None else label
    chunks = chunks_visited(trace)
    figures = (
        f"makespan {quote_time(trace.makespan_s)}, bubble {trace.bubble_ratio:.1%}, {_above(trace)}"
        f"peak in flight {max(trace.peak_in_flight, default=0)}"
        + (f" / {chunks} chunks" if chunks > 1 else "")  # to be compared between schedules it is divided by them
    )
    return f"{name}: {figures}" if name else figures


def _above(trace: Trace) -> str:
    """How far from the best possible, where that is known."""
    return "" if trace.above_bound is None else f"{trace.above_bound:.1%} above the bound, "
