"""Run: how one policy spends the time of a trace, and the work that losses take back."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import Literal, NamedTuple

from pipesched.fleet.capacity import FleetPlan

__all__ = ["Activity", "Job", "Run", "Segment"]

#: train: work that counts. lost: work that a loss took back. checkpoint: a checkpoint is written. stall: ranks notice a
#: loss, plan, move layers. restart: from a checkpoint. idle: no plan for the ranks that are alive.
Activity = Literal["train", "lost", "checkpoint", "stall", "restart", "idle"]

_ROUNDING = 1e-9  # of a step


class Segment(NamedTuple):
    """A span of time in which all ranks do the same."""

    start_s: float
    end_s: float
    activity: Activity
    #: The rows of the batch that a second processes. 0 unless the ranks train.
    rows_per_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks run."""

    rows_per_s: float
    step_s: float
    #: The time to write a checkpoint.
    write_s: float

    @classmethod
    def of(cls, plan: FleetPlan, write_s: float, copy_s: float = 0.0) -> "Job":
        """Return the job of a plan.

        Ranks copy their state in ``copy_s`` seconds while the next step runs, which waits for this at its end.
        """
        step_s = max(plan.step_s, copy_s)
        return cls(rows_per_s=plan.batch_size / step_s, step_s=step_s, write_s=write_s)


class Run:
    """The time of one policy, from 0 to the present, as segments.

    A run is a sequence of waits (`wait`) and of steps (`train`). At the boundaries between steps, it writes a
    checkpoint when it is time, and calls the policy back when the policy has asked for this (`wake_at`).

    Args:
        interval_s: the time of training between two checkpoints; infinite for none.

    """

    def __init__(self, interval_s: float) -> None:
        self.now_s = 0.0
        self.segments: list[Segment] = []
        self.num_restarts = 0
        self.moved_bytes = 0
        self._interval_s = interval_s
        self._job: Job | None = None
        self._base_s = 0.0  # the start of a step
        self._ready_s = 0.0  # the end of the wait
        self._waits_for: Activity = "stall"
        self._wake_s = inf
        self._saved_s = 0.0  # the last checkpoint has the work until then
        self._trained_s = 0.0  # since the last checkpoint
        self._write: tuple[float, float] | None = None  # start and end of the checkpoint that is written

    @property
    def job(self) -> Job | None:
        """What the ranks run, or will run after the wait; None if there is no plan."""
        return self._job

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks wait, and do not train."""
        return self.now_s < self._ready_s

    @property
    def ready_s(self) -> float:
        """The end of the last wait."""
        return self._ready_s

    def train(self, job: Job | None) -> None:
        """From now on, or from the end of the wait, run this job; None: nothing."""
        self._job = job
        self._base_s = max(self.now_s, self._ready_s)

    def wait(self, seconds: float, activity: Activity) -> None:
        """Wait from now on. This replaces a wait that has not ended, and a checkpoint that is not complete."""
        self._settle()
        self._write = None
        self._ready_s = self._base_s = self.now_s + seconds
        self._waits_for = activity

    def save(self, write_s: float, then_s: float = 0.0) -> None:
        """Write a checkpoint of the last step. If ``then_s`` is not 0, restart afterwards, which takes this time."""
        self.wait(write_s + then_s, "restart" if then_s else "checkpoint")
        self.num_restarts += bool(then_s)
        self._write = self.now_s, self.now_s + write_s

    def wake_at(self, time_s: float) -> None:
        """Call the policy at the first boundary between steps after this time, or after an earlier one asked for."""
        self._wake_s = min(self._wake_s, time_s)

    def lose_step(self, copied_after_s: float = 0.0) -> None:
        """Take back the step under way.

        Args:
            copied_after_s: the time after the start of a step until the state before it is known to be kept. A loss
                within this time takes back the step before, too. Default: 0.

        """
        if self._job is None or self.is_waiting:
            return
        steps = floor((self.now_s - self._base_s) / self._job.step_s + _ROUNDING)
        since_s = self._base_s + steps * self._job.step_s
        if steps and self.now_s - since_s < copied_after_s:
            since_s -= self._job.step_s
        self._trained_s = max(0.0, self._trained_s - self._take_back(since_s))

    def go_back(self) -> None:
        """Take back all work since the last checkpoint, and count a restart."""
        self._settle()
        self._take_back(self._saved_s)
        self._trained_s = 0.0
        self.num_restarts += 1

    def advance(self, until_s: float, wake: Callable[[], None]) -> None:
        """Move the present to ``until_s``. Calls ``wake`` at the boundaries that the policy has asked for."""
        while self.now_s < until_s:
            if self.is_waiting:
                self._add(min(until_s, self._ready_s), self._waits_for)
                self._settle()
            elif self._wakes_now():
                self._wake_s = inf
                wake()
            elif self._job is None:
                self._add(max(self.now_s, min(until_s, self._wake_s)), "idle")
            else:
                self._train_until(self._job, until_s)

    def _wakes_now(self) -> bool:
        """Whether the policy has asked to be called now, and no step is under way."""
        if self._wake_s > self.now_s:
            return False
        if self._job is None:
            return True
        steps = (self.now_s - self._base_s) / self._job.step_s
        return abs(steps - round(steps)) < _ROUNDING * max(1.0, steps)

    def _train_until(self, job: Job, until_s: float) -> None:
        """Train until the next boundary at which there is something to do, or until ``until_s``."""
        done = (self.now_s - self._base_s) / job.step_s
        following = floor(done + _ROUNDING * max(1.0, done)) + 1
        due_s = max(0.0, self._interval_s - self._trained_s)
        save_at = inf if due_s == inf else max(following, round(done + due_s / job.step_s))
        wake_at = inf if self._wake_s == inf else max(following, ceil((self._wake_s - self._base_s) / job.step_s))
        stop_at = min(save_at, wake_at)
        stop_s = inf if stop_at == inf else self._base_s + stop_at * job.step_s
        before_s = self.now_s
        self._add(min(until_s, stop_s), "train", job.rows_per_s)
        self._trained_s += self.now_s - before_s
        if self.now_s >= stop_s and stop_at == save_at:
            self.save(job.write_s)

    def _settle(self) -> None:
        """Count a checkpoint that is complete."""
        if self._write is not None and self.now_s >= self._write[1]:
            self._saved_s = self._write[0]
            self._trained_s = 0.0
            self._write = None

    def _add(self, end_s: float, activity: Activity, rows_per_s: float = 0.0) -> None:
        if end_s > self.now_s:
            self.segments.append(Segment(self.now_s, end_s, activity, rows_per_s))
            self.now_s = end_s

    def _take_back(self, since_s: float) -> float:
        """Mark the training since then as lost, and return its seconds."""
        lost_s, kept = 0.0, []
        while self.segments and self.segments[-1].end_s > since_s:
            kept.append(self.segments.pop())
        for own in reversed(kept):
            start_s = max(own.start_s, since_s)
            if own.activity != "train":
                self.segments.append(own)
                continue
            if own.start_s < start_s:
                self.segments.append(own._replace(end_s=start_s))
            self.segments.append(Segment(start_s, own.end_s, "lost"))
            lost_s += own.end_s - start_s
        return lost_s
