"""Legend: explains the colours, shades and hatches of timelines."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pipesched.program.actions import Kind
from pipesched.simulation.trace import Trace
from pipesched.viz.bars import gaps, kinds, num_chunks
from pipesched.viz.colours import BUBBLE, GREY, HATCH, colour, lighter

if TYPE_CHECKING:
    from matplotlib.patches import Patch

__all__ = ["columns", "patches"]

_MOST_IN_A_ROW = 7
_ROOM = 155  # letters beside each other in a figure that is 12 inches wide
_MARGIN = 8  # letters as wide as an entry's colour and its distance from the next entry

_SHADES = 4  # with more chunks, only the first and the last are listed


def patches(*traces: Trace) -> "list[Patch]":
    """Return the legend entries: the kinds in the traces, the chunks (if any rank has several) and the bubble."""
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=colour(kind), label=_label(kind)) for kind in kinds(*traces)]
    count = num_chunks(*traces)
    shown = range(count) if count <= _SHADES else (0, count - 1)
    if count > 1:
        entries += [Patch(facecolor=lighter(GREY, chunk, count), label=f"chunk {chunk}") for chunk in shown]
    if any(gaps(trace, rank) for trace in traces for rank in range(trace.num_ranks)):
        entries.append(Patch(facecolor=BUBBLE, edgecolor=HATCH, hatch="////", linewidth=0, label="bubble"))
    return entries


def columns(entries: "Sequence[Patch]") -> int:
    """Return the number of legend entries to draw in a row: as many as have room, at most 7."""
    most = min(len(entries), _MOST_IN_A_ROW)
    return next((count for count in range(most, 1, -1) if _width(entries, count) <= _ROOM), 1)


def _width(entries: "Sequence[Patch]", count: int) -> int:
    """Return the width of a legend with this number of columns, in letters. Matplotlib fills column after column."""
    rows, more = divmod(len(entries), count)
    ends = [rows * at + min(at, more) for at in range(count + 1)]
    parts = [entries[start:end] for start, end in pairwise(ends)]
    return sum(_MARGIN + max(len(str(entry.get_label())) for entry in part) for part in parts)


def _label(kind: Kind) -> str:
    return f"{kind.row.label} ({kind})" if kind.row.label else str(kind)
