"""Checkpoint-restart: after a loss, all processes start again from the last checkpoint."""

from pipesched.fleet.capacity import FleetPlan
from pipesched.fleet.checkpoint_interval import daly_interval_s
from pipesched.fleet.events import Change
from pipesched.fleet.policies.policy import LOOK_AGAIN_S, Fleet, Setting, first_ranks
from pipesched.fleet.run import Run

__all__ = ["CheckpointRestart", "Restarts"]


class Restarts:
    """Starts a run again from a checkpoint, with the fastest plan for the ranks that are alive."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def restart(self, run: Run, fleet: Fleet) -> FleetPlan | None:
        """Go back to the last checkpoint, and return the plan; None if no plan fits the ranks, and the run waits."""
        if run.job is not None:
            run.go_back()
        plan = self.setting.capacity.best(len(fleet.alive))
        if plan is None:
            run.wait(0.0, "restart")
            run.train(None)
            return None
        run.wait(self.setting.costs.restart_s, "restart")
        run.train(self.setting.job(plan))
        return plan

    def grow(self, run: Run, fleet: Fleet) -> FleetPlan | None:
        """If it is expected to pay, write a checkpoint and restart with more ranks, and return the plan."""
        plan = self.setting.capacity.best(len(fleet.alive))
        if plan is None or (run.job is not None and plan.rows_per_s <= run.job.rows_per_s):
            return None
        if run.job is None:
            return self.restart(run, fleet)
        if not fleet.pays(run, plan.rows_per_s, run.job.write_s + self.setting.costs.restart_s):
            run.wake_at(run.now_s + LOOK_AGAIN_S)
            return None
        run.save(run.job.write_s, self.setting.costs.restart_s)
        run.train(self.setting.job(plan))
        return plan


class CheckpointRestart:
    """After a loss, all processes start again from the last checkpoint, with the fastest plan for those alive.

    A weaker variant would wait until all ranks are back. The interval between checkpoints is Daly's higher-order
    estimate, from the time of a checkpoint and the trace's own mean time between losses, which nobody knows in advance.
    If ranks come back and a restart is expected to pay, a checkpoint is written first, so that no work is lost.
    """

    def __init__(self, setting: Setting) -> None:
        self._restarts = Restarts(setting)
        self._setting = setting
        self._members: frozenset[int] = frozenset()

    def begin(self, num_ranks: int) -> Run:
        plan = self._setting.capacity.best(num_ranks)
        interval_s = self._setting.costs.checkpoint_every_s
        if plan is not None:
            interval_s = daly_interval_s(self._setting.write_s(plan), self._setting.between_losses_s)
        run = Run(interval_s)
        self._fleet = Fleet(num_ranks, self._setting.costs.start_s)
        if plan is not None:
            run.train(self._setting.job(plan))
            self._join(plan)
        return run

    def on_event(self, run: Run, change: Change) -> None:
        self._fleet.change(run, change)
        if change.lost & self._members:
            self._join(self._restarts.restart(run, self._fleet))

    def on_wake(self, run: Run) -> None:
        plan = self._restarts.grow(run, self._fleet)
        if plan is not None:
            self._join(plan)

    def _join(self, plan: FleetPlan | None) -> None:
        self._members = frozenset() if plan is None else first_ranks(plan, self._fleet.alive)
