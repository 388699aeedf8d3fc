"""Trace: what ran when. One type for predicted and for measured time."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from numbers import Real
from os import PathLike
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipesched.checks import LARGEST, as_list, as_path, check_number, check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import load_json, maybe, read_fields
from pipesched.program.action_arrays import Columns, Ints, Orders
from pipesched.program.actions import KINDS, OTHER_END, Action, Kind, Lane
from pipesched.program.liveness import Held, bytes_held, pairs_held, versions_held
from pipesched.simulation.costs import Costs, check_costs
from pipesched.simulation.links import plain
from pipesched.units import counted, quote_time

__all__ = ["Span", "Spans", "Trace", "check_trace", "chrome_json"]

Times = NDArray[Any]
_MOST_RANKS = 100_000  # of a trace
_SPANS = "a trace has num_ranks and spans, each [action, rank, start_s, end_s]"
_TO_DICT = "write it by to_dict"


class Span(NamedTuple):
    """One action's time on one rank, in seconds."""

    action: Action
    rank: int
    start_s: float
    end_s: float
    lane: Lane


class Spans(Sequence[Span]):
    """Spans, a row each: columns of their actions, ranks, starts and ends."""

    def __init__(self, columns: Columns, rank: Ints, start_s: Times, end_s: Times) -> None:
        self.columns = columns
        self.rank = rank
        self.start_s = start_s
        self.end_s = end_s

    @classmethod
    def of(cls, spans: "Iterable[Span]") -> "Spans":
        """The same spans as columns."""
        if isinstance(spans, Spans):
            return spans
        spans = tuple(as_list(spans, "a trace has a list of Spans", "pass one, such as simulate makes"))
        try:
            rank = np.array([span.rank for span in spans], np.int64)
            times = (_times([span.start_s for span in spans]), _times([span.end_s for span in spans]))
        except (AttributeError, TypeError, ValueError) as error:
            raise ScheduleError(
                f"a trace has a list of Spans; got something else ({error}); make them by Span(action, rank, start_s, "
                f"end_s, lane)"
            ) from error
        return cls(Columns.of(span.action for span in spans), rank, *times)

    @classmethod
    def of_program(cls, orders: Orders, starts: list[Any], ends: list[Any]) -> "Spans":
        """A span for each action of a program, in its rows' order. Which of them overlap, their times say."""
        columns = replace(orders.columns, joined=np.zeros(len(orders.columns), np.bool_))
        return cls(columns, orders.rank_of, _times(starts), _times(ends))

    def at(self, rows: Any) -> "Spans":
        """The rows that a mask or an array of positions names."""
        return Spans(self.columns[rows], self.rank[rows], self.start_s[rows], self.end_s[rows])

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


def _times(values: list[Any]) -> Times:
    """Times as an array: of floats, or of whole numbers, or of whatever numbers they are, exactly."""
    array = np.asarray(values) if values else np.zeros(0)
    if array.dtype.kind in "fi":
        return array
    exact = np.empty(len(values), object)
    exact[:] = values
    return exact


@dataclass(frozen=True)
class Trace:
    """The spans of one step. Only compute spans count for times and bubble."""

    #: Kept as columns.
    spans: Sequence[Span]
    num_ranks: int
    name: str = ""
    #: What the step was simulated with, or the sizes that its stages hold. Needed for bytes.
    costs: Costs | None = None
    #: Those of the program, which say how long older weights are held.
    versions: tuple[tuple[int, ...], ...] = ()
    #: What no schedule of these stages can beat, whatever its memory (``lower_bound``). None: not known.
    bound_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", Spans.of(self.spans))
        if not is_count(self.num_ranks, 0) or self.num_ranks > _MOST_RANKS:
            raise ScheduleError(
                f"a trace is of a whole number of ranks, at most {_MOST_RANKS:,}; got {shown(self.num_ranks)}; pass "
                f"how many there were"
            )
        if self.costs is not None:
            check_costs(self.costs)
        if self.bound_s is not None:
            check_number(self.bound_s, "the bound_s of a trace")

    def __repr__(self) -> str:
        """What it is and its main figures; ``spans`` has every action."""
        shape = f"{counted(len(self.spans), 'span')} on {counted(self.num_ranks, 'rank')}"
        figures = f"makespan {quote_time(self.makespan_s)}, bubble {self.bubble_ratio:.1%}"
        return f"Trace({self.name or 'no name'}: {shape}, {figures})"

    def _repr_html_(self) -> str:
        """The timeline, for notebooks."""
        notebook = import_module("pipesched.viz.notebook")  # by name: pictures are drawn in a package above this one
        return str(notebook.timeline_html(self))

    @cached_property
    def _rows(self) -> tuple[Spans, ...]:
        """Each rank's compute spans in time order."""
        return self._of_ranks(*(kind for kind in Kind if KINDS[kind].lane is Lane.COMPUTE))

    @cached_property
    def _holding(self) -> tuple[Spans, ...]:
        """Each rank's spans that take memory or give it back, in time order."""
        return self._of_ranks(*(kind for kind in Kind if kind not in OTHER_END))

    def _of_ranks(self, *kinds: Kind) -> tuple[Spans, ...]:
        spans = Spans.of(self.spans)
        spans = _in_time(spans.at(spans.columns.are(*kinds)))
        cuts = np.searchsorted(spans.rank, np.arange(self.num_ranks + 1))
        return tuple(spans.at(slice(start, end)) for start, end in pairwise(cuts.tolist()))

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Each rank's compute spans in time order."""
        return tuple(map(tuple, self._rows))

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches the spans are of, counted from 0."""
        return max((int(row.columns.microbatch.max()) + 1 for row in self._filled), default=0)

    @property
    def start_s(self) -> float:
        """The first start over all ranks."""
        return min((plain(row.start_s[0]) for row in self._filled), default=0)

    @property
    def makespan_s(self) -> float:
        """Last end minus first start over all ranks: what one isolated step takes."""
        return max((plain(row.end_s[-1]) for row in self._filled), default=0) - self.start_s

    @property
    def span_s(self) -> float:
        """The longest of the ranks' own last end minus first start: what the zero-bubble papers call cost."""
        return max((plain(row.end_s[-1] - row.start_s[0]) for row in self._filled), default=0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """How long each rank computes; time in which two actions overlap counts once."""
        return tuple(_busy(row) for row in self._rows)

    @property
    def busy_ratios(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank computes."""
        whole = self.makespan_s
        return tuple(busy_s / whole if whole else 0.0 for busy_s in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over (ranks x makespan): 1F1B with uniform costs gives (p-1)/(m+p-1)."""
        whole = self.num_ranks * self.makespan_s
        return max(0.0, 1 - sum(self.busy_s) / whole) if whole else 0.0  # the sum may be above it by rounding

    @property
    def above_bound(self) -> float | None:
        """How far the makespan is above the bound, as a share of it: 0.03 is 3 %. None where no bound is known."""
        if self.bound_s is None:
            return None
        # Floats may lie below it by their rounding.
        return max(0.0, float(self.makespan_s / self.bound_s) - 1) if self.bound_s else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most (stage, micro-batch) pairs that each rank holds at once."""
        return tuple(pairs_held(row.columns).peak for row in self._rows)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes of activations, inputs, held weight-gradient work and older weights of each rank at once."""
        if self.costs is None:
            return (0,) * self.num_ranks
        return tuple(self._bytes(row.columns, self.costs).peak for row in self._holding)

    @property
    def peak_versions(self) -> dict[int, int]:
        """The most versions of its weights that each stage holds at once, the newest included."""
        found = [versions_held(row.columns, self.versions) for row in self._rows]
        return {stage: most for own in found for stage, most in sorted(own.items())}

    def in_flight(self, rank: int) -> Iterator[tuple[float, int]]:
        """One rank's (stage, micro-batch) pairs over time: (time in seconds, pairs from then on)."""
        row = self._rows[self._rank(rank)]
        return _steps(row, pairs_held(row.columns))

    def memory(self, rank: int) -> Iterator[tuple[float, int]]:
        """One rank's held bytes over time, whenever they change: (time in seconds, bytes from then on)."""
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
                f"a trace has ranks from 0 on; got rank {shown(rank)} of {self.num_ranks}; pass one of them"
            )
        return rank

    @property
    def _filled(self) -> list[Spans]:
        return [row for row in self._rows if len(row)]

    def _bytes(self, columns: Columns, costs: Costs) -> Held:
        return bytes_held(columns, costs.sizes(), self.versions)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        spans = [[str(s.action), s.rank, s.start_s, s.end_s] for s in self.spans]
        costs = self.costs.to_dict() if self.costs else None
        versions = {"versions": [list(own) for own in self.versions]} if self.versions else {}
        bound = {} if self.bound_s is None else {"bound_s": self.bound_s}
        return {"name": self.name, "num_ranks": self.num_ranks, "costs": costs, **versions, **bound, "spans": spans}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trace":
        """The inverse of ``to_dict``. Raises ScheduleError for what is none."""
        if not isinstance(values, Mapping) or not {"num_ranks", "spans"} <= values.keys():
            raise ScheduleError(f"{_SPANS}; got {shown(values)}; {_TO_DICT}")
        made = read_fields(
            cls, values, "a trace has", spans=_read_spans, costs=maybe(Costs.from_dict), bound_s=lambda bound_s: bound_s
        )
        _check_read(made)
        return made

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Write Chrome's trace-event JSON, which Perfetto and chrome://tracing open: a process a rank, a row a lane."""
        as_path(path).write_text(chrome_json(self.chrome_events()))

    def chrome_events(self, label: str = "", pids: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
        """The events of ``to_chrome``. pids: of rank 0, and from rank to rank. label: behind each rank's name."""
        lanes = list(Lane)
        first, every = pids
        events: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            pid = first + rank * every
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
                    "pid": first + span.rank * every,
                    "tid": lanes.index(span.lane),
                    "ts": (span.start_s - self.start_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"stage": stage, "microbatch": microbatch},
                }
            )
        return events

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Trace":
        """Read a trace from JSON: of ``to_dict``, or what ``to_chrome`` has written, which knows spans alone.

        Raises ScheduleError naming the file where it is none.
        """
        return load_json(path, lambda values: cls.from_dict(_from_chrome(values)))


def check_trace(trace: Any) -> None:
    """Raise ArgumentError for what is none."""
    check_type(trace, Trace, "trace is a Trace", "pass what simulate returns, pipe.trace or Trace.load(path)")


def chrome_json(events: list[dict[str, Any]]) -> str:
    """What Perfetto and chrome://tracing open."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _from_chrome(values: Any) -> Any:
    """The values of ``to_dict`` from Chrome's, others as they are."""
    if not isinstance(values, dict) or "traceEvents" not in values:
        return values
    try:
        events = values["traceEvents"]
        ranks = {event["pid"] for event in events}
        ends = [(event, event["ts"] / 1e6) for event in events if event["ph"] == "X"]
        spans = [[event["name"], event["pid"], start_s, start_s + event["dur"] / 1e6] for event, start_s in ends]
        return {"num_ranks": max(ranks, default=-1) + 1, "spans": spans}
    except (KeyError, TypeError) as error:
        raise ScheduleError(
            f"Chrome's trace events have ph and pid, those of actions name, ts and dur; {error!r}; write them by "
            f"to_chrome"
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
                f"a span is of a rank from 0 on, and ends no earlier than it starts, at finite times; {shown(text)} "
                f"has rank {shown(rank)}, start_s {shown(start_s)}, end_s {shown(end_s)}; {_TO_DICT}"
            )
        action = Action.parse(text)
        spans.append(Span(action, rank, start_s, end_s, action.lane))
    return Spans.of(spans)


def _check_read(trace: Trace) -> None:
    """Raise ScheduleError where what was read of a trace does not agree."""
    spans = Spans.of(trace.spans)
    stage = int(spans.columns.stage.max(initial=-1))
    for what, largest, count in (
        ("ranks", int(spans.rank.max(initial=-1)), trace.num_ranks),
        ("stages with costs", stage, trace.costs.num_stages if trace.costs else stage + 1),
        ("stages with versions", stage, len(trace.versions) or stage + 1),
    ):
        if largest >= count:
            raise ScheduleError(
                f"the spans of a trace are of its {what}, counted from 0; it has {count}, and a span of {largest}; "
                f"correct one of them"
            )
    for rank, row in enumerate(trace._holding):
        held = [pairs_held(row.columns), *([trace._bytes(row.columns, trace.costs)] if trace.costs else [])]
        if any(one.after.min(initial=0) < 0 for one in held):
            raise ScheduleError(
                f"what a backward frees was taken before; on rank {rank} of {trace.num_ranks} a backward comes before "
                f"its forward; correct their times, or write it by to_dict"
            )
    num_microbatches = int(spans.columns.microbatch.max(initial=-1)) + 1
    for stage, own in enumerate(trace.versions):
        if own and (len(own) < num_microbatches or not all(0 <= version < 2**31 for version in own)):
            raise ScheduleError(
                f"a trace has the version of each micro-batch's weights; stage {stage} has {len(own)} of "
                f"{num_microbatches}, {shown(own)}; write it by to_dict"
            )


def _busy(row: Spans) -> float:
    """The time that a rank's spans, in time order, cover."""
    if not len(row):
        return 0
    lengths = row.end_s - row.start_s
    if (row.start_s[1:] < row.end_s[:-1]).any():
        begins = np.maximum(row.start_s[1:], row.end_s[:-1])
        lengths[1:] = np.maximum(row.end_s[1:] - begins, 0)
    busy_s: float = plain(lengths.sum())
    return busy_s


def _in_time(spans: Spans) -> Spans:
    """Rank by rank in time order."""
    if object in (spans.start_s.dtype, spans.end_s.dtype):
        keys = list(zip(spans.rank.tolist(), spans.start_s, spans.end_s, strict=True))
        return spans.at(np.array(sorted(range(len(spans)), key=keys.__getitem__), np.int64))
    return spans.at(np.lexsort((spans.end_s, spans.start_s, spans.rank)))


def _steps(row: Spans, held: Held) -> Iterator[tuple[float, int]]:
    """What is held from each start and each end on."""
    lists = (values.tolist() for values in (row.start_s, row.end_s, held.during, held.after))
    for start_s, end_s, during, after in zip(*lists, strict=True):
        yield start_s, during
        yield end_s, after
