"""Units: numbers with the unit that makes them short, and the one line that heads every picture."""

from typing import NamedTuple

from pipesched.trace import Trace
from pipesched.viz.bars import chunks_visited

__all__ = ["Unit", "byte_unit", "headline", "quote_bytes", "quote_time", "time_unit"]


class Unit(NamedTuple):
    """A unit's name and how many of it make one second (or one byte)."""

    name: str
    per_one: float


_TIMES = (Unit("s", 1), Unit("ms", 1e3), Unit("us", 1e6))
_SIZES = (Unit("GiB", 2**-30), Unit("MiB", 2**-20), Unit("KiB", 2**-10), Unit("B", 1))


def _largest(units: tuple[Unit, ...], value: float) -> Unit:
    """The largest unit of which ``value`` is at least one; for 0 the unit without a prefix."""
    plain = next(unit for unit in units if unit.per_one == 1)
    return next((unit for unit in units if value * unit.per_one >= 1), units[-1] if value else plain)


def time_unit(seconds: float) -> Unit:
    """The unit for times up to ``seconds``: s, ms or us."""
    return _largest(_TIMES, seconds)


def byte_unit(size: float) -> Unit:
    """The unit for sizes up to ``size`` bytes: B, KiB, MiB or GiB."""
    return _largest(_SIZES, size)


def quote_time(seconds: float) -> str:
    """A time with its unit, in four digits: ``1.25 ms``."""
    unit = time_unit(seconds)
    return f"{float(seconds) * unit.per_one:.4g} {unit.name}"


def quote_bytes(size: float) -> str:
    """A size with its unit, in four digits: ``1.5 MiB``."""
    unit = byte_unit(size)
    return f"{float(size) * unit.per_one:.4g} {unit.name}"


def headline(trace: Trace, label: str | None = None) -> str:
    """One line: the label (the trace's name unless given), makespan, bubble, and the peak in flight of any rank."""
    name, chunks = trace.name if label is None else label, chunks_visited(trace)
    figures = (
        f"makespan {quote_time(trace.makespan_s)}, bubble {trace.bubble_ratio:.1%}, {_above(trace)}"
        f"peak in flight {max(trace.peak_in_flight, default=0)}"
        + (f" / {chunks} chunks" if chunks > 1 else "")  # to be compared between schedules it is divided by them
    )
    return f"{name}: {figures}" if name else figures


def _above(trace: Trace) -> str:
    """How far from the best possible, where that is known."""
    return "" if trace.above_bound is None else f"{trace.above_bound:.1%} above the bound, "
