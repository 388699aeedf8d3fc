"""Step times: the times of the actions of the last steps in all processes, from what each process sends of them.

A process sends only the times of its own actions, as one array. All processes know the orders of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesched.program.action_arrays import Orders
from pipesched.runtime.executors.rank_run import RankTimeline
from pipesched.runtime.executors.threads import Timeline
from pipesched.simulation.trace import Spans

__all__ = ["SentTimes", "StepTimes"]

#: The number of steps, and the start and the end of each action of one process in these steps, as the rows of an array.
SentTimes = tuple[int, NDArray[np.float64]]


@dataclass(frozen=True)
class StepTimes:
    """The last steps of this process."""

    runs: Sequence[RankTimeline]

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> "StepTimes":
        """Return the times in the timelines of a process that runs one rank."""
        return cls([one for one in timelines if isinstance(one, RankTimeline)])

    @property
    def sent(self) -> SentTimes:
        """What this process sends to the others."""
        return len(self.runs), np.concatenate([np.zeros((0, 2)), *(run.times() for run in self.runs)])

    def spans(self, every: Sequence[SentTimes], places: Sequence[Sequence[int]]) -> list[Spans]:
        """Return the spans of all ranks in each step.

        The actions of each rank are those of the process in which this rank took the longest.

        Args:
            every: what each process has sent.
            places: the processes that run each rank.

        """
        count = min(steps for steps, _ in every)
        orders = [Orders.of(run.orders) for run in self.runs[len(self.runs) - count :]]
        slowest: list[list[NDArray[Any]]] = []
        for rank, processes in enumerate(places):
            parts = [_of_steps(orders, rank, every[process][1]) for process in processes]
            slowest.append(max(parts, key=lambda own, rank=rank: _busy_s(orders, rank, own)))  # type: ignore[misc]
        joined = map(np.concatenate, zip(*slowest, strict=True))
        return [Spans.of_program(own, *times.T) for own, times in zip(orders, joined, strict=True)]


def _of_steps(orders: Sequence[Orders], rank: int, times: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the times of a rank in each of the last steps."""
    lengths = [_length(own, rank) for own in orders]
    ends = np.cumsum(lengths) + (len(times) - sum(lengths))
    return [times[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _length(orders: Orders, rank: int) -> int:
    return int(orders.offsets[rank + 1] - orders.offsets[rank]) if rank < len(orders) else 0


def _busy_s(orders: Sequence[Orders], rank: int, parts: Sequence[NDArray[Any]]) -> float:
    """Return how long a rank computed in all steps."""
    return sum(
        sum((own[:, 1] - own[:, 0])[order.rank(rank).compute].tolist())
        for order, own in zip(orders, parts, strict=True)
        if len(own)
    )
