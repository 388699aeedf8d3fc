"""Comparison: timelines one under the other on one time scale."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipesched.checks import as_list, shown
from pipesched.errors import InputError
from pipesched.simulation.trace import Trace, check_trace
from pipesched.units import time_unit
from pipesched.viz.headline import headline
from pipesched.viz.legend import patches
from pipesched.viz.timeline import DPI, draw_timeline, rows_inches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_compare"]


def plot_compare(traces: "Sequence[tuple[str, Trace]]") -> "Figure":
    """Draw several (label, trace) pairs, such as the predicted above the measured, on one common time scale.

    Each starts at its own first start and is headed by its label, makespan, bubble and peak in flight. Raises
    InputError where there is nothing to draw.
    """
    from matplotlib.figure import Figure

    rule = "a comparison is of a list of (label, trace)"
    remedy = "pass [(label, trace), ...]"
    for pair in (traces := as_list(traces, rule, remedy)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"{rule}; got {shown(pair)} in it; {remedy}")
        check_trace(pair[1])
    if not traces:
        raise InputError("a comparison has at least one timeline; got an empty list; pass [(label, trace), ...]")
    heights = [rows_inches(trace) for _, trace in traces]
    figure = Figure(figsize=(12, 0.8 + sum(heights) + 0.45 * len(traces)), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(traces), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    until_s = max(trace.makespan_s for _, trace in traces)
    unit = time_unit(until_s)
    for ax, (label, trace) in zip(rows, traces, strict=True):
        draw_timeline(ax, trace, unit, until_s)
        ax.set_title(headline(trace, label), loc="left", fontsize=11)
    rows[-1].set_xlabel(f"time [{unit.name}]")
    entries = patches(*(trace for _, trace in traces))
    if entries:
        figure.legend(handles=entries, loc="outside upper right", ncols=len(entries), frameon=False, handlelength=1.4)
    return figure
