"""Comparison: several timelines, one below the other, on a common time scale."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipesched.checks import as_list, shown
from pipesched.errors import InputError
from pipesched.simulation.trace import Trace, check_trace
from pipesched.units import time_unit
from pipesched.viz.headline import headline
from pipesched.viz.legend import columns, patches
from pipesched.viz.timeline import DPI, draw_timeline, rows_inches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_compare"]


def plot_compare(traces: "Sequence[tuple[str, Trace]]") -> "Figure":
    """Draw several traces, such as the predicted and the measured step, one below the other on a common time scale.

    Each timeline begins when the first action of its trace starts. Its title gives the label, the makespan, the bubble
    and the peak number of micro-batches in flight.

        pipesched.viz.plot_compare([("predicted", pipe.predicted), ("measured", pipe.trace)]).savefig("step.png")

    Args:
        traces: (label, trace) pairs, drawn from top to bottom.

    Returns:
        A new Figure.

    Raises:
        InputError: if the list is empty or an entry is not a (label, trace) pair.

    """
    from matplotlib.figure import Figure

    rule = "a comparison needs a list of (label, trace) pairs"
    remedy = "pass [(label, trace), ...]"
    for pair in (traces := as_list(traces, rule, remedy)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"{rule}; one entry is {shown(pair)}; {remedy}")
        check_trace(pair[1])
    if not traces:
        raise InputError("a comparison needs at least one timeline; got an empty list; pass [(label, trace), ...]")
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
        figure.legend(
            handles=entries,
            loc="outside upper left",
            ncols=columns(entries),
            frameon=False,
            handlelength=1.4,
        )
    return figure
