"""Report: a plan, what was weighed against it, what was expected of it and what came of it, for people to read."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from pipesched.checks import as_path, check_type
from pipesched.errors import InputError
from pipesched.partitioning.result import span
from pipesched.planning.alternatives import Alternative
from pipesched.planning.plan import Plan
from pipesched.program.actions import Kind
from pipesched.program.checkpoint_options import Keep, checkpoint_in_words, keep_by_layer
from pipesched.simulation.comparison import Comparison, Pair, compared, measured_costs, quote_off
from pipesched.simulation.trace import Trace, check_trace, chrome_json
from pipesched.units import counted, quote_bytes, quote_count, quote_time, time_unit
from pipesched.viz.page import html_page
from pipesched.viz.sheet import Candidate, plot_report
from pipesched.viz.tables import Cell, Table, rich_table, text_table
from pipesched.viz.text import text_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Report"]

_NOTABLE = 0.05  # a prediction that is farther off is marked
_OTHERWISE = 0.001  # two predictions that differ by more are not the same
_PICTURES = (".png", ".svg", ".pdf")
_TREATED: dict[Keep, str] = {"recompute": "recomputed", "offload": "offloaded"}
_TIMED = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.OFFLOAD, Kind.FETCH)
_BASELINES = {"equal split": "an equal split", "one device": "one device"}
_SHAPE = ("ranks", "chunks", "m", "checkpoint")  # columns that are left out where all rows have the same
_WEIGHED = {
    "m": "m: micro-batches.",
    "predicted": "predicted: by the search.",
    "memory": "memory: of the largest rank.",
    "margin": "margin: to what a rank may hold.",
}
_STAGES = "Times and sizes are of one micro-batch. kept: activations for the backward. sent: the stage's output."
_RANKS = "busy: share of the step. in flight: the most (stage, micro-batch) pairs at once."
_MEMORY = "The most that each rank needs at once, as predicted."
_MEDIANS = "Medians of the stage's actions, predicted → measured; a step: all of them."


@dataclass(frozen=True)
class Report:
    """A plan explained: the candidates that were weighed, its stages, the bound, and predicted beside measured time.

    predicted: what was expected of a step; the plan's own prediction unless given. measured: a step that ran, of all
    ranks. notes: what is to be known of these two, and of the devices, a sentence each. ``str`` and ``print`` give
    text, ``rich.print`` colours; ``save`` writes a picture or a page.
    """

    plan: Plan
    measured: Trace | None = None
    predicted: Trace | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_type(self.plan, Plan, "plan is a Plan", "pass such as pipe.plan, or Plan.load(path)")
        for trace in (self.measured, self.predicted):
            if trace is not None:
                check_trace(trace)
        if self.predicted is None:
            object.__setattr__(self, "predicted", self.plan.predicted())

    @cached_property
    def comparison(self) -> Comparison | None:
        """Predicted beside measured; None where one of them is not known. Raises InputError for another program's."""
        if self.predicted is None or self.measured is None:
            return None
        return compared(self.predicted, self.measured)

    @property
    def traces(self) -> list[tuple[str, Trace]]:
        """What timelines show: the predicted one, the measured one."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return [(label, trace) for label, trace in both if trace is not None]

    # ---- in words ---------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """What runs, in a few words."""
        program = self.plan.program
        return (
            f"{self.plan.schedule} on {counted(program.num_ranks, 'rank')}: {counted(program.num_stages, 'stage')}, "
            f"{counted(program.num_microbatches, 'micro-batch')}, "
            f"checkpoint {checkpoint_in_words(self.plan.checkpoint)}"
        )

    @property
    def lines(self) -> list[str]:
        """The findings, a sentence each, the most important ones first."""
        said = (
            *self._step(),
            *self.notes,
            *self._searched(),
            *self._confirmed(),
            *self._bound(),
            *self._gains(),
            *self._cut(),
        )
        return [*said, *map(str, self.plan.ties)]

    def _step(self) -> Iterator[str]:
        if self.comparison is not None:
            yield str(self.comparison)
            yield from self._causes(self.comparison)
            bubble = self.comparison.bubble_ratio
            yield f"bubble predicted {bubble.predicted:.1%}, measured {bubble.measured:.1%}"
        elif self.predicted is not None:
            yield f"predicted {quote_time(self.predicted.makespan_s)} a step, bubble {self.predicted.bubble_ratio:.1%}"
        else:
            yield "what a step takes is not known: layers were not measured"

    def _searched(self) -> Iterator[str]:
        """What the search expected, where what is shown as predicted is something else."""
        taken = self._taken
        if taken is not None and self.predicted is not None:
            off = self.predicted.makespan_s / taken.step_s - 1 if taken.step_s else 0
            if abs(off) > _OTHERWISE:
                yield (
                    f"the search had predicted {quote_time(taken.step_s)} a step; what was weighed, and the cut, "
                    f"are as it saw them"
                )

    def _causes(self, comparison: Comparison) -> Iterator[str]:
        """What of the difference comes from stages that took other times: the plan, simulated with these."""
        costs, step = self.plan.costs, comparison.step_s
        if costs is None or self.measured is None or step is None or not step.predicted:
            return
        if len(comparison.stages) < costs.num_stages:
            return
        plans = self.plan, replace(self.plan, costs=measured_costs([self.measured], costs.num_stages, costs))
        before, after = (trace.makespan_s for trace in map(Plan.predicted, plans) if trace is not None)
        stages = (after - before) / step.predicted
        rest = (step.measured - step.predicted) / step.predicted - stages
        yield f"of that {quote_off(stages)} is what stages took, {quote_off(rest)} what lies between their actions"

    def _bound(self) -> Iterator[str]:
        """How far from the best that there could be."""
        if self.predicted is not None and self.predicted.bound_s is not None:
            yield (
                f"no schedule of these stages on these ranks takes less than {quote_time(self.predicted.bound_s)}: "
                f"the predicted step is {self.predicted.above_bound:.1%} above that"
            )

    def _confirmed(self) -> Iterator[str]:
        """What it took when it ran beside others, before it was chosen."""
        taken = self._taken
        if taken is not None and taken.measured_s is not None and taken.first_s:
            others = sum(other.measured_s is not None for other in self.plan.alternatives) - 1
            off = quote_off(taken.measured_s / taken.first_s - 1)
            yield (
                f"confirmed: it ran beside {others} of the others and took {quote_time(taken.measured_s)} a step, of "
                f"{quote_time(taken.first_s)} as first predicted ({off}); the costs here are corrected by that"
            )

    @property
    def _taken(self) -> Alternative | None:
        """The plan's own line among the alternatives."""
        return next((other for other in self.plan.alternatives if not other.note), None)

    def _gains(self) -> Iterator[str]:
        """Against doing nothing: as measured where both ran, else as the search predicted it."""
        taken = self._taken
        for label, name in _BASELINES.items():
            baseline = self._best(label)
            if baseline is None or baseline is taken or taken is None:
                continue
            own_s, other_s, how = taken.step_s, baseline.step_s, "the search predicted"
            if taken.measured_s and baseline.measured_s:
                own_s, other_s, how = taken.measured_s, baseline.measured_s, "measured"
            if own_s:
                yield f"{_faster(other_s / own_s, name)} ({quote_time(other_s)}), as {how}"

    def _best(self, label: str) -> Alternative | None:
        """The fastest of the alternatives with this label: a baseline may have several schedules."""
        own = [other for other in self.plan.alternatives if other.label == label]
        return min(own, key=lambda other: other.step_s, default=None)

    def _cut(self) -> Iterator[str]:
        """The stage that holds all others up, and why there is no better cut."""
        cut = self.plan.partition
        if cut is not None:
            verdict = "no cut is better" if cut.proved else f"the best cut is at most {cut.gap:.1%} better"
            yield f"bottleneck: {cut.bottleneck}, {quote_time(cut.bottleneck_s)} a micro-batch; {verdict}: {cut.reason}"

    # ---- in numbers -------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Table]:
        """Candidates, predicted beside measured, stages, ranks, and their memory, as far as they are known."""
        made = (self._candidates(), self._differences(), self._stages(), self._ranks(), self._memory())
        return [table for table in made if table]

    def _candidates(self) -> Table | None:
        others = self.plan.alternatives
        if not others:
            return None
        equal = self._best("equal split")
        rows = [_candidate(other, equal.step_s if equal else None) for other in others]
        alike = {name: rows[0][name].text for name in _SHAPE if len({row[name].text for row in rows}) == 1}
        rows = [{name: cell for name, cell in row.items() if name not in alike} for row in rows]
        note = f"All have {', '.join(map(' '.join, alike.items()))}. " if alike else ""
        words = ("plan", "schedule", "checkpoint", "why not")
        note += " ".join(said for name, said in _WEIGHED.items() if name == "m" or any(name in row for row in rows))
        return Table.of("What was weighed", rows, words, note, ("predicted",))

    def _stages(self) -> Table:
        program, costs = self.plan.program, self.plan.costs
        cut, treated = self.plan.partition, keep_by_layer(self.plan.checkpoint)
        rows = []
        for stage, part in enumerate(program.weights):
            layers = self.plan.stages[part]
            row = {
                "stage": Cell(str(stage), stage),
                "rank": Cell(str(program.placement[stage]), program.placement[stage]),
                "layers": Cell(str(len(layers)), len(layers)),
                "first .. last": Cell(span(layers) if layers else "none"),
            }
            kept = Counter(treated[name].removesuffix("-cheap") for name in layers if name in treated)
            row |= {head: Cell(str(kept[word] or ""), kept[word]) for word, head in _TREATED.items()}
            if costs is not None:
                runs = self.plan.treated.index
                kinds = [kind for kind in _TIMED if runs.has(kind)]
                row |= {str(kind): _time(costs.times(kind)[stage]) for kind in kinds}
                row |= {
                    "weights": _bytes(costs.weight_bytes[stage]),
                    "kept": _bytes(costs.activation_bytes[stage]),
                    "sent": _bytes(costs.output_bytes[stage]),
                }
            if cut is not None and cut.summaries and cut.summaries[part].num_parameters:
                count = cut.summaries[part].num_parameters
                row["parameters"] = Cell(quote_count(count), count)
            rows.append(row)
        return Table.of("Stages", rows, ("first .. last",), _STAGES if costs else "")

    def _ranks(self) -> Table | None:
        trace = self.predicted
        if trace is None:
            return None
        rows = []
        for rank in range(trace.num_ranks):
            own = [str(stage) for stage, place in enumerate(self.plan.program.placement) if place == rank]
            row = {"rank": Cell(str(rank), rank), "stages": Cell(" ".join(own))}
            if self.comparison is None:
                row["busy"] = _share(trace.busy_ratios[rank])
            else:
                busy = self.comparison.busy[rank]
                row |= {"busy, predicted": _share(busy.predicted), "busy, measured": _share(busy.measured)}
            row["in flight"] = Cell(str(trace.peak_in_flight[rank]), trace.peak_in_flight[rank])
            rows.append(row)
        return Table.of("Ranks", rows, ("stages",), _RANKS)

    def _memory(self) -> Table | None:
        """A row a rank: the parts of what it needs, their sum, and what is left of what it may hold."""
        needs = self.plan.memory()
        if not any(need.total_bytes for need in needs):
            return None
        limit = self._taken.limit_bytes if self._taken else None
        rows = []
        for rank, need in enumerate(needs):
            parts = asdict(need)
            row = {"rank": Cell(str(rank), rank)}
            row |= {
                name.replace("_", " "): _bytes(parts[name])
                for name in parts
                if any(getattr(own, name) for own in needs)
            }
            row |= {"all": _bytes(need.total_bytes)}
            if limit is not None:
                row["margin"] = _margin(limit - need.total_bytes)
            rows.append(row)
        return Table.of("Memory", rows, (), _MEMORY, ("all",))

    def _differences(self) -> Table | None:
        if self.comparison is None:
            return None
        worst, rows = self.comparison.worst, []
        for own in self.comparison.stages:
            row = {"stage": Cell(str(own.stage), own.stage), "rank": Cell(str(own.rank), own.rank)}
            for kind, pair in own.seconds.items():
                row |= _pair(str(kind), pair)
            row |= _pair("a step", own.work_s, "bad" if own is worst and abs(pair.off or 0) > _NOTABLE else "strong")
            rows.append(row)
        return Table.of("Predicted and measured, by stage", rows, (), _MEDIANS)

    # ---- shown ------------------------------------------------------------------------------------------------

    def text(self, width: int = 120) -> str:
        """All of it as plain text, timelines at most ``width`` columns wide."""
        timelines = [f"{label}\n{text_timeline(trace, width)}" for label, trace in self.traces]
        return "\n\n".join(["\n".join([self.title, *self.lines]), *map(text_table, self.tables), *timelines])

    __str__ = text

    def figure(self) -> "Figure":
        """All but the tables as one picture."""
        candidates = [_bar(other) for other in self.plan.alternatives]
        return plot_report(self.title, self.lines, candidates, self.traces, self.comparison)

    def html(self) -> str:
        """All of it as one page that needs no other file and no network."""
        return html_page(self.title, self.lines, self.tables, self.traces)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a page (.html), a picture (.png, .svg, .pdf), text (.txt), or both timelines for Perfetto (.json).

        Raises InputError for another ending.
        """
        path = as_path(path)
        if path.suffix in _PICTURES:
            self.figure().savefig(path)
        elif path.suffix in _TEXTS:
            path.write_text(_TEXTS[path.suffix](self), encoding="utf-8")
        else:
            endings = ", ".join([*_TEXTS, *_PICTURES])
            raise InputError(f"a report is saved as {endings}; got {path.name!r}; give it such an ending")

    def chrome(self) -> str:
        """Chrome's trace-event JSON, which Perfetto opens: of each rank the predicted step above the measured one."""
        sides = enumerate(self.traces)
        return chrome_json([event for at, (label, own) in sides for event in own.chrome_events(label, (at, 2))])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """As ``rich.print`` shows it."""
        from rich.text import Text

        yield Text(self.title, style="bold")
        yield Text("\n".join(self.lines) + "\n")
        for table in self.tables:
            yield rich_table(table)
        for label, trace in self.traces:
            yield Text(label, style="bold")
            yield Text(text_timeline(trace, options.max_width) + "\n", no_wrap=True, overflow="crop")


_TEXTS: dict[str, Callable[[Report], str]] = {
    ".html": Report.html,
    ".txt": lambda report: f"{report.text()}\n",
    ".json": Report.chrome,
}


def _candidate(other: Alternative, equal_s: float | None) -> dict[str, Cell]:
    tone: Any = "bad" if not other.fits else "strong" if not other.note else ""
    row = {
        "plan": Cell(other.label, tone=tone),
        "schedule": Cell(other.schedule if other.schedule != other.label else ""),
        "ranks": Cell(str(other.num_ranks), other.num_ranks),
        "chunks": Cell(str(other.chunks_per_rank), other.chunks_per_rank),
        "m": Cell(str(other.num_microbatches), other.num_microbatches),
        "checkpoint": Cell(other.checkpoint),
        "predicted": _time(other.step_s),
    }
    if equal_s:
        change = other.step_s / equal_s - 1
        row["to equal split"] = Cell(quote_off(change), change)
    if other.measured_s is not None:
        row["measured"] = _time(other.measured_s)
    row["bubble"] = _share(other.bubble_ratio)
    if other.peak_bytes is not None:
        row["memory"] = _bytes(other.peak_bytes)
    if other.peak_bytes is not None and other.limit_bytes is not None:
        row["margin"] = _margin(other.limit_bytes - other.peak_bytes)
    row["why not"] = Cell(other.note)
    return row


def _bar(other: Alternative) -> Candidate:
    measured = [f"measured {quote_time(other.measured_s)}"] if other.measured_s is not None else []
    memory = [quote_bytes(other.peak_bytes, 4)] if other.peak_bytes is not None else []
    words = [f"bubble {other.bubble_ratio:.1%}", *memory, *measured, *([other.note] if other.note else [])]
    label = other.label if other.schedule in other.label else f"{other.label}, {other.schedule}"
    return Candidate(label=label, seconds=other.step_s, note=", ".join(words), taken=not other.note, fits=other.fits)


def _time(seconds: float) -> Cell:
    return Cell(quote_time(seconds), float(seconds))


def _bytes(size: float) -> Cell:
    return Cell(quote_bytes(size, 4), float(size))


def _margin(size: int) -> Cell:
    return Cell(("-" if size < 0 else "") + quote_bytes(abs(size), 4), size, "bad" if size < 0 else "")


def _share(share: float) -> Cell:
    return Cell(f"{share:.1%}", share)


def _pair(name: str, pair: Pair, tone: Any = "") -> dict[str, Cell]:
    """What was predicted of something and what was measured, and how far that is off."""
    unit = time_unit(max(pair))
    both = " → ".join(f"{value * unit.per_one:.4g}" for value in pair)
    return {
        name: Cell(f"{both} {unit.name}", pair.measured),
        f"{name} off": Cell(quote_off(pair.off), pair.off, tone),
    }


def _faster(ratio: float, name: str) -> str:
    """A ratio of two times as people say it: ``12 % faster than this``, ``3.4 times as fast as that``."""
    if ratio >= 2:
        return f"{ratio:.1f} times as fast as {name}"
    if abs(ratio - 1) < _OTHERWISE / 2:
        return f"as fast as {name}"
    return f"{abs(ratio - 1):.1%} {'faster' if ratio >= 1 else 'slower'} than {name}"
