"""Communication time: splits the time of a rank's collectives into bubble time, compute time and exposed time."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["CommunicationTime"]

_Interval = tuple[float, float]
_SOON = 0.05  # the tolerance of `_is_awaited`, as a fraction of the gather's time


class CommunicationTime(NamedTuple):
    """The time in seconds of a rank's reductions and gathers, divided into three parts.

    A reduction is exposed once all ranks have run their last forward or backward. A gather is exposed if the rank's
    next action starts when the gather ends. The exposed time of gathers is an upper bound, because the rank may be
    waiting for a message instead.

    Attributes:
        in_bubbles_s: seconds in which the rank is idle while a collective runs that is not exposed.
        under_compute_s: seconds in which the rank computes during a collective.
        exposed_s: seconds in which the rank is idle during an exposed collective.

    """

    in_bubbles_s: float
    under_compute_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """The total time of the rank's collectives."""
        return self.in_bubbles_s + self.under_compute_s + self.exposed_s

    @classmethod
    def of(
        cls,
        reductions: Iterable[_Interval],
        computes: Iterable[_Interval],
        until_s: float,
        gathers: Iterable[_Interval] = (),
    ) -> "CommunicationTime":
        """Divide the time of a rank's collectives into the three parts.

        Args:
            reductions: (start, end) of each reduction of the rank.
            computes: (start, end) of the rank's compute actions in time order. Overlapping time is counted once.
            until_s: the end of the last forward or backward on any rank.
            gathers: (start, end) of each gather of the rank. Default: none.

        """
        busy = _merged(computes)
        in_bubbles: float = 0
        under_compute: float = 0
        exposed: float = 0
        for start, end in reductions:
            in_bubbles += _idle(start, min(end, until_s), busy)
            under_compute += _covered(start, end, busy)
            exposed += _idle(max(start, until_s), end, busy)
        for start, end in gathers:
            under_compute += _covered(start, end, busy)
            if _is_awaited(start, end, busy):
                exposed += _idle(start, end, busy)
            else:
                in_bubbles += _idle(start, end, busy)
        return cls(in_bubbles, under_compute, exposed)


def _merged(intervals: Iterable[_Interval]) -> list[_Interval]:
    merged: list[_Interval] = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _covered(start: float, end: float, busy: Sequence[_Interval]) -> float:
    """Return the time from ``start`` to ``end`` inside the busy intervals."""
    return sum(max(0, min(end, last) - max(start, first)) for first, last in busy)


def _idle(start: float, end: float, busy: Sequence[_Interval]) -> float:
    """Return the time from ``start`` to ``end`` outside the busy intervals; 0 if the end comes before the start."""
    return max(0, end - start - _covered(start, end, busy)) if start < end else 0  # rounding can go below 0


def _is_awaited(start: float, end: float, busy: Sequence[_Interval]) -> bool:
    """Return whether one of the rank's actions starts almost exactly when a gather ends."""
    slack = (end - start) * _SOON
    return any(end - slack <= first <= end + slack for first, _ in busy)
