"""Replay: the events of a trace, one after another, for each policy, on the same plans and costs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

from pipesched.checks import as_list, as_path, check_type, shown
from pipesched.errors import InputError
from pipesched.fleet.capacity import Capacity
from pipesched.fleet.events import FleetTrace, counts_of
from pipesched.fleet.fleet_costs import FleetCosts
from pipesched.fleet.policies.checkpoint_restart import CheckpointRestart
from pipesched.fleet.policies.elastic import Elastic
from pipesched.fleet.policies.policy import Policy, Setting
from pipesched.fleet.policies.rerouting import Rerouting
from pipesched.fleet.policies.whole_replicas import WholeReplicas
from pipesched.fleet.run import Activity, Run, Segment
from pipesched.units import quote_bytes
from pipesched.viz.tables import Cell, Table, rich_table, text_table
from pipesched.whole_files import write_whole

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["POLICIES", "FleetReport", "PolicyResult", "replay"]

#: The policies by name. The first is ours.
POLICIES: Mapping[str, Callable[[Setting], Policy]] = {
    "elastic": Elastic,
    "checkpoint-restart": CheckpointRestart,
    "whole-replicas": WholeReplicas,
    "rerouting": Rerouting,
}


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """How a policy spent the time of a trace."""

    policy: str
    segments: tuple[Segment, ...]
    #: How often the run went back to a checkpoint, or restarted in order to use more ranks.
    num_restarts: int
    #: The bytes of layers that moved between ranks.
    moved_bytes: int
    #: The rows that the fastest plans process with the ranks that are alive, if no change costs anything.
    planned_rows: float
    #: The rows that any policy could process with the ranks that are alive, if no change cost anything.
    ideal_rows: float

    @cached_property
    def seconds(self) -> dict[Activity, float]:
        """The time of each activity. The sum is the length of the trace."""
        names: tuple[Activity, ...] = ("train", "lost", "checkpoint", "stall", "restart", "idle")
        return {name: sum(own.seconds for own in self.segments if own.activity == name) for name in names}

    @property
    def rows(self) -> float:
        """The rows of the batches that were trained on, without those that losses took back."""
        return sum(own.seconds * own.rows_per_s for own in self.segments)

    @property
    def rows_per_s(self) -> float:
        """The mean throughput over the trace."""
        total_s = sum(self.seconds.values())
        return self.rows / total_s if total_s else 0.0

    @property
    def share(self) -> float:
        """The rows, as a share of what the planner's fastest plans do with the ranks that are alive."""
        return self.rows / self.planned_rows if self.planned_rows else 0.0

    @property
    def ideal_share(self) -> float:
        """The rows, as a share of what any policy could do with the ranks that are alive."""
        return self.rows / self.ideal_rows if self.ideal_rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Convert the figures to plain values for JSON."""
        return {
            "policy": self.policy,
            "rows_per_s": self.rows_per_s,
            "share_of_planned": self.share,
            "share_of_ideal": self.ideal_share,
            "seconds": dict(self.seconds),
            "num_restarts": self.num_restarts,
            "moved_bytes": self.moved_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """The results of all policies on one trace.

    ::

        report = pipesched.fleet.replay(trace, profile, batch_size=512, memory_limit_bytes="72GB")
        print(report)              # plain text; rich.print(report) adds colours
        report.save("fleet.png")   # or .svg, .pdf, .json
    """

    trace: FleetTrace
    results: tuple[PolicyResult, ...]

    def __getitem__(self, policy: str) -> PolicyResult:
        for result in self.results:
            if result.policy == policy:
                return result
        raise KeyError(policy)

    @property
    def table(self) -> Table:
        """The figures of all policies, one row for each."""
        title = f"{self.trace.name or 'trace'}: {counts_of(self.trace)}"
        best = max((result.rows for result in self.results), default=0.0)
        return Table.of(title, [_row(result, best) for result in self.results], words=("policy",), note=_NOTE)

    def text(self) -> str:
        """Return the table as plain text."""
        return text_table(self.table)

    __str__ = text

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield rich_table(self.table)

    def to_dict(self) -> dict[str, Any]:
        """Convert the figures to plain values for JSON."""
        return {
            "trace": self.trace.name,
            "num_ranks": self.trace.num_ranks,
            "duration_s": self.trace.duration_s,
            "policies": [result.to_dict() for result in self.results],
        }

    def plot(self) -> Any:
        """Draw the throughput of each policy over time, and the number of ranks that are alive. Returns the Figure."""
        from pipesched.viz import plot_fleet

        curves = {result.policy: result.segments for result in self.results}
        return plot_fleet(
            {name: [(own.start_s, own.end_s, own.rows_per_s) for own in curve] for name, curve in curves.items()},
            self.trace.num_alive,
            title=self.table.title,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the figures to a .json file, or the picture to a .png, .svg or .pdf file."""
        file = as_path(path)
        if file.suffix == ".json":
            write_whole(file, json.dumps(self.to_dict(), indent=1) + "\n")
        elif file.suffix in (".png", ".svg", ".pdf"):
            self.plot().savefig(file)
        else:
            raise InputError(
                f"a report of a fleet is saved as .json, .png, .svg or .pdf; got {file.name!r}; change the suffix"
            )


_NOTE = (
    "planned: share of the rows of the fastest plans for the ranks alive. ideal: share of the best that any policy "
    "could do with them. lost: training that was taken back."
)


def _row(result: PolicyResult, best_rows: float) -> dict[str, Cell]:
    seconds = result.seconds
    tone: Any = "good" if result.rows == best_rows else ""
    return {
        "policy": Cell(result.policy, tone="strong"),
        "rows/s": Cell(f"{result.rows_per_s:.4g}", result.rows_per_s, tone),
        "planned": Cell(f"{result.share:.1%}", result.share),
        "ideal": Cell(f"{result.ideal_share:.1%}", result.ideal_share),
        "lost": Cell(f"{seconds['lost']:.0f} s", seconds["lost"]),
        "stalls": Cell(f"{seconds['stall']:.0f} s", seconds["stall"]),
        "restarts": Cell(f"{result.num_restarts} ({seconds['restart']:.0f} s)", result.num_restarts),
        "checkpoints": Cell(f"{seconds['checkpoint']:.0f} s", seconds["checkpoint"]),
        "idle": Cell(f"{seconds['idle']:.0f} s", seconds["idle"]),
        "moved": Cell(quote_bytes(result.moved_bytes), result.moved_bytes),
    }


def replay(
    trace: FleetTrace,
    capacity: Capacity,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    costs: FleetCosts | None = None,
) -> FleetReport:
    """Replay a trace for each policy. The same arguments always give the same report.

    ::

        capacity = pipesched.fleet.Capacity(profile, batch_size=512, num_ranks=64, memory_limit_bytes="72GB")
        report = pipesched.fleet.replay(pipesched.fleet.generate("spot"), capacity)

    Args:
        trace: the losses and returns of ranks.
        capacity: the plans for each number of ranks. Several replays can share it.
        policies: names of `POLICIES`. Default: all.
        costs: the costs of changes. Default: ``FleetCosts()``.

    Raises:
        InputError: for an unknown policy, and a trace with more ranks than the capacity.

    """
    check_type(trace, FleetTrace, "trace must be a FleetTrace", "pass fleet.read_trace(path) or fleet.generate(name)")
    check_type(capacity, Capacity, "capacity must be a Capacity", "pass fleet.Capacity(profile, ...)")
    known = FleetCosts() if costs is None else costs
    check_type(known, FleetCosts, "costs must be FleetCosts", "for example, pass FleetCosts(restart_s=60)")
    rule = f"policies must be names of policies: {', '.join(POLICIES)}"
    names = as_list(policies, rule, "pass a list of them")
    for name in names:
        if not isinstance(name, str) or name not in POLICIES:
            raise InputError(f"{rule}; got {shown(name)}; choose from them")
    if trace.num_ranks > capacity.num_ranks:
        raise InputError(
            f"the capacity must be for as many ranks as the trace; the trace has {trace.num_ranks}, the capacity "
            f"{capacity.num_ranks}; pass num_ranks={trace.num_ranks} to Capacity"
        )
    setting = Setting(capacity=capacity, costs=known, between_losses_s=trace.between_losses_s)
    return FleetReport(trace=trace, results=tuple(_result(trace, name, setting) for name in names))


def _result(trace: FleetTrace, name: str, setting: Setting) -> PolicyResult:
    run = _run(trace, POLICIES[name](setting))
    return PolicyResult(
        policy=name,
        segments=tuple(run.segments),
        num_restarts=run.num_restarts,
        moved_bytes=run.moved_bytes,
        planned_rows=sum(span_s * setting.capacity.best_rows_per_s(count) for span_s, count in _spans(trace)),
        ideal_rows=sum(span_s * setting.capacity.ideal_rows_per_s(count) for span_s, count in _spans(trace)),
    )


def _run(trace: FleetTrace, policy: Policy) -> Run:
    run = policy.begin(trace.num_ranks)
    for change in trace.changes:
        run.advance(change.time_s, lambda: policy.on_wake(run))
        policy.on_event(run, change)
    run.advance(trace.duration_s, lambda: policy.on_wake(run))
    return run


def _spans(trace: FleetTrace) -> Iterator[tuple[float, int]]:
    """Yield the spans between two changes, as their length and the number of ranks that are alive."""
    ends = [*trace.num_alive, (trace.duration_s, 0)]
    for (start_s, count), (end_s, _) in pairwise(ends):
        yield end_s - start_s, count
