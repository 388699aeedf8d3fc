"""Elastic: the ranks that are alive plan again, move layers, and repeat the step that was lost. This is our policy."""

from collections import Counter

from pipesched.fleet.capacity import FleetPlan, Layers
from pipesched.fleet.events import Change
from pipesched.fleet.policies.policy import LOOK_AGAIN_S, Fleet, Setting
from pipesched.fleet.run import Run
from pipesched.fleet.transfers import LayerMoves, assigned, held_layers, layer_moves

__all__ = ["Elastic"]


class Elastic:
    """After a loss, the other ranks take the fastest plan for their number, and repeat the step under way.

    After each step, each rank sends its state to a neighbour, the rank half a pipeline away in its replica, while the
    next step runs; a recovery of a single pipeline waits for it. The other replicas hold the state, too. If all holders
    of a layer are lost before a recovery is complete, the run goes back to a checkpoint. Ranks that come back join
    between two steps if this is expected to pay.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._layer_bytes = setting.capacity.layer_bytes
        self._planned: set[int] = set()
        self._members: dict[int, int] = {}  # rank -> position, of the plan that runs or is being set up
        self._held: dict[int, Layers] = {}  # what each rank holds now
        self._copies: dict[int, Layers] = {}  # what each rank holds for another rank
        self._plan: FleetPlan | None = None
        self._until_s = 0.0  # the end of the recovery, when the members hold their layers
        self._copied_s = 0.0  # from then on, the neighbours hold copies

    def begin(self, num_ranks: int) -> Run:
        run = Run(self._setting.costs.checkpoint_every_s)
        self._fleet = Fleet(num_ranks, self._setting.costs.start_s)
        self._plan = self._setting.capacity.best(num_ranks)
        self._planned.add(num_ranks)
        if self._plan is not None:
            self._members = assigned(self._plan, range(num_ranks), {}, self._layer_bytes)
            self._train(run, self._plan)
        self._complete(run)
        return run

    def on_event(self, run: Run, change: Change) -> None:
        self._complete(run)
        self._fleet.change(run, change)
        if self._until_s <= run.now_s < self._copied_s:
            self._copies = {}  # not complete
        needed = self._members.keys() | (self._held.keys() if run.now_s < self._until_s else set())
        for rank in change.lost:
            self._held.pop(rank, None)
            self._copies.pop(rank, None)
        if change.lost & needed:
            in_copies = self._plan is not None and len(held_layers(self._held.values())) < len(self._layer_bytes)
            run.lose_step(self._copy_s(self._plan) if self._plan is not None and in_copies else 0.0)
            self._recover(run)

    def on_wake(self, run: Run) -> None:
        self._complete(run)
        ready = self._fleet.ready(run.now_s)
        plan = self._setting.capacity.best(len(ready))
        if plan is None or (self._plan is not None and plan.rows_per_s <= self._plan.rows_per_s):
            return
        if self._plan is None:
            self._recover(run)
            return
        members, moved = self._moves(plan, ready)
        wait_s = self._setting.costs.switch_s + self._move_s(plan, moved)
        if self._fleet.pays(run, plan.rows_per_s, wait_s):
            self._switch(run, plan, members, moved, wait_s)
        else:
            run.wake_at(run.now_s + LOOK_AGAIN_S)

    def _recover(self, run: Run) -> None:
        """Go on with the ranks that are ready, from their states or from a checkpoint."""
        ready = self._fleet.ready(run.now_s)
        plan = self._setting.capacity.best(len(ready))
        if plan is None:
            self._plan, self._members = None, {}
            run.train(None)
            return
        costs = self._setting.costs
        search_s = 0.0 if len(ready) in self._planned else costs.replan_s
        self._planned.add(len(ready))
        if len(held_layers(self._holdings().values())) < len(self._layer_bytes):
            run.go_back()
            self._held, self._copies = {}, {}
            members = assigned(plan, ready, {}, self._layer_bytes)
            self._switch(run, plan, members, LayerMoves({}), costs.restart_s)
            return
        members, moved = self._moves(plan, ready)
        wait_s = costs.notice_s + search_s + costs.switch_s + self._move_s(plan, moved)
        self._switch(run, plan, members, moved, wait_s)

    def _switch(self, run: Run, plan: FleetPlan, members: dict[int, int], moved: LayerMoves, wait_s: float) -> None:
        run.wait(wait_s, "stall" if self._held else "restart")
        run.moved_bytes += moved.total_bytes
        self._plan, self._members, self._until_s = plan, members, run.now_s + wait_s
        self._copied_s = self._until_s + (self._copy_s(plan) if plan.num_replicas > 1 else 0.0)
        self._train(run, plan)
        if len(self._fleet.alive) > plan.num_ranks:
            run.wake_at(self._until_s + self._setting.costs.start_s)

    def _train(self, run: Run, plan: FleetPlan) -> None:
        run.train(self._setting.job(plan, self._copy_s(plan)))

    def _complete(self, run: Run) -> None:
        """If the recovery is complete, the members hold the layers of their positions, and copies of others."""
        if self._plan is None or run.now_s < self._until_s:
            return
        self._held = {rank: self._plan.layers[position] for rank, position in self._members.items()}
        self._copies = {}
        rows: list[list[int]] = [[] for _ in range(self._plan.num_replicas)]
        turns = Counter[int]()
        for rank in sorted(self._members):
            position = self._members[rank]
            rows[turns[position]].append(rank)
            turns[position] += 1
        for row in rows:
            row.sort(key=self._members.__getitem__)
            away = max(1, len(row) // 2)
            self._copies |= {row[(at + away) % len(row)]: self._held[rank] for at, rank in enumerate(row)}

    def _holdings(self) -> dict[int, Layers]:
        """Return the layers that each rank holds, for itself or as a copy."""
        none: Layers = frozenset()
        ranks = self._held.keys() | self._copies.keys()
        return {rank: self._held.get(rank, none) | self._copies.get(rank, none) for rank in ranks}

    def _moves(self, plan: FleetPlan, ready: list[int]) -> tuple[dict[int, int], LayerMoves]:
        """Return the position of each rank in a plan, and the layers that must move for it."""
        members = assigned(plan, ready, self._held, self._layer_bytes)
        wanted = {rank: plan.layers[position] for rank, position in members.items()}
        return members, layer_moves(wanted, self._holdings(), self._layer_bytes)

    def _move_s(self, plan: FleetPlan, moved: LayerMoves) -> float:
        """Return the time until all members hold their layers and, if there is one replica only, a copy."""
        return moved.time_s(self._setting.costs.link) + (self._copy_s(plan) if plan.num_replicas == 1 else 0.0)

    def _copy_s(self, plan: FleetPlan) -> float:
        """Return the time in which each rank sends its state to its neighbour."""
        if plan.depth == 1:
            return 0.0
        return self._setting.costs.link.time_s(max(map(self._setting.capacity.bytes_of, plan.layers)))
