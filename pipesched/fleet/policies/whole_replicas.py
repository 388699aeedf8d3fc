"""Whole replicas: a replica that has lost a rank drops out until all of its ranks are back, as in torchft."""

from dataclasses import replace

from pipesched.fleet.capacity import FleetPlan
from pipesched.fleet.events import Change
from pipesched.fleet.policies.checkpoint_restart import Restarts
from pipesched.fleet.policies.policy import Fleet, Setting
from pipesched.fleet.run import Run

__all__ = ["WholeReplicas"]


class WholeReplicas:
    """A replica that has lost a rank drops out, and the others go on with a smaller batch.

    All ranks lose the step under way. When all ranks of a replica are back, it reads the weights from another replica
    while the others train, and joins between two steps. Ranks outside of all replicas form further replicas in the
    place of those that dropped out. If the last replica drops out, the run restarts from a checkpoint, with the fastest
    plan for the ranks that are alive. After that, it also restarts if ranks that came back make this pay.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._restarts = Restarts(setting)
        self._plan: FleetPlan | None = None
        self._whole: list[frozenset[int]] = []  # the replicas that train
        self._broken: list[frozenset[int]] = []  # the replicas that wait for ranks, or for weights
        self._healed_s: dict[frozenset[int], float] = {}
        self._until_s = 0.0  # the end of a restart
        self._has_restarted = False

    def begin(self, num_ranks: int) -> Run:
        plan = self._setting.capacity.best(num_ranks)
        run = Run(self._setting.interval_s(plan))
        self._fleet = Fleet(num_ranks, self._setting.costs.start_s)
        self._form(run, plan)
        if self._plan is not None:
            run.train(self._setting.job(self._plan))
        return run

    def on_event(self, run: Run, change: Change) -> None:
        self._fleet.change(run, change)
        for replica in [own for own in self._healed_s if own & change.lost]:
            del self._healed_s[replica]
        hit = [replica for replica in self._whole if replica & change.lost]
        if hit:
            run.lose_step()
            self._whole = [replica for replica in self._whole if replica not in hit]
            self._broken += hit
            if self._whole and run.now_s >= self._until_s:
                run.wait(self._setting.costs.notice_s, "stall")
                self._train(run)
            else:
                self._has_restarted = True
                self._form(run, self._restarts.restart(run, self._fleet))
        if self._plan is not None:
            self._heal(run)

    def on_wake(self, run: Run) -> None:
        ready = [replica for replica, from_s in self._healed_s.items() if from_s <= run.now_s]
        if ready:
            for replica in ready:
                del self._healed_s[replica]
            self._broken = [replica for replica in self._broken if replica not in ready]
            self._whole += ready
            self._train(run)
        if self._healed_s:
            run.wake_at(min(self._healed_s.values()))
            return
        forms = self._has_restarted or self._plan is None
        plan = self._restarts.grow(run, self._fleet) if forms else None
        if plan is not None:
            self._form(run, plan)

    def _form(self, run: Run, plan: FleetPlan | None) -> None:
        """Divide the ranks that are alive into the replicas of a plan. Consecutive ranks form a replica."""
        self._plan, self._broken, self._healed_s, self._until_s = plan, [], {}, run.ready_s
        self._whole = []
        if plan is not None:
            ranks = sorted(self._fleet.alive)[: plan.num_ranks]
            self._whole = [frozenset(ranks[at : at + plan.depth]) for at in range(0, len(ranks), plan.depth)]

    def _train(self, run: Run) -> None:
        """Train with the replicas that are whole."""
        if self._plan is not None:
            job = self._setting.job(self._plan)
            run.train(replace(job, rows_per_s=job.rows_per_s * len(self._whole) / self._plan.num_replicas))

    def _heal(self, run: Run) -> None:
        """Begin to send weights to replicas whose ranks are all back, and to replicas of ranks that were idle."""
        plan = self._plan
        if plan is None:
            return
        self._replace(plan)
        read_s = self._setting.costs.link.time_s(max(map(self._setting.capacity.bytes_of, plan.layers)))
        for replica in self._broken:
            if replica <= self._fleet.alive and replica not in self._healed_s:
                self._healed_s[replica] = run.now_s + self._setting.costs.start_s + read_s
                run.wake_at(self._healed_s[replica])

    def _replace(self, plan: FleetPlan) -> None:
        """Replace replicas that miss ranks by replicas of ranks that belong to none."""
        used = frozenset[int]().union(*self._whole, *self._broken)
        spare = sorted(self._fleet.alive - used)
        for replica in [own for own in self._broken if not own <= self._fleet.alive]:
            if len(spare) >= plan.depth:
                self._broken.remove(replica)
                self._broken.append(frozenset(spare[: plan.depth]))
                spare = spare[plan.depth :]
