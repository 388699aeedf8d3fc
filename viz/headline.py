"""Headline: the title of a timeline, with the trace's key figures."""

from pipesched.program.actions import Kind
from pipesched.simulation.trace import Trace
from pipesched.units import quote_time
from pipesched.viz.bars import chunks_visited

__all__ = ["headline"]


def headline(trace: Trace, label: str | None = None) -> str:
    """Return the title of a trace: label (default: the trace's name), makespan, bubble and peak in flight."""
    name = trace.name if label is None else label
    chunks = chunks_visited(trace)
    figures = (
        f"makespan {quote_time(trace.makespan_s)}, bubble {trace.bubble_ratio:.1%}, {_above_bound(trace)}"
        f"peak in flight {max(trace.peak_in_flight, default=0)}"
        + (f" / {chunks} chunks" if chunks > 1 else "")  # comparable across numbers of chunks
        + ("" if trace.hidden_communication is None else f", {_communication(trace)} hidden")
    )
    return f"{name}: {figures}" if name else figures


def _communication(trace: Trace) -> str:
    """Return the percentage of communication time that is hidden, as text for the title."""
    several = Kind.UNSHARD in trace.kinds
    return f"{'communication' if several else 'reductions'} {trace.hidden_communication:.1%}"


def _above_bound(trace: Trace) -> str:
    """Return how far the makespan is above the lower bound, as text for the title; "" if the bound is unknown."""
    return "" if trace.above_bound is None else f"{trace.above_bound:.1%} above the bound, "
