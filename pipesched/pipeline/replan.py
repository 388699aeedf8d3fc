"""Replanning: switch a live pipeline to another plan between two steps.

The results are bit-identical to those of a run that uses the new plan from the start.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from pipesched.checks import shown
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.construction import check_idle_ranks, checked_programs
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.plan_switch import PlanSwitch, UserStates
from pipesched.pipeline.replan_search import PlanSearch, ranks_of_layers, state_places
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.step_history import FEWEST, StepHistory
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.replan_verdict import Replanned, layers_moved
from pipesched.runtime.rank_grid import Rows
from pipesched.runtime.transport.layout_predictor import digest
from pipesched.units import counted

__all__ = ["Replanner"]


class Replanner:
    """Finds and applies other plans for a pipeline.

    Args:
        running: the running plan; the Replanner replaces its contents.
        cost_model: the known costs of layers and devices.
        history: the traces of the last steps.
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        spec: the model and the user's options for its stages.
        switch: replaces the running plan.
        search: finds a better plan.

    """

    def __init__(
        self,
        *,
        running: RunningPlan,
        cost_model: CostModel,
        history: StepHistory,
        roots: Mapping[str, nn.Module],
        spec: AssemblySpec,
        switch: PlanSwitch,
        search: PlanSearch,
    ) -> None:
        self._running = running
        self._cost_model = cost_model
        self._history = history
        self._roots = roots
        self._spec = spec
        self._switch = switch
        self._search = search

    def begin(self) -> None:
        """Finish the steps under way. Raises InputError or ExecutionError if the plan cannot be changed."""
        host = self._running.host
        self._switch.check()
        host.executor.check_open("replan")
        host.executor.check_outside("replan")
        self._running.flush()

    def agree(self, plan: Plan | None, states: UserStates, **choices: Any) -> None:
        """Raise an error in all processes unless all have passed the same arguments, and these are valid. Collective.

        Args:
            plan: the plan of each replica; None to search.
            states: the user's objects that move with the layers.
            choices: the other arguments.

        """
        facts = {f"{name}=": repr(value) for name, value in choices.items()}
        facts["plan="] = "None" if plan is None else _described(plan)
        facts["extra="] = ", ".join(states.without_loading) or "valid"
        if self._spec.optimizer is None:
            facts["optimizer="] = counted(states.num_optimizers, "optimizer")
        self._running.host.collectives.agree_on(lambda: facts, "pass the same arguments to replan() on every rank")
        states.check()
        if plan is not None:
            PlanRequest().pinned(plan, list(self._spec.layers))  # raises an error unless this is a plan of the model

    def apply(self, plan: Plan, states: UserStates, num_replicas: int | None) -> Replanned:
        """Switch to a plan, and return the outcome.

        Args:
            plan: the plan of each replica.
            states: the user's objects that move with the layers.
            num_replicas: the number of replicas; None: that of the plan or, if the plan has none, as before.

        """
        rows = self._running.host.grid.first_rows
        if num_replicas is None:
            num_replicas = plan.replication.num_replicas if plan.replication else len(rows)
        if num_replicas != len(rows):
            rows = self._running.host.grid.rows_of(num_replicas)
        return self._switched(plan, states, rows)

    def improve(
        self, steps_left: int | None, states: UserStates, *, measure: bool = False, every: int | None = None
    ) -> Replanned:
        """Search for a better plan, based on the times of the last steps. Switch to it if it saves enough time.

        Args:
            steps_left: the number of steps still to run; None if unknown.
            states: the user's objects that move with the layers.
            measure: whether to measure the layers again first. Default: False.
            every: the number of steps after which this method is called unasked. It then searches only if the times of
                the ranks have changed. Default: None (the user asked).

        """
        running = self._running
        steps, probed = self._history.gather_steps()
        if len(steps) < FEWEST:
            why = (
                f"the search for a better plan requires {FEWEST} measured steps of the current plan; measured so far: "
                f"{len(steps)}"
            )
            return Replanned(plan=self._plan(), kept=why)
        what = "replan(), where rank 0 searches for all"
        found = running.host.collectives.agreed(
            lambda: self._search.find(steps, probed, steps_left, measure=measure, every=every), what
        )
        if found.layers is not None:
            self._cost_model.agree(found.layers)
        self._cost_model.slow, self._cost_model.overheads = found.slow, None
        outcome = partial(Replanned, kept=found.kept, before_s=found.before_s, after_s=found.after_s, noise=found.noise)
        if found.plan is None:
            return outcome(plan=self._plan(), layers=found.moves, moved_bytes=found.moved_bytes, cost_s=found.cost_s)
        moved = self._switched(found.plan, states, found.rows)
        return outcome(plan=moved.plan, layers=found.moves, moved_bytes=moved.moved_bytes, cost_s=moved.cost_s)

    def _plan(self) -> Plan:
        return self._history.plan(self._spec.model)

    def _switched(self, plan: Plan, states: UserStates, rows: Rows) -> Replanned:
        """Switch to a plan of ranks that are arranged in these rows."""
        names = list(self._spec.layers)
        request = PlanRequest().pinned(plan, names)
        running = self._running
        host = running.host
        grid = host.grid.arranged(rows)
        programs = checked_programs(request, grid, self._spec)
        check_idle_ranks(self._spec, grid.use(programs.num_ranks))
        pins, ranks_at = Pins(names, request.boundaries), self._cost_model.places_of(grid)
        stage_cut = self._cost_model.cut_stages(host, pins, programs, plan, ranks_at)
        host.collectives.check_plan(programs.full.plain, (stage_cut.cut, repr(programs.checkpoint), rows))
        begin = time.perf_counter()
        ranks = ranks_of_layers(running.program, running.cut)
        places = state_places(running, self._roots)
        sent = self._switch.switch(programs, stage_cut, states, rows)
        cost_s = time.perf_counter() - begin
        self._cost_model.regroup(running.host.grid, self._spec.zero)
        now = state_places(running, self._roots)
        size = sent + sum(place.nbytes for name, place in places.items() if place.device != now[name].device)
        layers = layers_moved(ranks, ranks_of_layers(running.program, running.cut))
        return Replanned(plan=self._plan(), layers=layers, moved_bytes=size, cost_s=cost_s)


def _described(plan: Any) -> str:
    """Return a short description of a plan, which differs between plans that run differently."""
    if not isinstance(plan, Plan):
        return shown(plan)  # refused once the ranks have compared their arguments
    own = digest(repr((str(plan.program), plan.stages, plan.checkpoint)).encode()).hex()[:8]
    return f"{plan.schedule} with {counted(len(plan.stages), 'stage')} (digest {own})"
