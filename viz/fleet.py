"""Fleet: the throughput of several policies over time, with the number of ranks that are alive below."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesched.viz.colours import GREY, stage_colour
from pipesched.viz.timeline import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_fleet"]

_BINS = 160  # means of throughput along the picture; single stalls are too short to be seen
_UNITS = ((2 * 3600, "h", 3600.0), (2 * 60, "min", 60.0), (0, "s", 1.0))

#: The start, the end and the rows per second of each span of time.
Spans = Sequence[tuple[float, float, float]]


def plot_fleet(curves: Mapping[str, Spans], alive: Sequence[tuple[float, int]], *, title: str = "") -> "Figure":
    """Draw the throughput of policies over time, one line for each, and the number of ranks that are alive.

    Each point of a line is the mean over 1/160 of the time. The legend has the mean over the whole time.

    Args:
        curves: for each policy, the spans of time as (start, end, rows per second), in ascending order.
        alive: the number of ranks that are alive, as (time, number from then on).
        title: the title. Default: "".

    Returns:
        The Figure. To save the picture, call its ``savefig``.

    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), dpi=DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    end_s = max((spans[-1][1] for spans in curves.values() if spans), default=0.0) or 1.0
    name, unit_s = next((name, unit_s) for least_s, name, unit_s in _UNITS if end_s >= least_s)
    for at, (policy, spans) in enumerate(curves.items()):
        _draw_curve(upper, policy, list(_means(spans, end_s)), end_s / unit_s, at)
    upper.set_ylim(bottom=0)
    upper.set_ylabel("rows per second")
    upper.set_title(title, loc="left", fontsize=11)
    upper.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    _draw_alive(lower, alive, end_s, unit_s)
    lower.set_xlabel(f"time [{name}]")
    for ax in (upper, lower):
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlim(0, end_s / unit_s)
    return figure


def _draw_curve(ax: "Axes", policy: str, means: list[float], end: float, at: int) -> None:
    times = [end * bin_ / len(means) for bin_ in range(len(means) + 1)]
    style: dict[str, Any] = {"color": stage_colour((5, 1, 3, 2)[at % 4]), "linewidth": 2.0 if at == 0 else 1.2}
    label = f"{policy}: {sum(means) / len(means):.4g} on average"
    ax.step(times, [*means, means[-1]], where="post", label=label, gid=policy, zorder=3 - 0.1 * at, **style)


def _draw_alive(ax: "Axes", alive: Sequence[tuple[float, int]], end_s: float, unit_s: float) -> None:
    times = [time_s / unit_s for time_s, _ in alive] + [end_s / unit_s]
    counts = [count for _, count in alive] + [alive[-1][1]]
    ax.fill_between(times, counts, step="post", color=GREY, alpha=0.35, linewidth=0, gid="alive")
    ax.set_ylim(0, max(counts) * 1.05)
    ax.set_ylabel("ranks alive")


def _means(spans: Spans, end_s: float) -> Iterator[float]:
    """Yield the mean of each bin."""
    at, width_s = 0, end_s / _BINS
    for bin_ in range(_BINS):
        start_s, stop_s, total = bin_ * width_s, (bin_ + 1) * width_s, 0.0
        while at < len(spans) and spans[at][0] < stop_s:
            total += max(0.0, min(spans[at][1], stop_s) - max(spans[at][0], start_s)) * spans[at][2]
            if spans[at][1] > stop_s:
                break
            at += 1
        yield total / width_s
