"""Policy: the protocol of all policies, and what they share."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Protocol

from pipesched.fleet.capacity import Capacity, FleetPlan
from pipesched.fleet.checkpoint_interval import daly_interval_s
from pipesched.fleet.events import Change
from pipesched.fleet.fleet_costs import FleetCosts
from pipesched.fleet.run import Job, Run

__all__ = ["Fleet", "Policy", "Setting"]

#: After this time, a policy thinks again about ranks that it has left idle.
LOOK_AGAIN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a policy knows: the plans, the costs, and the mean time between losses of the trace."""

    capacity: Capacity
    costs: FleetCosts
    between_losses_s: float = inf

    def write_s(self, plan: FleetPlan) -> float:
        """Return the time in which the ranks of a plan write a checkpoint. Each writes an equal part."""
        return self.capacity.state_bytes / plan.num_ranks / self.costs.checkpoint_bytes_per_s

    def interval_s(self, plan: FleetPlan | None) -> float:
        """Return the time between checkpoints for a policy that restarts when no replica is left.

        This is Daly's estimate, if each loss uses up a replica. The mean time between losses is that of the trace,
        which nobody knows in advance.
        """
        if plan is None:
            return self.costs.checkpoint_every_s
        return daly_interval_s(self.write_s(plan), self.between_losses_s * plan.num_replicas)

    def job(self, plan: FleetPlan, copy_s: float = 0.0) -> Job:
        """Return the job of a plan."""
        return Job.of(plan, self.write_s(plan), copy_s)


class Policy(Protocol):
    """A policy. It is made for one replay, with a Setting, and keeps what it knows about the ranks.

    A policy decides on `Run.train`, `Run.wait`, `Run.lose_step`, `Run.go_back` and `Run.save`.
    """

    def begin(self, num_ranks: int) -> Run:
        """Start a run in which all ranks are alive."""
        ...

    def on_event(self, run: Run, change: Change) -> None:
        """React to ranks that are lost or come back now."""
        ...

    def on_wake(self, run: Run) -> None:
        """Go on at a boundary between two steps, after a time that the policy has passed to `Run.wake_at`."""
        ...


class Fleet:
    """The ranks that are alive, and those of them that have started again.

    Args:
        num_ranks: the number of ranks. All are alive at first.
        start_s: the time from the return of a rank until it can join.

    """

    def __init__(self, num_ranks: int, start_s: float) -> None:
        self._start_s = start_s
        self._from_s = dict.fromkeys(range(num_ranks), 0.0)
        self._moments = 0

    def change(self, run: Run, change: Change) -> None:
        """Count losses and returns, and wake the policy when the returned ranks have started."""
        self._moments += bool(change.lost)
        for rank in change.lost:
            self._from_s.pop(rank, None)
        for rank in sorted(change.back):
            self._from_s[rank] = run.now_s + self._start_s
        if change.back:
            run.wake_at(run.now_s + self._start_s)

    @property
    def alive(self) -> set[int]:
        """The ranks that are alive."""
        return set(self._from_s)

    def ready(self, now_s: float) -> list[int]:
        """Return the ranks that can take part in a step."""
        return sorted(rank for rank, from_s in self._from_s.items() if from_s <= now_s)

    def pays(self, run: Run, rows_per_s: float, wait_s: float) -> bool:
        """Return whether a wait pays off, if the next loss comes after the mean time between the losses so far."""
        own = 0.0 if run.job is None else run.job.rows_per_s
        ahead_s = run.now_s / max(1, self._moments)
        return (rows_per_s - own) * max(0.0, ahead_s - wait_s) > own * wait_s


def first_ranks(plan: FleetPlan, ranks: Collection[int]) -> frozenset[int]:
    """Return the ranks with the lowest numbers, as many as the plan uses."""
    return frozenset(sorted(ranks)[: plan.num_ranks])
