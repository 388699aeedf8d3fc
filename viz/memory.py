"""Memory: pictures of the memory that each rank holds over time."""

from typing import TYPE_CHECKING, Any

from pipesched.simulation.trace import Trace, check_trace
from pipesched.units import byte_unit, quote_bytes, time_unit
from pipesched.viz.timeline import DPI, check_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_memory"]

_LEGEND_ROWS = 16
_FEW = 8


def plot_memory(trace: Trace, ax: "Axes | None" = None) -> "Axes":
    """Draw the memory that each rank holds over time, one line for each rank, with the peaks in the legend.

    If the trace's costs have sizes, the lines show bytes. Otherwise, they show the number of (stage, micro-batch) pairs
    that each rank holds.

    Args:
        trace: a predicted or measured trace.
        ax: the matplotlib Axes to draw on. Default: a new Figure.

    Returns:
        The Axes. To save the picture, call ``savefig`` on its ``figure``.

    """
    check_trace(trace)
    check_axes(ax)
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        ax = Figure(figsize=(12, 4), dpi=DPI, layout="constrained").add_subplot()
    sized = any(trace.peak_bytes)
    unit = time_unit(trace.makespan_s)
    size = byte_unit(max(trace.peak_bytes, default=0))
    peaks = [
        quote_bytes(peak, 4) if sized else str(peak) for peak in (trace.peak_bytes if sized else trace.peak_in_flight)
    ]
    colours = matplotlib.colormaps["viridis"]
    for rank in range(trace.num_ranks):
        points = _bytes(trace, rank) if sized else _pairs(trace, rank)
        times = [time * unit.per_one for time, _ in points]
        held = [value * size.per_one if sized else value for _, value in points]
        shade = colours(0.92 * rank / max(1, trace.num_ranks - 1))
        style: dict[str, Any] = {
            "color": shade,
            "linewidth": _line_width(rank, trace.num_ranks),
            "label": f"rank {rank}: peak {peaks[rank]}",
        }
        ax.step(times, held, where="post", gid=f"rank {rank}", **style)
    ax.set_xlim(0, trace.makespan_s * unit.per_one or 1)
    ax.set_ylim(bottom=0)
    if not sized:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(_title(trace, sized), loc="left", fontsize=11)
    ax.set_xlabel(f"time [{unit.name}]")
    ax.set_ylabel(f"held [{size.name}]" if sized else "(stage, micro-batch) pairs")
    columns = 1 + (trace.num_ranks - 1) // _LEGEND_ROWS
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, ncols=columns)
    return ax


def _line_width(rank: int, num_ranks: int) -> float:
    """Return the width of a rank's line. If there are few ranks, earlier lines are wider, so that none is hidden."""
    return 1.2 if num_ranks > _FEW else 1.2 + 2.4 * (num_ranks - 1 - rank) / num_ranks


def _title(trace: Trace, sized: bool) -> str:
    quantity = "memory held" if sized else "in flight"
    peak = quote_bytes(max(trace.peak_bytes), 4) if sized else str(max(trace.peak_in_flight, default=0))
    return f"{trace.name}: {quantity}, peak {peak}" if trace.name else f"{quantity}, peak {peak}"


def _bytes(trace: Trace, rank: int) -> list[tuple[float, int]]:
    """Return the list of (time, bytes held from that time on), for the whole trace."""
    return _whole(trace, [(time - trace.start_s, held) for time, held in trace.memory(rank)])


def _pairs(trace: Trace, rank: int) -> list[tuple[float, int]]:
    """Return the list of (time, number of (stage, micro-batch) pairs held from that time on), for the whole trace."""
    return _whole(trace, [(time - trace.start_s, held) for time, held in trace.in_flight(rank)])


def _whole(trace: Trace, points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Add points for the start and the end of the trace. If several points have the same time, keep the last."""
    last = points[-1][1] if points else 0
    return list(dict([(0, 0), *points, (trace.makespan_s, last)]).items())
