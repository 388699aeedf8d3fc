"""Trace: the start and end time of each action of a step, predicted or measured."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from numbers import Real
from os import PathLike
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipesched.checks import LARGEST, as_list, as_path, check_number, check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import load_json, maybe, read_fields
from pipesched.program.action_arrays import CODES, Columns, Ints, Orders
from pipesched.program.actions import NUMBERED, OTHER_END, Action, Kind, Lane, Queue
from pipesched.program.dependencies import WEIGHT_USES
from pipesched.program.liveness import Held, bytes_held, pairs_held, versions_held
from pipesched.simulation.communication_time import CommunicationTime
from pipesched.simulation.costs import Costs, check_costs
from pipesched.simulation.links import plain
from pipesched.simulation.perfetto_file import perfetto_bytes
from pipesched.units import counted, quote_time
from pipesched.whole_files import write_whole

__all__ = ["Span", "Spans", "Trace", "check_trace", "chrome_json"]

Times = NDArray[Any]
_MOST_RANKS = 100_000  # the largest number of ranks in a trace
_SPANS = "a trace must have num_ranks, and spans of the form [action, rank, start_s, end_s]"
_TO_DICT = "write the dict that to_dict returns"
_REMARKS = "pipesched"  # the key of a trace's other fields in Chrome trace-event JSON


class Span(NamedTuple):
    """The time of one action on one rank.

    Attributes:
        action: the action.
        rank: the rank that ran the action.
        start_s: start time in seconds.
        end_s: end time in seconds.
        lane: the resource of the rank that the action occupies: compute, copy, collective or redundancy.

    """

    action: Action
    rank: int
    start_s: float
    end_s: float
    lane: Lane


class Spans(Sequence[Span]):
    """A sequence of spans, stored as columns of actions, ranks, starts and ends."""

    def __init__(self, columns: Columns, rank: Ints, start_s: Times, end_s: Times) -> None:
        self.columns = columns
        self.rank = rank
        self.start_s = start_s
        self.end_s = end_s

    @classmethod
    def of(cls, spans: "Iterable[Span]") -> "Spans":
        """Store an iterable of spans as columns."""
        if isinstance(spans, Spans):
            return spans
        spans = tuple(as_list(spans, "a trace must have a list of Spans", "pass a list of Span(...)"))
        try:
            rank = np.array([span.rank for span in spans], np.int64)
            times = (_times([span.start_s for span in spans]), _times([span.end_s for span in spans]))
        except (AttributeError, TypeError, ValueError) as error:
            raise ScheduleError(
                f"a trace must have a list of Spans; got a different type ({error}); make them with Span(action, rank, "
                f"start_s, end_s, lane)"
            ) from error
        return cls(Columns.of(span.action for span in spans), rank, *times)

    @classmethod
    def of_program(cls, orders: Orders, starts: list[Any] | Times, ends: list[Any] | Times) -> "Spans":
        """Return a span for each action of a program, in the order of its rows.

        The actions of an overlapping pair are separate spans with overlapping times.
        """
        columns = replace(orders.columns, joined=np.zeros(len(orders.columns), np.bool_))
        return cls(columns, orders.rank_of, _times(starts), _times(ends))

    def at(self, rows: Any) -> "Spans":
        """Return the spans that a mask, slice or index array selects."""
        return Spans(self.columns[rows], self.rank[rows], self.start_s[rows], self.end_s[rows])

    def intervals(self) -> Iterator[tuple[Any, Any]]:
        """Yield the start and the end of each span in seconds."""
        return zip(self.start_s.tolist(), self.end_s.tolist(), strict=True)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Span]:
        lists = (column.tolist() for column in (self.rank, self.start_s, self.end_s))
        for action, rank, start_s, end_s in zip(self.columns, *lists, strict=True):
            yield Span(action, rank, start_s, end_s, action.lane)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self.at(index))
        row = range(len(self))[index]
        return next(iter(self.at(slice(row, row + 1))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spans):
            return isinstance(other, tuple | list) and tuple(self) == tuple(other)
        pairs = ((self.rank, other.rank), (self.start_s, other.start_s), (self.end_s, other.end_s))
        return self.columns == other.columns and all(np.array_equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash(self.columns)


def _times(values: list[Any] | Times) -> Times:
    """Return times as an array. Its dtype is float, integer or, for other types such as Fraction, object."""
    array = np.asarray(values) if len(values) else np.zeros(0)
    if array.dtype.kind in "fi":
        return array
    exact = np.empty(len(values), object)
    exact[:] = values
    return exact


@dataclass(frozen=True)
class Trace:
    """The times of a step's actions on all ranks, predicted or measured.

    Bubble and busy times include compute spans only; the makespan also includes collectives and redundancy.

    ::

        trace = pipesched.simulate(program, costs)
        trace.to_chrome("step.json")          # open in Perfetto
        pipesched.viz.plot_timeline(trace)

    Attributes:
        spans: the spans of all actions.
        num_ranks: the number of ranks.
        name: the name of the program. Default: "".
        costs: the costs of the stages, used to compute memory. Default: None; memory is then 0.
        versions: the program's weight versions, which determine how long older weights are held. Default: (), none.
        bound_s: a lower bound in seconds on the makespan of every schedule of these stages, from ``lower_bound``
            without a memory limit. Default: None, unknown.
        notes: sentences on how the step was measured. Default: (), none.

    Raises:
        ScheduleError: for invalid spans, ranks or bounds.

    """

    spans: Sequence[Span]
    num_ranks: int
    name: str = ""
    costs: Costs | None = None
    versions: tuple[tuple[int, ...], ...] = ()
    bound_s: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", Spans.of(self.spans))
        if not is_count(self.num_ranks, 0) or self.num_ranks > _MOST_RANKS:
            raise ScheduleError(
                f"num_ranks must be a whole number, at most {_MOST_RANKS:,}; got {shown(self.num_ranks)}; pass the "
                f"number of ranks that ran"
            )
        if self.costs is not None:
            check_costs(self.costs)
        if self.bound_s is not None:
            check_number(self.bound_s, "the bound_s of a trace")

    def __repr__(self) -> str:
        shape = f"{counted(len(self.spans), 'span')} on {counted(self.num_ranks, 'rank')}"
        figures = f"makespan {quote_time(self.makespan_s)}, bubble {self.bubble_ratio:.1%}"
        return f"Trace({self.name or 'no name'}: {shape}, {figures})"

    def _repr_html_(self) -> str:
        """Return the timeline as HTML for notebooks."""
        notebook = import_module("pipesched.viz.notebook")  # by name, because viz imports this package
        return str(notebook.timeline_html(self))

    @cached_property
    def _rows(self) -> tuple[Spans, ...]:
        """Each rank's compute spans in time order."""
        return self._of_ranks(*(kind for kind in Kind if kind.row.lane is Lane.COMPUTE))

    @cached_property
    def _holding(self) -> tuple[Spans, ...]:
        """Each rank's spans that take or free memory, in time order."""
        return self._of_ranks(*(kind for kind in Kind if kind not in OTHER_END))

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of actions in the trace, in the order of `Kind`."""
        counts = np.bincount(Spans.of(self.spans).columns.kind, minlength=len(Kind))
        return tuple(kind for kind in Kind if counts[CODES[kind]])

    @cached_property
    def _collectives(self) -> tuple[Spans, ...]:
        """Each rank's collectives in time order; () if the trace has none."""
        return self._of_lane(Lane.COLLECTIVE)

    @cached_property
    def _redundancy(self) -> tuple[Spans, ...]:
        """Each rank's MIRRORs, KEEPs and REPLAYs in time order; () if the trace has none."""
        return self._of_lane(Lane.REDUNDANCY)

    def _of_lane(self, lane: Lane) -> tuple[Spans, ...]:
        kinds = [kind for kind in self.kinds if kind.row.lane is lane]
        return self._of_ranks(*kinds) if kinds else ()

    @cached_property
    def _copies(self) -> tuple[Spans, ...]:
        """Each rank's copies, such as those between the host and the device; () if the trace has none."""
        own = {*Queue} - {Queue.MESSAGES, Queue.COLLECTIVES}
        kinds = [kind for kind in self.kinds if kind.row.queue in own]
        return self._of_ranks(*kinds) if kinds else ()

    def _of_ranks(self, *kinds: Kind) -> tuple[Spans, ...]:
        spans = Spans.of(self.spans)
        spans = _in_time(spans.at(spans.columns.are(*kinds)))
        cuts = np.searchsorted(spans.rank, np.arange(self.num_ranks + 1))
        return tuple(spans.at(slice(start, end)) for start, end in pairwise(cuts.tolist()))

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Each rank's compute spans in time order."""
        return tuple(map(tuple, self._rows))

    @cached_property
    def collectives_by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Each rank's collectives, such as reductions and gathers, in time order; () if the trace has none."""
        return tuple(map(tuple, self._collectives))

    @cached_property
    def redundancy_by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Each rank's MIRRORs, KEEPs and REPLAYs in time order; () if the trace has none."""
        return tuple(map(tuple, self._redundancy))

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches in the spans."""
        return max((int(row.columns.microbatch.max()) + 1 for row in self._filled), default=0)

    @property
    def start_s(self) -> float:
        """The earliest start on any rank, in seconds, except of messages, which wait for their senders."""
        starts = [plain(row.start_s[0]) for row in (*self._filled, *self._collectives, *self._redundancy) if len(row)]
        starts += [plain(row.start_s.min()) for row in self._copies if len(row)]
        return min(starts, default=0)

    @property
    def makespan_s(self) -> float:
        """The time of one isolated step in seconds, from the first start on any rank to the last end on any rank."""
        ends = [plain(row.end_s[-1]) for row in self._filled]
        ends += [plain(row.end_s.max()) for row in (*self._collectives, *self._redundancy) if len(row)]
        return max(ends, default=0) - self.start_s

    @property
    def span_s(self) -> float:
        """The longest time, over all ranks, from the start of a rank's first action to the end of its last, in seconds.

        The zero-bubble papers (Qi et al. 2023) call this time the cost.
        """
        return max((plain(row.end_s[-1] - row.start_s[0]) for row in self._filled), default=0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """The time that each rank spends computing, in seconds. Time in which two actions overlap is counted once."""
        return tuple(_busy(row) for row in self._rows)

    @property
    def busy_ratios(self) -> tuple[float, ...]:
        """For each rank, the fraction of the makespan that it spends computing."""
        whole = self.makespan_s
        return tuple(busy_s / whole if whole else 0.0 for busy_s in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        """The ranks' total idle time / (ranks x makespan).

        For 1F1B with uniform costs, p ranks and m micro-batches, this ratio is (p-1)/(m+p-1).
        """
        whole = self.num_ranks * self.makespan_s
        return max(0.0, 1 - sum(self.busy_s) / whole) if whole else 0.0  # rounding can make the sum exceed the whole

    @cached_property
    def communication_times(self) -> tuple[CommunicationTime, ...]:
        """For each rank, the hidden and exposed time of its collectives; () if the trace has no collectives."""
        spans = Spans.of(self.spans)
        gradients = spans.end_s[spans.columns.are(*WEIGHT_USES)]
        until_s = plain(gradients.max()) if len(gradients) else 0
        found = []
        for own, row in zip(self._collectives, self._rows, strict=False):  # () without collectives
            late = row.at(row.end_s > own.start_s.min()) if len(own) else row.at(slice(0))
            awaited = own.columns.are(Kind.UNSHARD)
            gathers, reductions = own.at(awaited).intervals(), own.at(~awaited).intervals()
            times = CommunicationTime.of(reductions, late.intervals(), until_s, gathers)
            found.append(times)
        return tuple(found)

    @property
    def hidden_communication(self) -> float | None:
        """The fraction of the time of all collectives that is not exposed (see `CommunicationTime`).

        None if the trace has no collectives.
        """
        total_s = sum(own.total_s for own in self.communication_times)
        return 1 - sum(own.exposed_s for own in self.communication_times) / total_s if total_s else None

    @property
    def above_bound(self) -> float | None:
        """How far the makespan exceeds the bound, as a fraction of the bound. None if the bound is unknown."""
        if self.bound_s is None:
            return None
        # Rounding can put a float slightly below the bound.
        return max(0.0, float(self.makespan_s / self.bound_s) - 1) if self.bound_s else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The maximum number of (stage, micro-batch) pairs that each rank holds at the same time."""
        return tuple(pairs_held(row.columns).peak for row in self._rows)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Each rank's peak memory in bytes: activations, inputs, older weights, and memory for weight gradients (W)."""
        if self.costs is None:
            return (0,) * self.num_ranks
        return tuple(self._bytes(row.columns, self.costs).peak for row in self._holding)

    @property
    def peak_versions(self) -> dict[int, int]:
        """The maximum number of weight versions held at the same time, including the newest, keyed by stage."""
        found = [versions_held(row.columns, self.versions) for row in self._rows]
        return {stage: most for own in found for stage, most in sorted(own.items())}

    def in_flight(self, rank: int) -> Iterator[tuple[float, int]]:
        """Yield (time in seconds, number of (stage, micro-batch) pairs that a rank holds from that time on)."""
        row = self._rows[self._rank(rank)]
        return _steps(row, pairs_held(row.columns))

    def memory(self, rank: int) -> Iterator[tuple[float, int]]:
        """Yield (time in seconds, bytes that a rank holds from that time on) whenever the number of bytes changes."""
        held = 0
        spans = self._holding[self._rank(rank)]
        if self.costs is None:
            return
        for time_s, amount in _steps(spans, self._bytes(spans.columns, self.costs)):
            if amount != held:
                held = amount
                yield time_s, held

    def _rank(self, rank: int) -> int:
        if not is_count(rank, 0) or rank >= self.num_ranks:
            raise ScheduleError(
                f"rank must be one of the trace's ranks, numbered from 0; got rank {shown(rank)}, but the trace "
                f"has {counted(self.num_ranks, 'rank')}; pass one of these ranks"
            )
        return rank

    @property
    def _filled(self) -> list[Spans]:
        return [row for row in self._rows if len(row)]

    def _bytes(self, columns: Columns, costs: Costs) -> Held:
        return bytes_held(columns, costs.sizes(), self.versions)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists and numbers for JSON."""
        spans = [[str(s.action), s.rank, s.start_s, s.end_s] for s in self.spans]
        costs = self.costs.to_dict() if self.costs else None
        versions = {"versions": [list(own) for own in self.versions]} if self.versions else {}
        known = {"costs": costs, **versions, **self._remarks}
        return {"name": self.name, "num_ranks": self.num_ranks, **known, "spans": spans}

    @property
    def _remarks(self) -> dict[str, Any]:
        """The bound and the notes, as far as they are known, as plain values for JSON."""
        bound = {} if self.bound_s is None else {"bound_s": self.bound_s}
        return {**bound, "notes": list(self.notes)} if self.notes else bound

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trace":
        """Make a trace from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        if not isinstance(values, Mapping) or not {"num_ranks", "spans"} <= values.keys():
            raise ScheduleError(f"{_SPANS}; got {shown(values)}; {_TO_DICT}")
        made = read_fields(
            cls,
            values,
            "a trace must have",
            spans=_read_spans,
            costs=maybe(Costs.from_dict),
            bound_s=lambda bound_s: bound_s,
        )
        _check_read(made)
        return made

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Write the trace to a file as Chrome trace-event JSON, for Perfetto and chrome://tracing.

        Each rank is a process with one row for compute, one for copies and, if there are any, one for collectives and
        one for redundancy. For counters and arrows, see ``to_perfetto``.
        """
        write_whole(as_path(path), chrome_json(self.chrome_events(), {"name": self.name, **self._remarks}))

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Write the trace in Perfetto's own format, with counters and with arrows for messages.

        ::

            pipe.trace.to_perfetto("step.pftrace")  # open in https://ui.perfetto.dev

        Each rank is a process with a track for each lane, and with counters of the bytes that it holds and of its
        (stage, micro-batch) pairs in flight. An arrow leads from each action that sends to the action that receives.
        Needs the extra ``perfetto`` (``pip install 'pipesched[perfetto]'``).

        Args:
            path: the file.

        Raises:
            InputError: the package ``perfetto`` is missing.

        """
        write_whole(as_path(path), perfetto_bytes(self))

    def chrome_events(self, label: str = "", pids: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
        """Return the trace events that ``to_chrome`` writes.

        Args:
            label: text to add to each rank's name. Default: none.
            pids: (process id of rank 0, difference between the ids of consecutive ranks).

        """
        used = {Lane.COMPUTE, Lane.COPY, *(kind.row.lane for kind in self.kinds)}
        lanes = [lane for lane in Lane if lane in used]
        first, step = pids
        events: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            pid = first + rank * step
            name = f"rank {rank}" + (f", {label}" if label else "")
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            events += [
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": lanes.index(lane), "args": {"name": str(lane)}}
                for lane in lanes
            ]
        for span in self.spans:
            stage, kind, microbatch, _ = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(span.action),
                    "cat": str(kind),
                    "pid": first + span.rank * step,
                    "tid": lanes.index(span.lane),
                    "ts": (span.start_s - self.start_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"stage": stage, "microbatch": microbatch},
                }
            )
        return events

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Trace":
        """Read a trace from a JSON file.

        The file contains the result of ``to_dict`` as JSON, or was written by ``to_chrome``, which stores neither costs
        nor versions.

        Raises:
            ScheduleError: the trace is invalid; the message names the file.

        """
        return load_json(path, lambda values: cls.from_dict(_from_chrome(values)))


def check_trace(trace: Any) -> None:
    """Raise ArgumentError unless ``trace`` is a Trace."""
    check_type(trace, Trace, "trace must be a Trace", "pass the result of simulate, pipe.trace or Trace.load(path)")


def chrome_json(events: list[dict[str, Any]], remarks: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the events as a JSON text for Perfetto and chrome://tracing.

    Args:
        events: the events.
        remarks: fields of the trace that are not events. Default: none.

    """
    other = {"otherData": {_REMARKS: dict(remarks)}} if remarks else {}
    return json.dumps({"displayTimeUnit": "ms", **other, "traceEvents": events})


def _from_chrome(values: Any) -> Any:
    """Convert Chrome trace events to a dict in the form that ``to_dict`` returns. Return other values unchanged."""
    if not isinstance(values, dict) or "traceEvents" not in values:
        return values
    try:
        events = values["traceEvents"]
        ranks = {event["pid"] for event in events}
        ends = [(event, event["ts"] / 1e6) for event in events if event["ph"] == "X"]
        spans = [[event["name"], event["pid"], start_s, start_s + event["dur"] / 1e6] for event, start_s in ends]
        remarks = values.get("otherData", {}).get(_REMARKS, {})
        return {**remarks, "num_ranks": max(ranks, default=-1) + 1, "spans": spans}
    except (AttributeError, KeyError, TypeError) as error:
        raise ScheduleError(
            f"every Chrome trace event must have 'ph' and 'pid', and an action's event must also have 'name', 'ts' and "
            f"'dur'; reading the events raised {error!r}; write the file with to_chrome"
        ) from error


def _read_spans(rows: Any) -> Spans:
    spans = []
    for row in as_list(rows, _SPANS, _TO_DICT):
        if not isinstance(row, list | tuple) or len(row) != 4:
            raise ScheduleError(f"{_SPANS}; got {shown(row)}; {_TO_DICT}")
        text, rank, start_s, end_s = row
        good = is_count(rank, 0) and all(isinstance(time_s, Real) for time_s in (start_s, end_s))
        if not good or bool in (type(start_s), type(end_s)) or not -LARGEST < start_s <= end_s < LARGEST:
            raise ScheduleError(
                f"a span must have a rank of at least 0 and finite times, and must not end before it starts; "
                f"{shown(text)} has rank {shown(rank)}, start_s {shown(start_s)}, end_s {shown(end_s)}; {_TO_DICT}"
            )
        action = Action.parse(text)
        spans.append(Span(action, rank, start_s, end_s, action.lane))
    return Spans.of(spans)


def _check_read(trace: Trace) -> None:
    """Raise ScheduleError if the parts of a loaded trace contradict each other."""
    spans = Spans.of(trace.spans)
    stage = int(spans.columns.stage.max(initial=-1))
    for name, largest, count in (
        ("ranks", int(spans.rank.max(initial=-1)), trace.num_ranks),
        ("stages with costs", stage, trace.costs.num_stages if trace.costs else stage + 1),
        ("stages with versions", stage, len(trace.versions) or stage + 1),
    ):
        if largest >= count:
            raise ScheduleError(
                f"spans may only use the {name} of their trace, numbered from 0; the trace has {count} of them, but a "
                f"span has number {largest}; correct the span or the trace"
            )
    for rank, row in enumerate(trace._holding):
        held = [pairs_held(row.columns), *([trace._bytes(row.columns, trace.costs)] if trace.costs else [])]
        if any(one.after.min(initial=0) < 0 for one in held):
            raise ScheduleError(
                f"a backward must follow its forward; on rank {rank} of {trace.num_ranks} a backward comes before its "
                f"forward; correct their times, or {_TO_DICT}"
            )
    microbatches = spans.columns.microbatch[~spans.columns.are(*NUMBERED)]
    num_microbatches = int(microbatches.max(initial=-1)) + 1
    for stage, own in enumerate(trace.versions):
        if own and (len(own) < num_microbatches or not all(0 <= version < 2**31 for version in own)):
            raise ScheduleError(
                f"versions must list the weight version of each micro-batch; stage {stage} has {shown(own)} "
                f"for {counted(num_microbatches, 'micro-batch')}; {_TO_DICT}"
            )


def _busy(row: Spans) -> float:
    """Return the time in seconds that a rank's spans cover. Overlaps count once. The spans must be in time order."""
    if not len(row):
        return 0
    lengths = row.end_s - row.start_s
    if (row.start_s[1:] < row.end_s[:-1]).any():
        begins = np.maximum(row.start_s[1:], row.end_s[:-1])
        lengths[1:] = np.maximum(row.end_s[1:] - begins, 0)
    busy_s: float = plain(lengths.sum())
    return busy_s


def _in_time(spans: Spans) -> Spans:
    """Return the spans sorted by rank, then by time."""
    if object in (spans.start_s.dtype, spans.end_s.dtype):
        keys = list(zip(spans.rank.tolist(), spans.start_s, spans.end_s, strict=True))
        return spans.at(np.array(sorted(range(len(spans)), key=keys.__getitem__), np.int64))
    return spans.at(np.lexsort((spans.end_s, spans.start_s, spans.rank)))


def _steps(row: Spans, held: Held) -> Iterator[tuple[float, int]]:
    """Yield (time in seconds, amount held from that time on) for the start and the end of each span."""
    lists = (values.tolist() for values in (row.start_s, row.end_s, held.during, held.after))
    for start_s, end_s, during, after in zip(*lists, strict=True):
        yield start_s, during
        yield end_s, after
