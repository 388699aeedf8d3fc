"""Text: timelines for terminals."""

import math
from itertools import zip_longest
from typing import NamedTuple

from pipesched.checks import is_whole, shown
from pipesched.errors import InputError
from pipesched.program.actions import Kind, Lane
from pipesched.simulation.trace import Trace, check_trace
from pipesched.units import quote_time
from pipesched.viz.bars import Bar, bars, collective_bars, kinds, num_chunks, redundancy_bars
from pipesched.viz.blocks import block_row, legend
from pipesched.viz.headline import headline

__all__ = ["text_timeline"]

_FEWEST = 10  # minimum number of columns of a timeline, even if the terminal is narrower
_LABELLED = 0.5  # minimum fraction of bars whose labels fit, for a timeline that is scaled in time


class _Scale(NamedTuple):
    """The scale of a text timeline, which maps time to columns of text."""

    columns: int
    #: The number of columns per second of the trace.
    per_s: float
    #: The number of columns per unit of time; 0 if no unit divides all times, or if cells of one unit do not fit.
    cell: int = 0
    #: Whether each column is a block character, because labels do not fit.
    dense: bool = False
    #: Whether the last column of every bar is blank.
    separated: bool = False
    #: Whether labels contain the stage.
    with_stage: bool = False


def text_timeline(trace: Trace, width: int = 120) -> str:
    """Draw a trace as plain text: one line for each rank, then one line with the key figures.

    ``F3`` is the forward of micro-batch 3, dashes continue an action, and ``.`` is idle time. If ranks have several
    stages, ``2F3`` is the forward on stage 2. ``F4&B2`` is an overlapping pair, shortened to ``F4`` if it does not fit.
    A rank with collectives has a second line, in which a number is the bucket of a gradient reduction (REDUCE), and
    ``U0`` is the first gather of weights (UNSHARD). A rank with redundancy has another line: ``M2`` sends the gradients
    of stage 2 to its copy (MIRROR), ``K2`` sets the state of stage 2 aside (KEEP), and ``R1`` updates the copy of stage
    1 (REPLAY).

    If all times are multiples of one unit, every unit is drawn as a cell of fixed width. If such cells do not fit into
    ``width``, time is scaled: each column shows the action at the middle of the column, and numbers that do not fit are
    left out. If most numbers do not fit, a column is a block character for a kind of action, and idle time is blank.
    The last line explains the blocks. The columns of a row are divided among the kinds and idle time in proportion to
    their times.

        >>> print(pipesched.viz.text_timeline(trace))
        rank 0 | F0 F1 .. .. B0--- F2 B1--- .. B2---
        rank 1 | .. F0 B0--- F1 B1--- F2 B2--- .. ..
        1f1b: makespan 12 s, bubble 25.0%, 20.0% above the bound, peak in flight 2; 3 columns are 1 s

    Args:
        trace: a predicted or measured trace.
        width: the largest number of columns. Default: 120.

    Raises:
        InputError: if ``width`` is not a whole number.

    """
    check_trace(trace)
    if not is_whole(width):
        raise InputError(f"width= must be a whole number of columns; got {shown(width)}; pass a number such as 120")
    names = [f"rank {rank}".ljust(len(f"rank {trace.num_ranks - 1}")) + " | " for rank in range(trace.num_ranks)]
    drawn = [bar for bar in bars(trace) if bar.end_s > bar.start_s]
    several = num_chunks(trace) > 1
    scale = _scale(trace, drawn, several, max(_FEWEST, width - max(map(len, names), default=0)))
    rows = _blocks(trace, drawn, scale) if scale.dense else _labels(trace, drawn, scale)
    lanes = {
        "comm" if Kind.UNSHARD in trace.kinds else "reduce": _lane(list(collective_bars(trace)), scale),
        "copies": _lane(list(redundancy_bars(trace)), scale),
    }
    lines = []
    for rank, (name, row) in enumerate(zip(names, rows, strict=True)):
        lines.append((name + row).rstrip())
        for lane, below in lanes.items():
            lines += [(lane.ljust(len(name) - 3) + " | " + below[rank]).rstrip()] if rank in below else []
    notes = [legend(kinds(trace))] if scale.dense else []
    notes += ["lower case: odd chunks"] if several and not scale.dense and not scale.with_stage else []
    return "\n".join([*lines, "; ".join([headline(trace), *_scale_note(scale), *notes])])


def _labels(trace: Trace, drawn: list[Bar], scale: _Scale) -> list[str]:
    """Return the row of each rank. Each bar has a label."""
    rows = [_empty_row(scale) for _ in range(trace.num_ranks)]
    for bar, after in zip_longest(drawn, drawn[1:]):
        if bar.half <= 0:
            texts = _label(bar, scale.with_stage), _label(bar)[:1]
            pair = f"{texts[0]}&{_label(after, scale.with_stage)}" if bar.half else ""
            _write(rows[bar.rank], bar, scale, (pair, *texts))
    return list(map("".join, rows))


def _blocks(trace: Trace, drawn: list[Bar], scale: _Scale) -> list[str]:
    """Return the same rows as `_labels`, drawn with a block character for each column. A bar ends each rank's row."""
    rows: list[list[Bar]] = [[] for _ in range(trace.num_ranks)]
    for bar in drawn:
        rows[bar.rank].append(bar)
    return [f"{block_row(row, scale.columns, scale.per_s)}|" for row in rows]


def _lane(drawn: list[Bar], scale: _Scale) -> dict[int, str]:
    """Return the row below that of each rank that has such bars, keyed by rank. The bars are those of one lane."""
    if scale.dense:
        of_rank: dict[int, list[Bar]] = {}
        for bar in drawn:
            of_rank.setdefault(bar.rank, []).append(bar)
        return {rank: block_row(row, scale.columns, scale.per_s) for rank, row in of_rank.items()}
    rows: dict[int, list[str]] = {}
    for bar in drawn:
        row = rows.setdefault(bar.rank, [" "] * scale.columns)
        first, last = _reach(bar, scale)
        end = " " if scale.separated else ""
        number = bar.stage if bar.kind.row.lane is Lane.REDUNDANCY else bar.microbatch
        text = f"{bar.kind.row.letter}{number}"
        row[first:last] = (text.ljust(last - first - len(end), "-") + end)[: last - first]
    return {rank: "".join(row) for rank, row in rows.items()}


def _label(bar: Bar, with_stage: bool = False) -> str:
    text = f"{bar.kind}{bar.microbatch}"
    if with_stage:
        return f"{bar.stage}{text}"
    return text.lower() if bar.chunk % 2 else text


def _scale(trace: Trace, drawn: list[Bar], several: bool, columns: int) -> _Scale:
    """Choose the first scale that fits into ``columns``.

    The scales are, in this order: cells whose labels contain the stage (if ``several``), cells separated by blanks,
    narrower cells, scaled time if half of the labels fit, cells without some numbers, and blocks.
    """
    if not drawn:
        return _Scale(0, 0)
    unit = _unit(drawn, trace.makespan_s, columns)
    scaled = _Scale(columns, columns / trace.makespan_s)
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
    if sum(_fits(bar, _label(bar), scaled) for bar in drawn) >= _LABELLED * len(drawn):
        return scaled
    if unit is not None:
        cell = columns // units
        return _Scale(columns=cell * units, per_s=cell / unit, cell=cell)
    return _Scale(columns - 1, (columns - 1) / trace.makespan_s, dense=True)


def _unit(drawn: list[Bar], makespan_s: float, most: int) -> float | None:
    """Return the greatest common divisor of all times (the unit); None if the makespan exceeds ``most`` units."""
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
    """Return the first column of a bar, and the column after the last column of the bar.

    A column belongs to the bar if the bar covers the middle of the column.
    """
    # The small offset moves times that differ only by rounding to the same side.
    return math.ceil(bar.start_s * scale.per_s - 0.5 - 1e-6), math.ceil(bar.end_s * scale.per_s - 0.5 - 1e-6)


def _fits(bar: Bar, text: str, scale: _Scale) -> bool:
    first, last = _reach(bar, scale)
    return len(text) <= last - first


def _empty_row(scale: _Scale) -> list[str]:
    if scale.separated:
        return list(("." * (scale.cell - 1) + " ") * (scale.columns // scale.cell))
    return ["."] * scale.columns


def _write(row: list[str], bar: Bar, scale: _Scale, texts: tuple[str, ...]) -> None:
    """Write a bar into its rank's row: the first of ``texts`` that fits, then dashes up to the end of the bar.

    The last column stays blank if the scale separates bars.
    """
    first, last = _reach(bar, scale)
    columns = last - first
    end = " " if scale.separated else ""
    text = next((text for text in texts if text and len(text) + ("&" in text) * len(end) <= columns), "")
    row[first:last] = list((text.ljust(columns - len(end), "-") + end)[:columns])


def _scale_note(scale: _Scale) -> list[str]:
    if not scale.columns:
        return []
    if not scale.cell:
        return [f"a column is {quote_time(1 / scale.per_s)}"]
    columns = "a column is" if scale.cell == 1 else f"{scale.cell} columns are"
    return [f"{columns} {quote_time(scale.cell / scale.per_s)}"]
