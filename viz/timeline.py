"""Timeline: pictures with one row for each rank and one bar for each compute span."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesched.checks import shown
from pipesched.errors import ArgumentError
from pipesched.simulation.trace import Trace, check_trace
from pipesched.units import Unit, time_unit
from pipesched.viz.bars import Bar, bars, collective_bars, gaps, num_chunks, redundancy_bars
from pipesched.viz.colours import BUBBLE, HATCH, INK, colour
from pipesched.viz.headline import headline
from pipesched.viz.legend import columns, patches

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DPI", "draw_timeline", "plot_timeline", "rows_inches"]

DPI = 150  # keeps the bars of thousands of spans apart
_HEIGHT = 0.84  # height of a bar, as a fraction of a row's height
_EDGE_PT = 3  # if any bar is narrower, all bars lose their white edges, which would hide that bar
_FONT_PT = (9, 8, 7, 6)
_DIGIT = 0.64  # width of a digit, as a fraction of the font size
_MARGIN_PT = 1
_MOST_HATCHED = 3000  # with more gaps, none is hatched, because hatching is slow and invisible in narrow gaps


class _Band(NamedTuple):
    """The part of each row in which bars are drawn.

    Both values are fractions of the row's height. ``top`` is measured downwards from the middle of the row; it is
    negative above the middle.
    """

    top: float
    height: float


# The bars of compute actions leave room for those of other lanes below them: collectives, then redundancy. The bands
# are those of compute actions and of each other lane, for traces with no, one and two other lanes.
_BANDS = tuple(
    tuple(_Band((top - 0.5) * _HEIGHT, height * _HEIGHT) for top, height in bands)
    for bands in ([(0, 1)], [(0, 0.74), (0.8, 0.2)], [(0, 0.6), (0.64, 0.16), (0.84, 0.16)])
)


def plot_timeline(trace: Trace, ax: "Axes | None" = None) -> "Axes":
    """Draw the timeline of a trace: one row for each rank, one bar for each compute action.

    Colours show the kinds of actions, lighter shades show later chunks, and the bubble is hatched. The numbers in the
    bars are micro-batches. If a forward and a backward overlap, the forward is the upper half of the bar. Gradient
    reductions and weight gathers are narrow bars below the compute actions of their rank. So are the actions that keep
    copies for when a rank is lost (MIRROR, KEEP, REPLAY), below those. The title gives the makespan,
    the bubble (idle time / (ranks x makespan)) and the peak number of micro-batches in flight.

        pipesched.viz.plot_timeline(pipe.trace).figure.savefig("step.png")

    Args:
        trace: a predicted or measured trace.
        ax: the matplotlib Axes to draw on. Default: a new Figure.

    Returns:
        The Axes. To save the picture, call ``savefig`` on its ``figure``.

    """
    check_trace(trace)
    check_axes(ax)
    from matplotlib.figure import Figure

    entries = patches(trace)
    more = -(-len(entries) // columns(entries)) - 1 if entries else 0  # rows of the legend, besides the first
    if ax is None:
        ax = Figure(figsize=(12, 1.3 + rows_inches(trace) + 0.22 * more), dpi=DPI, layout="constrained").add_subplot()
    unit = time_unit(trace.makespan_s)
    draw_timeline(ax, trace, unit, trace.makespan_s)
    ax.set_title(headline(trace), loc="left", fontsize=11, pad=24 + 16 * more)
    ax.set_xlabel(f"time [{unit.name}]")
    if entries:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0.2}
        ax.legend(
            handles=entries,
            ncols=columns(entries),
            frameon=False,
            fontsize=9,
            handlelength=1.4,
            **place,
        )
    return ax


def check_axes(ax: Any) -> None:
    """Raise ArgumentError if ``ax`` is neither None nor matplotlib Axes."""
    if ax is not None and not (hasattr(ax, "figure") and hasattr(ax, "broken_barh")):
        raise ArgumentError(
            f"ax= must be the matplotlib Axes to draw on; got {shown(ax)}; pass Axes, or leave it out for a new figure"
        )


def rows_inches(trace: Trace) -> float:
    """Return the total height of a timeline's rows, in inches."""
    return min(max(1.6, 0.42 * trace.num_ranks), max(3.2, 0.21 * trace.num_ranks), 16)


def draw_timeline(ax: "Axes", trace: Trace, unit: Unit, until_s: float) -> None:
    """Draw the rows and the axes of a timeline, with times in ``unit`` from 0 to ``until_s``."""
    # Set the axis limits first, because they determine which numbers fit into their bars.
    ax.set_xlim(0, until_s * unit.per_one or 1)
    ax.set_ylim(max(1, trace.num_ranks) - 0.5, -0.5)
    every = 1 + int(13 * max(1, trace.num_ranks) / (ax.bbox.height * 72 / ax.figure.dpi))  # 13 points for each label
    ax.set_yticks(range(0, trace.num_ranks, every), [f"rank {rank}" for rank in range(0, trace.num_ranks, every)])
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    lanes = [lane for lane in (list(collective_bars(trace)), list(redundancy_bars(trace))) if lane]
    band, *below = _BANDS[len(lanes)]
    _draw_bubble(ax, trace, unit, band)
    drawn = list(bars(trace))
    _draw_bars(ax, drawn, unit, num_chunks(trace), band)
    for lane, own in zip(lanes, below, strict=True):
        _draw_bars(ax, lane, unit, num_chunks(trace), own)
    _draw_numbers(ax, drawn, unit, band)


def _draw_bubble(ax: "Axes", trace: Trace, unit: Unit, band: _Band) -> None:
    style: dict[str, Any] = {"facecolor": BUBBLE, "edgecolor": HATCH, "linewidth": 0}
    idle = [gaps(trace, rank) for rank in range(trace.num_ranks)]
    if sum(map(len, idle)) <= _MOST_HATCHED:
        style["hatch"] = "////"
    for rank, times in enumerate(idle):
        spans = [(start * unit.per_one, (end - start) * unit.per_one) for start, end in times]
        ax.broken_barh(spans, (rank + band.top, band.height), gid=f"rank {rank} bubble", **style)


def _draw_bars(ax: "Axes", drawn: list[Bar], unit: Unit, chunks: int, band: _Band) -> None:
    """Draw the bars as one collection per rank, stage and kind, because drawing thousands of objects is slow."""
    groups: dict[tuple[int, int, int, str, int], list[Bar]] = defaultdict(list)
    for bar in drawn:
        groups[bar.rank, bar.chunk, bar.stage, bar.kind, bar.half].append(bar)
    edge = 0.6 if all(_width_pt(ax, bar, unit) > _EDGE_PT for bar in drawn) else 0
    for (rank, chunk, stage, _, half), members in groups.items():
        kind = members[0].kind
        spans = [(bar.start_s * unit.per_one, (bar.end_s - bar.start_s) * unit.per_one) for bar in members]
        style: dict[str, Any] = {"facecolor": colour(kind, chunk, chunks), "edgecolor": "white", "linewidth": edge}
        top = rank + band.top + (band.height / 2 if half > 0 else 0)
        place = (top, band.height / 2 if half else band.height)
        ax.broken_barh(spans, place, gid=f"rank {rank} {stage}{kind}", **style)


def _draw_numbers(ax: "Axes", drawn: list[Bar], unit: Unit, band: _Band) -> None:
    """Write the micro-batch numbers in the largest font that fits all bars.

    If no font fits all bars, only bars with room for the widest number in the smallest font get a number.
    """
    bottom, top = ax.get_ylim()
    row_pt = ax.bbox.height * 72 / ax.figure.dpi / (bottom - top) / (2 if any(bar.half for bar in drawn) else 1)
    row_pt *= band.height / _HEIGHT
    sizes = [size for size in _FONT_PT if size <= 0.8 * row_pt]
    room = [(bar, _width_pt(ax, bar, unit) - _MARGIN_PT) for bar in drawn if bar.end_s > bar.start_s]
    # Every bar needs room for the widest number, so that bars of equal width either all have a number or all have none.
    need = _DIGIT * len(str(max((bar.microbatch for bar in drawn), default=0)))
    size = next((size for size in sizes if all(size * need <= pt for _, pt in room)), min(sizes, default=0))
    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": INK, "clip_on": True}
    for bar, pt in room if size else ():
        if size * need <= pt:
            middle = (bar.start_s + bar.end_s) / 2 * unit.per_one
            height = bar.rank + band.top + band.height * (2 + bar.half) / 4
            ax.text(middle, height, str(bar.microbatch), **style)


def _width_pt(ax: "Axes", bar: Bar, unit: Unit) -> float:
    left, right = ax.get_xlim()
    width = (bar.end_s - bar.start_s) * unit.per_one / (right - left)
    return float(width * ax.bbox.width * 72 / ax.figure.dpi)
