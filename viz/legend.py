"""Legend: explains the colours, shades and hatches of timelines."""

from typing import TYPE_CHECKING

from pipesched.program.actions import Kind
from pipesched.simulation.trace import Trace
from pipesched.viz.bars import gaps, kinds, num_chunks
from pipesched.viz.colours import BUBBLE, GREY, HATCH, colour, lighter

if TYPE_CHECKING:
    from matplotlib.patches import Patch

__all__ = ["MOST_IN_A_ROW", "patches"]

#: The largest number of legend entries in a row.
MOST_IN_A_ROW = 7

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


def _label(kind: Kind) -> str:
    return f"{kind.row.label} ({kind})" if kind.row.label else str(kind)
