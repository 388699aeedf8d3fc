"""Rerouting: the ranks at the same position of other replicas take the micro-batches of lost ranks, as in ReCycle."""

from dataclasses import replace

from pipesched.fleet.capacity import FleetPlan, Layers
from pipesched.fleet.events import Change
from pipesched.fleet.policies.checkpoint_restart import Restarts
from pipesched.fleet.policies.policy import LOOK_AGAIN_S, Fleet, Setting, first_ranks
from pipesched.fleet.run import Run
from pipesched.fleet.transfers import LayerMoves, assigned, held_layers, layer_moves

__all__ = ["Rerouting"]


class Rerouting:
    """The micro-batches of a lost rank go to the ranks at the same position of the other replicas.

    After Gandhi et al. 2024 (ReCycle), in its best case: rerouted micro-batches fill all bubbles before the step gets
    longer, all schedules are known in advance, and losses are spread over the positions (failure normalization), for
    which ranks move to other positions. The position whose ranks have the most work decides the step. All ranks lose
    the step under way. If all ranks of a position are lost, or fewer ranks are left than positions, the run restarts
    from a checkpoint with the fastest plan; it also restarts if ranks that came back make this pay.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._restarts = Restarts(setting)
        self._plan: FleetPlan | None = None
        self._members: dict[int, int] = {}  # rank -> position
        self._held: dict[int, Layers] = {}
        self._until_s = 0.0  # until then, ranks read the layers of their new positions

    def begin(self, num_ranks: int) -> Run:
        plan = self._setting.capacity.best(num_ranks)
        run = Run(self._setting.costs.checkpoint_every_s)
        self._fleet = Fleet(num_ranks, self._setting.costs.start_s)
        self._form(run, plan)
        if self._plan is not None:
            run.train(self._setting.job(self._plan))
        self._complete(run)
        return run

    def on_event(self, run: Run, change: Change) -> None:
        self._complete(run)
        self._fleet.change(run, change)
        for rank in change.lost:
            self._held.pop(rank, None)
        if self._plan is None or not change.lost & self._members.keys():
            return
        left = sorted(self._members.keys() - change.lost)
        run.lose_step()
        whole = len(held_layers(self._held.values())) == len(self._setting.capacity.layer_bytes)
        if not whole or len(left) < self._plan.depth:
            self._form(run, self._restarts.restart(run, self._fleet))
            return
        members, moved = self._moves(self._plan, left)
        self._reroute(run, self._plan, members, moved, self._setting.costs.notice_s)

    def on_wake(self, run: Run) -> None:
        self._complete(run)
        plan = self._plan
        if plan is not None and run.job is not None:
            ready = self._fleet.ready(run.now_s)
            ranks = sorted([*self._members, *(rank for rank in ready if rank not in self._members)][: plan.num_ranks])
            rate = plan.batch_size / plan.rerouted_s(plan.spread(len(ranks)))
            if rate > run.job.rows_per_s:
                members, moved = self._moves(plan, ranks)
                if self._fleet.pays(run, rate, moved.time_s(self._setting.costs.link)):
                    self._reroute(run, plan, members, moved, 0.0)
                else:
                    run.wake_at(run.now_s + LOOK_AGAIN_S)
                return
        grown = self._restarts.grow(run, self._fleet)
        if grown is not None:
            self._form(run, grown)

    def _form(self, run: Run, plan: FleetPlan | None) -> None:
        """Give the ranks that are alive their positions in a plan. They hold its layers after the restart."""
        self._plan, self._members, self._held, self._until_s = plan, {}, {}, run.ready_s
        if plan is not None:
            ranks = first_ranks(plan, self._fleet.alive)
            self._members = assigned(plan, ranks, {}, self._setting.capacity.layer_bytes)

    def _complete(self, run: Run) -> None:
        if self._plan is not None and run.now_s >= self._until_s:
            self._held = {rank: self._plan.layers[position] for rank, position in self._members.items()}

    def _moves(self, plan: FleetPlan, ranks: list[int]) -> tuple[dict[int, int], LayerMoves]:
        """Return the position of each rank, and the layers that must move, for losses that are spread evenly."""
        layer_bytes = self._setting.capacity.layer_bytes
        members = assigned(plan, ranks, self._held, layer_bytes, plan.spread(len(ranks)))
        wanted = {rank: plan.layers[position] for rank, position in members.items()}
        return members, layer_moves(wanted, self._held, layer_bytes)

    def _reroute(self, run: Run, plan: FleetPlan, members: dict[int, int], moved: LayerMoves, notice_s: float) -> None:
        wait_s = notice_s + moved.time_s(self._setting.costs.link)
        run.wait(wait_s, "stall")
        run.moved_bytes += moved.total_bytes
        self._members, self._until_s = members, run.now_s + wait_s
        step_s = plan.rerouted_s(plan.spread(len(members)))
        job = self._setting.job(plan)
        run.train(replace(job, step_s=step_s, rows_per_s=plan.batch_size / step_s))
