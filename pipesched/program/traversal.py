"""Traversal: the one way through a program that its dependencies allow, with or without time.

Every rank runs its order as far as the others let it. What never runs is in a deadlock.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesched.program.action_arrays import Columns, Ints
from pipesched.program.actions import Kind
from pipesched.program.program import Program

__all__ = ["Timing", "Walked", "walk"]

Times = NDArray[Any]  # any kind of number: whole numbers and fractions stay exact


class Timing(NamedTuple):
    """What takes how long. seconds: of each action; of two that overlap the first has both's, the second none.

    lags: how long after the needed action's end its result is there, for each of the program's requirements.
    links: for each action the link that it occupies, -1 for none; None where no transfer occupies one.
    """

    seconds: Times
    lags: Times
    links: Ints | None = None


class Walked(NamedTuple):
    """Start and end of every action by row, None where it never ran; and how far each rank came in its order."""

    starts: list[Any]
    ends: list[Any]
    reached: list[int]


class _Waits(NamedTuple):
    """The rows that an action waits for, with their lags: the first, -1 for none, and of a few actions the others."""

    first: list[int]
    lag: list[Any]
    others: dict[int, list[tuple[int, Any]]]


# What the walk does with an action, a byte each.
_COMPUTES, _SENDS, _RECEIVES, _OVERLAPS = range(4)


def walk(program: Program, timing: Timing | None = None) -> Walked:  # noqa: PLR0915  one loop, which calls little
    """Run the program; without timing nothing takes any time.

    An action starts when its rank is free and what it needs has come. Only computing keeps a rank busy, and waiting for
    a copy to the host (FREE): a transfer, to a rank or the host, begins at its place in the order and ends when it can.
    Actions that overlap start together and end together.
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
    busy = _Links(timing)
    awaited: dict[int, list[int]] = {}
    ready = list(reversed(range(len(orders))))
    while ready:  # the loop over millions of actions: nothing in it is called that need not be
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
                if arrival > start:  # noqa: PLR1730  max() would take as long as all the rest
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


class _Links:
    """When each link, where links are occupied, is free again."""

    def __init__(self, timing: Timing | None) -> None:
        self._link: list[int] = [] if timing is None or timing.links is None else timing.links.tolist()
        self._seconds = np.zeros(0) if timing is None else timing.seconds
        self._free: dict[int, Any] = {}

    def send(self, row: int, start: Any) -> tuple[Any, Any]:
        """Start and end of a transfer that is asked for at ``start``."""
        link = self._link[row] if self._link else -1
        if link < 0:
            return start, start
        start = max(start, self._free.get(link, start))
        self._free[link] = end = start + self._seconds[row]
        return start, end


def _arrivals(waits: list[tuple[int, Any]], ends: list[Any]) -> list[Any] | int:
    """When each has come; or the first row that has not run."""
    for need, _ in waits:
        if ends[need] is None:
            return need
    return [ends[need] + lag for need, lag in waits]


def _roles(columns: Columns) -> bytes:
    roles = np.full(len(columns), _COMPUTES, np.int8)
    roles[columns.are(Kind.SEND_F, Kind.SEND_B, Kind.OFFLOAD, Kind.FETCH)] = _SENDS
    roles[columns.are(Kind.RECV_F, Kind.RECV_B)] = _RECEIVES
    roles[columns.overlapping] = _OVERLAPS
    return roles.tobytes()


def _waits(program: Program, timing: Timing | None) -> _Waits:
    """What is not already in the order of the action's own rank: results of other ranks, and of transfers.

    The second of two that overlap waits for nothing: the first waits for both.
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
    again = np.concatenate([[False], row[1:] == row[:-1]]) if len(row) else np.zeros(0, np.bool_)
    first = np.full(len(columns), -1, np.int64)
    lag = np.zeros(len(columns), object)
    first[row[~again]] = needed[~again]
    lag[row[~again]] = lags[~again]
    others: dict[int, list[tuple[int, Any]]] = {}
    for at, need, late in zip(row[again].tolist(), needed[again].tolist(), lags[again].tolist(), strict=True):
        others.setdefault(at, []).append((need, late))
    return _Waits(first.tolist(), lag.tolist(), others)
