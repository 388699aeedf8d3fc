"""Text: a timeline for terminals."""

import math
from itertools import zip_longest
from typing import NamedTuple

from pipesched.checks import is_whole, shown
from pipesched.errors import InputError
from pipesched.simulation.trace import Trace, check_trace
from pipesched.units import quote_time
from pipesched.viz.bars import Bar, bars, num_chunks
from pipesched.viz.headline import headline

__all__ = ["text_timeline"]

_FEWEST = 10  # columns, however narrow the terminal


class _Scale(NamedTuple):
    """How time becomes columns. cell: columns of one unit of time, 0 where times have no unit that fits."""

    columns: int
    per_s: float
    cell: int = 0
    separated: bool = False  # the last column of every bar is blank
    with_stage: bool = False  # labels name the stage


def text_timeline(trace: Trace, width: int = 120) -> str:
    """Draw a trace in plain text, at most ``width`` columns wide: a line a rank, then a line with the figures.

    ``F3`` is the forward of micro-batch 3, ``2F3`` that of stage 2 where ranks have several stages, ``F4&B2`` two that
    overlap (``F4`` where that does not fit), and ``.`` is bubble. Where all times are multiples of one unit, a unit is
    a cell of fixed width, if that fits. If not, time is scaled down, numbers are left out where they do not fit, and
    each column shows what runs at its middle.
    """
    check_trace(trace)
    if not is_whole(width):
        raise InputError(f"a width is a whole number of columns; got {shown(width)}; pass such as 120")
    names = [f"rank {rank}".ljust(len(f"rank {trace.num_ranks - 1}")) + " | " for rank in range(trace.num_ranks)]
    drawn = [bar for bar in bars(trace) if bar.end_s > bar.start_s]
    several = num_chunks(trace) > 1
    scale = _scale(trace, drawn, several, max(_FEWEST, width - max(map(len, names), default=0)))
    rows = [_empty_row(scale) for _ in names]
    for bar, after in zip_longest(drawn, drawn[1:]):
        if bar.half <= 0:
            texts = _label(bar, scale.with_stage), _label(bar)[:1]
            pair = f"{texts[0]}&{_label(after, scale.with_stage)}" if bar.half else ""
            _write(rows[bar.rank], bar, scale, (pair, *texts))
    lines = [(name + "".join(row)).rstrip() for name, row in zip(names, rows, strict=True)]
    notes = ["lower case: odd chunks"] if several and not scale.with_stage else []
    return "\n".join([*lines, "; ".join([headline(trace), *_scale_note(scale), *notes])])


def _label(bar: Bar, with_stage: bool = False) -> str:
    text = f"{bar.kind}{bar.microbatch}"
    if with_stage:
        return f"{bar.stage}{text}"
    return text.lower() if bar.chunk % 2 else text


def _scale(trace: Trace, drawn: list[Bar], several: bool, columns: int) -> _Scale:
    """The first that fits: cells with stages, cells with a blank between them, narrower cells, the full width."""
    if not drawn:
        return _Scale(0, 0)
    unit = _unit(drawn, trace.makespan_s, columns)
    if unit is not None:
        units = round(trace.makespan_s / unit)
        full, short = (max(len(_label(bar, with_stage)) for bar in drawn) for with_stage in (True, False))
        cells = [(full + 1, True, True)] if several else []
        cells += [(short + 1, True, False), *((cell, False, False) for cell in range(short, 0, -1))]
        for cell, separated, with_stage in cells:
            scale = _Scale(
                columns=cell * units, per_s=cell / unit, cell=cell, separated=separated, with_stage=with_stage
            )
            if scale.columns <= columns and all(_fits(bar, _label(bar, with_stage), scale) for bar in drawn):
                return scale
    return _Scale(columns, columns / trace.makespan_s)


def _unit(drawn: list[Bar], makespan_s: float, most: int) -> float | None:
    """The longest time that all starts and ends are multiples of; None if more than ``most`` make the makespan."""
    noise = 1e-6 * makespan_s
    unit = makespan_s
    for time in {time for bar in drawn for time in (bar.start_s, bar.end_s)}:
        rest = time
        while rest > noise:
            remainder = unit % rest
            unit = rest
            rest = 0 if rest - remainder <= noise else remainder
        if makespan_s > unit * (most + 0.5):
            return None
    return unit


def _reach(bar: Bar, scale: _Scale) -> tuple[int, int]:
    """The columns that a bar covers: those whose middle lies in it."""
    # Times that should be equal differ by rounding: they fall to the same side.
    return math.ceil(bar.start_s * scale.per_s - 0.5 - 1e-6), math.ceil(bar.end_s * scale.per_s - 0.5 - 1e-6)


def _fits(bar: Bar, text: str, scale: _Scale) -> bool:
    first, last = _reach(bar, scale)
    return len(text) <= last - first


def _empty_row(scale: _Scale) -> list[str]:
    if scale.separated:
        return list(("." * (scale.cell - 1) + " ") * (scale.columns // scale.cell))
    return ["."] * scale.columns


def _write(row: list[str], bar: Bar, scale: _Scale, texts: tuple[str, ...]) -> None:
    """Write a bar into its rank's row: the first text that fits, a pair's only beside a blank, then dashes."""
    first, last = _reach(bar, scale)
    room = last - first
    end = " " if scale.separated else ""
    text = next((text for text in texts if text and len(text) + ("&" in text) * len(end) <= room), "")
    row[first:last] = list((text.ljust(room - len(end), "-") + end)[:room])


def _scale_note(scale: _Scale) -> list[str]:
    if not scale.columns:
        return []
    if not scale.cell:
        return [f"a column is {quote_time(1 / scale.per_s)}"]
    columns = "a column is" if scale.cell == 1 else f"{scale.cell} columns are"
    return [f"{columns} {quote_time(scale.cell / scale.per_s)}"]
