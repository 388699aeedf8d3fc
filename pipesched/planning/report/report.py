"""Report: presents a plan, the plans that it was compared with, and predicted and measured times to human readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from os import PathLike
from typing import TYPE_CHECKING

from pipesched.checks import as_path, check_type
from pipesched.errors import InputError
from pipesched.planning.alternatives import Alternative
from pipesched.planning.plan import Plan
from pipesched.planning.report.findings import findings
from pipesched.planning.report.key_figures import key_figures
from pipesched.planning.report.tables import tables
from pipesched.program.checkpoint_options import checkpoint_in_words
from pipesched.simulation.comparison import Comparison, compared
from pipesched.simulation.trace import Trace, check_trace, chrome_json
from pipesched.units import counted, quote_bytes, quote_time
from pipesched.viz.image import image_html
from pipesched.viz.page import html_page
from pipesched.viz.sheet import CandidateBar, plot_report
from pipesched.viz.tables import KeyFigure, Table, rich_table, text_table
from pipesched.viz.text import text_timeline
from pipesched.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Report"]

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Report:
    """A readable explanation of a plan: compared plans, stages, lower bound, predicted and measured times.

    ::

        report = pipe.report()
        print(report)              # plain text; rich.print(report) adds colours
        report.save("report.html")

    Attributes:
        plan: the plan to explain.
        measured: the trace of a measured step on all ranks. None: nothing was measured.
        predicted: the trace of a predicted step. Default: the plan's own prediction.
        notes: sentences to add, for example about the devices.

    """

    plan: Plan
    measured: Trace | None = None
    predicted: Trace | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_type(self.plan, Plan, "plan must be a Plan", "for example, pass pipe.plan, or Plan.load(path)")
        for trace in (self.measured, self.predicted):
            if trace is not None:
                check_trace(trace)
        if self.predicted is None:
            object.__setattr__(self, "predicted", self.plan.predicted())

    @cached_property
    def comparison(self) -> Comparison | None:
        """The comparison of the predicted with the measured step; None if one of them is missing.

        Raises InputError if the steps belong to different programs.
        """
        if self.predicted is None or self.measured is None:
            return None
        return compared(self.predicted, self.measured)

    @property
    def traces(self) -> list[tuple[str, Trace]]:
        """The predicted and the measured trace, each with its label. A missing trace is left out."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return [(label, trace) for label, trace in both if trace is not None]

    # ---- content ----------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The first line of the report: schedule, ranks, stages, micro-batches and checkpointing."""
        program = self.plan.program
        return (
            f"{self.plan.schedule} on {self.plan.ranks}: {counted(program.num_stages, 'stage')}, "
            f"{counted(program.num_microbatches, 'micro-batch')}, "
            f"checkpoint {checkpoint_in_words(self.plan.checkpoint)}"
        )

    @property
    def lines(self) -> list[str]:
        """The sentences of the report. The first sentence is about the step time."""
        return findings(self.plan, self.predicted, self.measured, self.comparison, self.notes)

    @property
    def next_steps(self) -> list[str]:
        """The last lines of the report: what to do next."""
        steps = [str(step) for step in self.plan.advice.next_steps]
        if steps:
            return steps
        if self.plan.advice.why_not_more:
            return ["next: keep this plan; no change that pipesched tried saves 2 % of the predicted step"]
        return ["next: pipesched.tune compares this plan with others, and says what a change would gain"]

    @property
    def key_figures(self) -> list[KeyFigure]:
        """The figures at the top of a page: speed compared with one device, bubble, slowest stage."""
        return key_figures(self.plan, self.predicted, self.comparison)

    @property
    def tables(self) -> list[Table]:
        """Tables of compared plans, prediction errors, stages, ranks and memory. Tables without values are left out."""
        return tables(self.plan, self.predicted, self.comparison)

    # ---- output -----------------------------------------------------------------------------------------------

    def text(self, width: int = 120) -> str:
        """Return the whole report as plain text. Timelines are at most ``width`` columns wide."""
        timelines = [f"{label}\n{text_timeline(trace, width)}" for label, trace in self.traces]
        first, last = "\n".join([self.title, *self.lines]), "\n".join(self.next_steps)
        return "\n\n".join([first, *map(text_table, self.tables), *timelines, last])

    __str__ = text

    def figure(self) -> "Figure":
        """Return the report as one matplotlib figure, without the tables."""
        candidates = [_bar(other) for other in self.plan.alternatives]
        return plot_report(self.title, [*self.lines, *self.next_steps], candidates, self.traces, self.comparison)

    def html(self) -> str:
        """Return the report as one self-contained HTML page."""
        return html_page(self.title, self.key_figures, self.lines, self.tables, self.traces, self.next_steps)

    def _repr_html_(self) -> str:
        """Return the figure as HTML, for notebooks."""
        return image_html(self.figure(), "; ".join([self.title, *self.lines[:1]]))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file, in the format given by the suffix.

        Formats: page (.html), picture (.png, .svg, .pdf), text (.txt), or both traces for Perfetto (.json).

        Raises:
            InputError: for any other suffix.

        """
        path = as_path(path)
        if path.suffix in _PICTURES:
            picture = BytesIO()
            self.figure().savefig(picture, format=path.suffix.removeprefix("."))
            write_whole(path, picture.getvalue())
        elif path.suffix in _TEXTS:
            write_whole(path, _TEXTS[path.suffix](self))
        else:
            suffixes = ", ".join([*_TEXTS, *_PICTURES])
            raise InputError(f"a report can only be saved as {suffixes}; got {path.name!r}; use one of these suffixes")

    def chrome(self) -> str:
        """Return Chrome trace-event JSON for Perfetto, with each rank's predicted step above its measured step."""
        sides = enumerate(self.traces)
        return chrome_json([event for at, (label, own) in sides for event in own.chrome_events(label, (at, 2))])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(self.title, style="bold")
        yield Text("\n".join(self.lines) + "\n")
        for table in self.tables:
            yield rich_table(table)
        for label, trace in self.traces:
            yield Text(label, style="bold")
            yield Text(text_timeline(trace, options.max_width) + "\n", no_wrap=True, overflow="crop")
        yield Text("\n".join(self.next_steps))


_TEXTS: dict[str, Callable[[Report], str]] = {
    ".html": Report.html,
    ".txt": lambda report: f"{report.text()}\n",
    ".json": Report.chrome,
}


def _bar(other: Alternative) -> CandidateBar:
    measured = [f"measured {quote_time(other.measured_s)}"] if other.measured_s is not None else []
    memory = [quote_bytes(other.peak_bytes, 4)] if other.peak_bytes is not None else []
    words = [f"bubble {other.bubble_ratio:.1%}", *memory, *measured, *([other.note] if other.note else [])]
    label = other.label if other.schedule in other.label else f"{other.label}, {other.schedule}"
    return CandidateBar(label=label, seconds=other.step_s, note=", ".join(words), taken=not other.note, fits=other.fits)
