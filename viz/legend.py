"""Legend: what the colours, shades and hatches of timelines stand for."""

from typing import TYPE_CHECKING

from pipesched.simulation.trace import Trace
from pipesched.viz.bars import gaps, kinds, num_chunks
from pipesched.viz.colours import BUBBLE, GREY, HATCH, colour, lighter

if TYPE_CHECKING:
    from matplotlib.patches import Patch

__all__ = ["patches"]

_SHADES = 4  # more chunks than this are shown by the first and the last


def patches(*traces: Trace) -> "list[Patch]":
    """The entries of a legend for these traces: kinds that occur, chunks where a rank has several, the bubble."""
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=colour(kind), label=str(kind)) for kind in kinds(*traces)]
    count = num_chunks(*traces)
    shown = range(count) if count <= _SHADES else (0, count - 1)
    if count > 1:
        entries += [Patch(facecolor=lighter(GREY, chunk, count), label=f"chunk {chunk}") for chunk in shown]
    if any(gaps(trace, rank) for trace in traces for rank in range(trace.num_ranks)):
        entries.append(Patch(facecolor=BUBBLE, edgecolor=HATCH, hatch="////", linewidth=0, label="bubble"))
    return entries
