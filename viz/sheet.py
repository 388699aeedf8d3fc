"""Sheet: a report drawn as one picture, with findings, candidate plans, timelines, and the work of each stage."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesched.simulation.comparison import Comparison
from pipesched.simulation.trace import Trace
from pipesched.units import quote_time, time_unit
from pipesched.viz.colours import BUBBLE, HATCH, INK, colour, towards_white
from pipesched.viz.headline import headline
from pipesched.viz.legend import columns, patches
from pipesched.viz.timeline import DPI, draw_timeline, rows_inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CandidateBar", "plot_report"]

_WIDTH = 12.0  # inches
_LINE = 0.21  # inches, height of a line of text
_LETTERS = 150  # characters per line of text
_MOST = 12  # maximum number of candidates to show
_NAMED = 32  # with more stages, the stages' bars have no numbers


class CandidateBar(NamedTuple):
    """A candidate plan, drawn as one bar."""

    label: str
    #: The predicted step time.
    seconds: float
    #: The text beside the bar.
    note: str = ""
    #: Whether the search chose this plan.
    taken: bool = False
    #: Whether the plan fits into memory.
    fits: bool = True


def plot_report(
    title: str,
    lines: Sequence[str],
    candidates: Sequence[CandidateBar],
    traces: "Sequence[tuple[str, Trace]]",
    comparison: Comparison | None = None,
) -> "Figure":
    """Draw a report on a new Figure. Parts without content are left out.

    Args:
        title: the heading.
        lines: the findings as sentences.
        candidates: the plans that the search compared, drawn as bars on a separate time scale.
        traces: (label, trace) pairs, drawn on a common time scale.
        comparison: the predicted and the measured work of each stage.

    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    text = [part for line in lines for part in wrap(line, _LETTERS, subsequent_indent="    ")]
    shown = candidates[:_MOST]
    inches = [0.55 + 0.26 * len(shown)] if shown else []
    inches += [0.45 + rows_inches(trace) for _, trace in traces]
    inches += [2.2] if comparison else []
    head = 0.5 + _LINE * len(text)
    height = head + sum(inches) + 0.25 * len(inches) + 0.2
    below_text = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - head / height))
    figure = Figure(figsize=(_WIDTH, height), dpi=DPI, layout=below_text)
    figure.text(0.012, 1 - 0.12 / height, title, fontsize=14, fontweight="bold", va="top", color=INK)
    figure.text(0.012, 1 - 0.47 / height, "\n".join(text), fontsize=10, va="top", color=INK, linespacing=1.4)
    if not inches:
        return figure
    rows = iter(figure.subplots(len(inches), squeeze=False, gridspec_kw={"height_ratios": inches})[:, 0])
    if shown:
        _candidates(next(rows), shown, len(candidates) - len(shown))
    _timelines(rows, traces)
    if comparison:
        _work(next(rows), comparison)
    return figure


def _candidates(ax: "Axes", shown: Sequence[CandidateBar], left_out: int) -> None:
    """Draw a bar for each candidate. The chosen plan is in full colour; plans that do not fit in memory are hatched."""
    longest = max(candidate.seconds for candidate in shown)
    for at, candidate in enumerate(shown):
        fill = _colour_of(candidate)
        style: dict[str, Any] = {} if candidate.fits else {"hatch": "////", "edgecolor": HATCH, "linewidth": 0}
        ax.barh(at, candidate.seconds, height=0.72, color=fill, **style)
        words = quote_time(candidate.seconds) + (f"   {candidate.note}" if candidate.note else "")
        ax.text(candidate.seconds + 0.006 * longest, at, words, va="center", fontsize=8, color=INK, clip_on=False)
    ax.set_xlim(0, longest * 1.6)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_yticks(range(len(shown)), [candidate.label for candidate in shown], fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    more = f" ({left_out} more not shown)" if left_out > 0 else ""
    ax.set_title(
        f"candidate plans: step time, bubble and memory, predicted by the search{more}", loc="left", fontsize=11
    )


def _colour_of(candidate: CandidateBar) -> str:
    return "#0072b2" if candidate.taken else BUBBLE if not candidate.fits else towards_white("#0072b2", 0.6)


def _timelines(rows: Any, traces: "Sequence[tuple[str, Trace]]") -> None:
    if not traces:
        return
    until_s = max(trace.makespan_s for _, trace in traces)
    unit = time_unit(until_s)
    drawn = []
    for label, trace in traces:
        ax = next(rows)
        draw_timeline(ax, trace, unit, until_s)
        ax.set_title(headline(trace, label), loc="left", fontsize=11)
        ax.set_xlabel(f"time [{unit.name}]", loc="left")
        drawn.append(ax)
    entries = patches(*(trace for _, trace in traces))
    place: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1, 0), "borderaxespad": 2, "borderpad": 0.2}
    drawn[-1].legend(handles=entries, ncols=columns(entries), frameon=False, fontsize=9, handlelength=1.4, **place)


def _work(ax: "Axes", comparison: Comparison) -> None:
    """Draw the work of each stage in a step, by kind of action: predicted (left bar, lighter) and measured (right)."""
    unit = time_unit(max(max(stage.work_s) for stage in comparison.stages))
    for at, stage in enumerate(comparison.stages):
        bottoms = [0.0, 0.0]
        for kind, pair in stage.seconds.items():
            for side, seconds in enumerate(pair):
                high = stage.counts[kind] * seconds * unit.per_one
                fill = towards_white(colour(kind), 0.55) if side == 0 else colour(kind)
                ax.bar(at + (side - 0.5) * 0.4, high, 0.38, bottom=bottoms[side], color=fill)
                bottoms[side] += high
        if len(comparison.stages) <= _NAMED:
            words = "" if stage.work_s.off is None else f"{stage.work_s.off:+.1%}"
            weight = "bold" if stage is comparison.worst else "normal"
            style: dict[str, Any] = {"ha": "center", "fontsize": 8, "color": INK, "fontweight": weight}
            ax.annotate(words, (at, max(bottoms)), xytext=(0, 4), textcoords="offset points", **style)
    numbers = range(0, len(comparison.stages), 1 + (len(comparison.stages) - 1) // 16)
    ax.set_xticks(numbers, [f"stage {comparison.stages[at].stage}" for at in numbers], fontsize=8)
    ax.set_ylabel(f"[{unit.name}]")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(y=0.15)
    ax.set_title("work of each stage in a step: predicted (light) and measured (full colour)", loc="left", fontsize=11)
