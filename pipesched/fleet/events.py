"""Events: the times at which ranks of a fleet are lost and come back, as a file or as values."""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from pipesched.checks import as_path, check_type, is_count, shown
from pipesched.errors import InputError
from pipesched.units import counted
from pipesched.whole_files import write_whole

__all__ = ["Change", "FleetEvent", "FleetTrace", "read_trace"]

HEADER = ("time_s", "rank", "event")
_WORDS = {"up": True, "down": False}
_RULE = f"a trace of a fleet has the columns {','.join(HEADER)}"


class FleetEvent(NamedTuple):
    """A rank is lost or comes back."""

    time_s: float
    rank: int
    #: True: the rank comes back, with empty memory. False: the rank is lost.
    is_up: bool


class Change(NamedTuple):
    """All events of one moment."""

    time_s: float
    #: The ranks that lose their memory, including those that are back in the same moment.
    lost: frozenset[int]
    #: The ranks that come back, with empty memory.
    back: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class FleetTrace:
    """The losses and returns of a fleet's ranks over time. At time 0, all ranks are alive.

    Attributes:
        num_ranks: the number of ranks. Their numbers begin with 0.
        duration_s: the end of the trace.
        events: the events, in ascending order of time.
        name: the name in reports. Default: "".

    Raises:
        InputError: for unknown ranks, times that go backwards, a rank that is lost or comes back twice, and events
            after the end.

    """

    num_ranks: int
    duration_s: float
    events: tuple[FleetEvent, ...]
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(FleetEvent(*event) for event in self.events))
        if not is_count(self.num_ranks):
            raise InputError(f"num_ranks must be a whole number above 0; got {shown(self.num_ranks)}; pass 1 or more")
        _check_events(self.events, self.num_ranks, lambda at: f"event {at}")
        last_s = self.events[-1].time_s if self.events else 0.0
        if not (_is_time(self.duration_s) and self.duration_s > 0 and self.duration_s >= last_s):
            raise InputError(
                f"duration_s must be above 0 and not before the last event; the last event is at {last_s:g} s, and "
                f"duration_s is {shown(self.duration_s)}; pass a later time"
            )

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The events, with those of the same moment together."""
        alive = set(range(self.num_ranks))
        made = []
        for time_s, events in groupby(self.events, lambda event: event.time_s):
            before, lost = set(alive), set()
            for event in events:
                (alive.add if event.is_up else alive.discard)(event.rank)
                lost |= set() if event.is_up else {event.rank}
            made.append(Change(time_s, frozenset(lost), frozenset(alive - (before - lost))))
        return tuple(made)

    @cached_property
    def num_alive(self) -> tuple[tuple[float, int], ...]:
        """The number of ranks that are alive, as pairs of a time and the number from then on."""
        alive = set(range(self.num_ranks))
        counts = [(0.0, self.num_ranks)]
        for change in self.changes:
            alive = (alive - change.lost) | change.back
            counts.append((change.time_s, len(alive)))
        return tuple(counts)

    @property
    def between_losses_s(self) -> float:
        """The mean time between two moments in which ranks are lost; infinite if no rank is lost."""
        moments = sum(bool(change.lost) for change in self.changes)
        return self.duration_s / moments if moments else math.inf

    def save(self, path: str | PathLike[str], comment: str = "") -> None:
        """Write the events to a CSV file that `read_trace` reads. ``comment`` becomes the first line."""
        lines = [f"# {comment}"] if comment else []
        lines += [",".join(HEADER)]
        lines += [f"{event.time_s:.12g},{event.rank},{'up' if event.is_up else 'down'}" for event in self.events]
        write_whole(as_path(path), "\n".join(lines) + "\n")


def read_trace(
    path: str | PathLike[str], *, num_ranks: int | None = None, duration_s: float | None = None
) -> FleetTrace:
    """Read the losses and returns of ranks from a CSV file with the columns ``time_s,rank,event``.

    ::

        time_s,rank,event
        360,12,down
        365.5,13,down
        1800,12,up

    Lines that begin with ``#`` are comments. All ranks are alive at time 0.

    Args:
        path: the file.
        num_ranks: the number of ranks. Default: one more than the highest rank in the file.
        duration_s: the end of the trace. Default: the time of the last event.

    Raises:
        InputError: the file cannot be read, has other columns or invalid values, or its events contradict each other;
            the message names the line.

    """
    file = as_path(path)
    if num_ranks is not None and not is_count(num_ranks):
        raise InputError(f"num_ranks must be a whole number above 0; got {shown(num_ranks)}; pass 1 or more")
    lines, events = _events_of(file)
    ranks = num_ranks if num_ranks is not None else max((event.rank for event in events), default=-1) + 1
    _check_events(events, ranks, lambda at: f"{file}, line {lines[at]}")
    if not ranks or (not events and duration_s is None):
        raise InputError(
            f"a trace without events needs a number of ranks and an end; {file} has no events; pass num_ranks= and "
            f"duration_s="
        )
    end_s = events[-1].time_s if duration_s is None else duration_s
    return FleetTrace(num_ranks=ranks, duration_s=end_s, events=tuple(events), name=file.stem)


def _events_of(file: Path) -> tuple[list[int], list[FleetEvent]]:
    """Return the numbers of the lines with events, and the events."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{_RULE}; {file} cannot be read ({error}); correct the path, or save as UTF-8") from error
    rows = [(at, row) for at, row in enumerate(csv.reader(text.splitlines()), 1) if row and not row[0].startswith("#")]
    at, header = rows[0] if rows else (1, [])
    if tuple(cell.strip() for cell in header) != HEADER:
        raise InputError(
            f"{_RULE}; {file}, line {at} has {shown(','.join(header))}; make {','.join(HEADER)} the first line"
        )
    return [at for at, _ in rows[1:]], [_event(row, f"{file}, line {at}") for at, row in rows[1:]]


def _event(row: Sequence[str], place: str) -> FleetEvent:
    cells = [cell.strip() for cell in row]
    try:
        time_s, rank, word = cells
        return FleetEvent(float(time_s), int(rank), _WORDS[word])
    except (ValueError, KeyError):
        raise InputError(
            f"an event has a time in seconds, the number of a rank, and up or down; {place} has "
            f"{shown(','.join(cells))}; write it like 360,12,down"
        ) from None


def _check_events(events: Iterable[FleetEvent], num_ranks: int, place: Callable[[int], str]) -> None:
    """Raise InputError for events that contradict each other. ``place`` names the event with an index."""
    now_s, lost = 0.0, set[int]()
    for at, event in enumerate(events):
        check_type(event.is_up, bool, f"is_up of an event must be True or False; {place(at)}", "pass one of them")
        if not (is_count(event.rank, 0) and event.rank < num_ranks):
            raise InputError(
                f"the ranks of this trace are 0 to {num_ranks - 1}; {place(at)} has rank {shown(event.rank)}; correct "
                f"the rank, or pass a larger num_ranks="
            )
        if not _is_time(event.time_s) or event.time_s < now_s:
            raise InputError(
                f"the times of events must be finite, and must not go backwards; {place(at)} has "
                f"{shown(event.time_s)} s after {now_s:g} s; sort the events by time"
            )
        if event.is_up != (event.rank in lost):
            state, word = ("lost", "down") if event.rank in lost else ("alive", "up")
            raise InputError(
                f"only a rank that is alive can go down, and only one that is lost can come up; {place(at)} has {word} "
                f"for rank {event.rank}, which is {state}; remove the event, or add the missing one before it"
            )
        now_s = event.time_s
        (lost.discard if event.is_up else lost.add)(event.rank)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def counts_of(trace: FleetTrace) -> str:
    """Return the number of ranks, losses and returns of a trace as text."""
    ups = sum(event.is_up for event in trace.events)
    losses = f"{len(trace.events) - ups} losses in {counted(sum(bool(c.lost) for c in trace.changes), 'moment')}"
    return f"{counted(trace.num_ranks, 'rank')}, {trace.duration_s / 3600:.3g} h, {losses}, {counted(ups, 'return')}"
