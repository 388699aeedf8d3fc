"""SVG: a timeline as one element of a page. Every bar says what it is when it is pointed at.

Places along the time are in percent, so that a page may make the picture as wide as it likes: bars stretch, text does
not.
"""

from collections.abc import Iterator
from html import escape
from math import floor, log10

from pipesched.simulation.trace import Trace
from pipesched.units import Unit, quote_time, time_unit
from pipesched.viz.bars import Bar, bars, num_chunks
from pipesched.viz.colours import colour

__all__ = ["ROW", "svg_timeline"]

ROW = 24  # pixels a rank
_BAR = 20  # of them are bar
_AXIS = 22  # pixels below the ranks
_TICKS = 10  # about so many


def svg_timeline(trace: Trace, until_s: float, name: str) -> str:
    """A trace from its start on, on a scale that ends at ``until_s`` seconds. name: what a screen reader says."""
    height = ROW * max(1, trace.num_ranks) + _AXIS
    unit = time_unit(until_s)
    parts = [
        f'<svg class="timeline" role="img" width="100%" height="{height}" aria-label="{escape(name)}">',
        *_rows(trace, until_s),
        *_axis(until_s, unit, ROW * max(1, trace.num_ranks)),
        *_bars(trace, until_s),
        "</svg>",
    ]
    return "\n".join(parts)


def _rows(trace: Trace, until_s: float) -> Iterator[str]:
    """The bubble: what bars do not cover of each row."""
    width = _percent(trace.makespan_s, until_s)
    for rank in range(trace.num_ranks):
        y = ROW * rank + (ROW - _BAR) // 2
        yield f'<rect class="bubble" x="0" y="{y}" width="{width}%" height="{_BAR}"/>'


def _bars(trace: Trace, until_s: float) -> Iterator[str]:
    chunks, several = num_chunks(trace), num_chunks(trace) > 1
    for bar in bars(trace):
        y = ROW * bar.rank + (ROW - _BAR) // 2 + (_BAR // 2 if bar.half > 0 else 0)
        tall = _BAR // 2 if bar.half else _BAR
        x, width = _percent(bar.start_s, until_s), _percent(bar.end_s - bar.start_s, until_s)
        fill = colour(bar.kind, bar.chunk, chunks)
        middle = _percent((bar.start_s + bar.end_s) / 2, until_s)
        label = f"{bar.stage}{bar.kind}{bar.microbatch}" if several else f"{bar.kind}{bar.microbatch}"
        yield (
            f'<g><rect x="{x}%" y="{y}" width="{width}%" height="{tall}" fill="{fill}"/>'
            f'<text x="{middle}%" y="{y + tall / 2:g}" data-w="{width}">{label}</text><title>{_title(bar)}</title></g>'
        )


def _title(bar: Bar) -> str:
    start, end = quote_time(bar.start_s), quote_time(bar.end_s)
    return (
        f"{bar.stage}{bar.kind}{bar.microbatch}: stage {bar.stage}, micro-batch {bar.microbatch}, rank {bar.rank}\n"
        f"{quote_time(bar.end_s - bar.start_s)}, from {start} to {end}"
    )


def _axis(until_s: float, unit: Unit, y: int) -> Iterator[str]:
    whole = until_s * unit.per_one
    step = _round_step(whole / _TICKS) if whole else 1
    for number in range(floor(whole / step + 1e-9) + 1 if whole else 1):
        x = _percent(number * step, whole)
        anchor = ' style="text-anchor:start"' if not number else ' style="text-anchor:end"' if float(x) > 97 else ""
        yield f'<line class="tick" x1="{x}%" x2="{x}%" y1="0" y2="{y + 4}"/>'
        text = f"{number * step:.6g}" + (f" {unit.name}" if not number else "")
        yield f'<text class="axis" x="{x}%" y="{y + 14}"{anchor}>{text}</text>'


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least as long."""
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _percent(value: float, whole: float) -> str:
    return f"{100 * float(value) / whole if whole else 0:.4f}".rstrip("0").rstrip(".")
