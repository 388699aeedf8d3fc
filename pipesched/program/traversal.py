"""Traversal: runs a program on a virtual clock. The caller passes the durations of the actions; by default, all are 0.

Every rank runs its order until an action must wait for another rank, and continues when the wait ends. If some actions
never run, the program has a deadlock.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesched.program.action_arrays import Columns, Ints
from pipesched.program.actions import RECEIVES, Kind
from pipesched.program.program import Program

__all__ = ["Timing", "Walked", "walk"]

Times = NDArray[Any]  # any type of number: ints and Fractions stay exact


class Timing(NamedTuple):
    """The times of a program's actions and messages."""

    #: The duration of each action. Of two overlapping actions, the first has the duration of the pair, the second 0.
    seconds: Times
    #: For each of the program's requirements, the time from the end of the needed action to the arrival of its result.
    lags: Times
    #: For each action, the number of the link that it occupies, or -1. None if no action occupies a link.
    links: Ints | None = None
    #: Row -> the seconds by which an action may start before the previous action of its rank ends, if its link is free.
    leads: Mapping[int, Any] = MappingProxyType({})


class Walked(NamedTuple):
    """The result of `walk`: the times of each action, and the number of actions that each rank ran."""

    #: The start of each action, indexed by row; None for an action that never ran.
    starts: list[Any]
    #: The end of each action, indexed by row; None for an action that never ran.
    ends: list[Any]
    #: The number of actions that each rank ran.
    reached: list[int]


class _Waits(NamedTuple):
    """For each action, the rows of the actions that it waits for, and how long each of their results is in transit."""

    #: The first row that each action waits for; -1 if it waits for none.
    first: list[int]
    #: The lag between the end of that row's action and the arrival of its result.
    lag: list[Any]
    #: For the few actions that wait for several rows: the other rows and their lags.
    others: dict[int, list[tuple[int, Any]]]


_QUEUED = tuple(kind for kind in Kind if kind.row.queue is not None)

# How `walk` treats an action, stored as one byte per action.
_COMPUTES, _SENDS, _RECEIVES, _OVERLAPS = range(4)


def walk(program: Program, timing: Timing | None = None) -> Walked:  # noqa: PLR0915  one loop, with few calls for speed
    """Run a program on a virtual clock. Without ``timing``, actions take no time.

    An action starts when its rank is free and the results that it needs have arrived. Only compute actions and FREE
    (which waits for a copy to the host) keep a rank busy. A send, OFFLOAD or FETCH is queued on its link when the rank
    reaches it, and does not block the rank. A collective does not block its rank either, and starts when the rank's
    previous collective has ended. Overlapping actions start together and end together.
    """
    orders = program.orders
    total = len(program.columns)
    first, lag, others = _waits(program, timing)
    seconds: Sequence[Any] = [0] * total if timing is None else timing.seconds.tolist()
    roles = _roles(program.columns)
    starts: list[Any] = [None] * total
    ends: list[Any] = [None] * total
    position: list[int] = orders.offsets[:-1].tolist()
    stops: list[int] = orders.offsets[1:].tolist()
    free: list[Any] = [0] * len(orders)
    busy = _OccupiedLinks(timing)
    awaited: dict[int, list[int]] = {}
    ready = list(reversed(range(len(orders))))
    while ready:  # a loop over millions of actions, so function calls are avoided
        rank = ready.pop()
        row = position[rank]
        stop = stops[rank]
        now = free[rank]
        while row < stop:
            start = now
            need = first[row]
            if need >= 0:
                arrival = ends[need]
                if arrival is None:
                    awaited.setdefault(need, []).append(rank)
                    break
                arrival += lag[row]
                if row in others:
                    arrivals = _arrivals(others[row], ends)
                    if isinstance(arrivals, int):
                        awaited.setdefault(arrivals, []).append(rank)
                        break
                    arrival = max(arrival, *arrivals)
                if arrival > start:  # noqa: PLR1730  max() would make the loop take twice as long
                    start = arrival
            role = roles[row]
            if role == _COMPUTES:
                now = end = start + seconds[row]
            elif role == _OVERLAPS:
                start = starts[row - 1]
                end = ends[row - 1]
            elif role == _RECEIVES:
                start, end = now, start
            else:
                start, end = busy.send(row, start)
            starts[row] = start
            ends[row] = end
            if row in awaited:
                ready += awaited.pop(row)
            row += 1
        position[rank] = row
        free[rank] = now
    begins = orders.offsets[:-1].tolist()
    return Walked(starts, ends, [row - begin for row, begin in zip(position, begins, strict=True)])


class _OccupiedLinks:
    """The time at which each occupied link becomes free."""

    def __init__(self, timing: Timing | None) -> None:
        self._link: list[int] = [] if timing is None or timing.links is None else timing.links.tolist()
        self._seconds = np.zeros(0) if timing is None else timing.seconds
        self._leads: Mapping[int, Any] = {} if timing is None else timing.leads
        self._free: dict[int, Any] = {}

    def send(self, row: int, start: Any) -> tuple[Any, Any]:
        """Return the start and end of a transfer that is ready at ``start``. Earlier transfers on its link come first.

        A collective counts as a transfer on a link of its rank.
        """
        link = self._link[row] if self._link else -1
        if link < 0:
            return start, start
        if row in self._leads:
            start -= self._leads[row]
        start = max(start, self._free.get(link, start))
        self._free[link] = end = start + self._seconds[row]
        return start, end


def _arrivals(waits: list[tuple[int, Any]], ends: list[Any]) -> list[Any] | int:
    """Return the arrival time of each awaited result or, if a needed action has not run yet, the row of that action."""
    for need, _ in waits:
        if ends[need] is None:
            return need
    return [ends[need] + lag for need, lag in waits]


def _roles(columns: Columns) -> bytes:
    roles = np.full(len(columns), _COMPUTES, np.int8)
    roles[columns.are(*RECEIVES)] = _RECEIVES
    roles[columns.are(*_QUEUED)] = _SENDS
    roles[columns.overlapping] = _OVERLAPS
    return roles.tobytes()


def _waits(program: Program, timing: Timing | None) -> _Waits:
    """Return the dependencies that a rank's own order does not guarantee.

    These are the dependencies on actions of other ranks, and on actions that are not computations, such as copies.

    Of two overlapping actions, the first waits for everything that either of them needs.
    """
    columns = program.columns
    row, needed = program.requirements
    kept = (needed >= 0) & ~columns.compute[needed]
    kept[program.crossing] = True
    row = row[kept]
    needed = needed[kept]
    lags = np.zeros(len(kept), object)[kept] if timing is None else timing.lags[kept]
    if columns.joined.any():
        row = row - columns.overlapping[row]
    order = np.argsort(row, kind="stable")
    row = row[order]
    needed = needed[order]
    lags = lags[order]
    repeated = np.concatenate([[False], row[1:] == row[:-1]]) if len(row) else np.zeros(0, np.bool_)
    first = np.full(len(columns), -1, np.int64)
    lag = np.zeros(len(columns), object)
    first[row[~repeated]] = needed[~repeated]
    lag[row[~repeated]] = lags[~repeated]
    others: dict[int, list[tuple[int, Any]]] = {}
    for at, need, late in zip(row[repeated].tolist(), needed[repeated].tolist(), lags[repeated].tolist(), strict=True):
        others.setdefault(at, []).append((need, late))
    return _Waits(first.tolist(), lag.tolist(), others)
