"""Replanning: switch a live pipeline to another plan between two steps.

The results are bit-identical to those of a run that uses the new plan from the start.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.assembly import AssemblySpec, StageCut
from pipesched.pipeline.construction import checked_programs
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.gathering import named_tensors
from pipesched.pipeline.plan_switch import PlanSwitch, UserStates
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.step_history import StepHistory
from pipesched.planning.cost_correction import MeasuredStage
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.refinement.boundary_refinement import refined
from pipesched.planning.replan_verdict import Replanned, certain, layers_moved, strayed, verdict
from pipesched.program.program import Program
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import TIMES
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.simulator import simulate
from pipesched.tensors.payload import pytree

__all__ = ["Replanner"]

_FEWEST = 3  # the number of measured steps required to search for a better cut
_EFFORT = 200_000  # the search for better boundaries ends after this number of simulated actions
_COPIED = 1 << 22  # the size in bytes of the test copy that measures the speed between two devices


class _StatePlacement(NamedTuple):
    """The device of a parameter or buffer, and the total size of the tensor, its gradient and its optimizer state."""

    device: torch.device
    nbytes: int


class Replanner:
    """Finds and applies other plans for a pipeline.

    Args:
        running: the running plan; the Replanner replaces its contents.
        cost_model: the known costs of layers and devices.
        history: the traces of the last steps.
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        spec: the model and the user's options for its stages.
        switch: replaces the running plan.
        asked: the boundaries that the user fixed.
        limits: the maximum number of bytes that each rank may hold, or None if there is no limit.

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
        asked: Pins,
        limits: tuple[int, ...] | None,
    ) -> None:
        self._running = running
        self._cost_model = cost_model
        self._history = history
        self._roots = roots
        self._spec = spec
        self._switch = switch
        self._asked = asked
        self._limits = limits

    def begin(self) -> None:
        """Finish the steps under way. Raises InputError or ExecutionError if the plan cannot be changed."""
        host = self._running.host
        self._switch.check()
        host.executor.check_open("replan")
        host.executor.check_outside("replan")
        self._running.flush()

    def apply(self, plan: Plan, states: UserStates, num_replicas: int | None) -> Replanned:
        """Switch to a plan, and return the outcome.

        Args:
            plan: the plan of each replica.
            states: the user's objects that move with the layers.
            num_replicas: the number of replicas; None: that of the plan or, if the plan has none, as before.

        """
        names = list(self._spec.layers)
        request = PlanRequest().pinned(plan, names)
        host = self._running.host
        if num_replicas is None:
            num_replicas = plan.replication.num_replicas if plan.replication else len(host.grid.rows)
        grid = host.grid if num_replicas == len(host.grid.rows) else host.grid.regrouped(num_replicas)
        programs = checked_programs(request, grid, self._spec)
        stage_cut = self._cost_model.cut_stages(host, Pins(names, request.boundaries), programs, plan)
        host.collectives.check_plan(programs.full.plain, (stage_cut.cut, repr(programs.checkpoint)))
        return self._move(programs, stage_cut, states, num_replicas)

    def improve(self, steps_left: int | None, states: UserStates, *, measure: bool) -> Replanned:
        """Search for a better cut, based on the times of the last steps. Switch to the new cut if it saves enough time.

        Args:
            steps_left: the number of steps still to run; None if unknown.
            states: the user's objects that move with the layers.
            measure: whether to measure the layers again first.

        """
        running = self._running
        steps = self._history.steps()
        steps = steps[1:] if len(steps) > _FEWEST else steps  # the first step of a plan includes warm-up
        if len(steps) < _FEWEST:
            why = (
                f"the search for a better plan requires {_FEWEST} measured steps of the current plan; measured so far: "
                f"{len(steps)}"
            )
            return Replanned(plan=self._plan(), kept=why)
        if measure:
            self._cost_model.forget()
        now = running.assembly
        noise = strayed(steps)
        measured = measured_costs(steps, now.program.num_stages, self._cost_model.stage_costs(now.programs, now.cut))
        self._learn(measured, certain(noise))
        programs = checked_programs(now.programs.request, running.host.grid, self._spec)
        stage_cut = self._cost_model.cut_stages(running.host, self._asked, programs, None)
        update_s = sum(measured.update_s) / (sum(measured.weight_bytes) or 1)
        before_s = self._step_s(now.programs, now.cut, update_s)
        self._refine(programs, stage_cut, update_s)
        after_s = self._step_s(programs, stage_cut.cut, update_s)
        layers = layers_moved(_ranks(now.program, now.cut), _ranks(programs.full.plain, stage_cut.cut))
        size, cost_s = self._moving(layers)
        kept = verdict(before_s, after_s, noise=noise, cost_s=cost_s, steps_left=steps_left)
        outcome = Replanned(
            plan=self._plan(),
            kept=kept,
            layers=layers,
            moved_bytes=size,
            before_s=before_s,
            after_s=after_s,
            noise=noise,
            cost_s=cost_s,
        )
        if kept:
            return outcome
        moved = self._move(programs, stage_cut, states, len(running.host.grid.rows))
        return replace(outcome, plan=moved.plan, moved_bytes=moved.moved_bytes, cost_s=moved.cost_s)

    def _plan(self) -> Plan:
        return self._history.plan(self._spec.model)

    def _learn(self, measured: Costs, tolerance: float) -> None:
        """Correct the known costs of layers and devices with the measured times of the stages."""
        program = self._running.program
        devices = self._running.host.grid.devices
        stages = [
            MeasuredStage(
                layers=self._running.cut[part],
                device=devices[program.placement[stage]],
                **{time: getattr(measured, time)[stage] for time in TIMES},
            )
            for stage, part in enumerate(program.weights)
        ]
        self._cost_model.learn(stages, tolerance)

    def _refine(self, programs: ProgramFactory, stage_cut: StageCut, update_s: float) -> None:
        """Move the stage boundaries in ``stage_cut`` wherever that shortens the predicted step.

        Starts from the cut in ``stage_cut`` or from the running cut, whichever has the shorter predicted step.
        """
        pins = self._asked
        left = _EFFORT

        def step_s(cut: StageLayers) -> float:
            nonlocal left
            left -= len(programs.full.without_messages.columns)
            return self._step_s(programs, cut, update_s, self._limits)

        now = self._running.cut
        starts = [now] if pins.allows([pins.places[names[0]] for names in now]) else []
        seconds = [costs.forward_s + costs.backward_s for costs in self._cost_model.treated(programs).values()]
        best = min([*starts, stage_cut.cut], key=step_s)
        refined_cut = refined(best, pins, seconds, step_s, goes_on=lambda: left > 0)
        if refined_cut != stage_cut.cut:
            stage_cut.cut = refined_cut
            stage_cut.partition = None

    def _step_s(
        self, programs: ProgramFactory, cut: StageLayers, update_s: float, limits: tuple[int, ...] | None = None
    ) -> float:
        """Return the predicted step time of these stages in seconds; infinity if a rank would exceed its memory limit.

        Args:
            programs: the programs that run the stages.
            cut: the layers of each stage.
            update_s: the time of an update, in seconds per byte of weights.
            limits: the maximum number of bytes that each rank may hold. Default: None (no limit).

        """
        programs.connect(self._cost_model.layered.edges(cut), cut)
        costs = self._cost_model.stage_costs(programs, cut)
        costs = replace(costs, update_s=tuple(update_s * size for size in costs.weight_bytes))
        program = programs.full.without_messages
        needs = rank_memory(program, costs) if limits else ()
        if any(need.total_bytes > limit for need, limit in zip(needs, limits or (), strict=False)):
            return inf
        return simulate(program, costs).makespan_s * programs.num_microbatches / program.num_microbatches

    def _moving(self, layers: Mapping[str, tuple[int, int]]) -> tuple[int, float]:
        """Return the number of bytes to copy between devices, and the predicted duration of the whole move in seconds.

        ``layers`` holds the old and the new rank of each layer that moves.
        """
        graph = self._cost_model.layered.graph(self._cost_model.measured())
        places = self._places()
        devices = self._running.host.grid.all_devices
        sizes: dict[tuple[torch.device, torch.device], dict[str, int]] = {}
        for layer, ranks in layers.items():
            pair = devices[ranks[0]], devices[ranks[1]]
            if pair[0] != pair[1]:
                names = (*graph.nodes[layer]["parameters"], *graph.nodes[layer]["buffers"])
                sizes.setdefault(pair, {}).update({name: places[name].nbytes for name in names})
        total = {pair: sum(by_name.values()) for pair, by_name in sizes.items()}
        copying_s = sum(_copy_s(size, *pair) for pair, size in total.items())
        return sum(total.values()), self._running.assembly.made_s + copying_s

    # ---- applying a plan --------------------------------------------------------------------------------------------

    def _move(self, programs: ProgramFactory, stage_cut: StageCut, states: UserStates, num_replicas: int) -> Replanned:
        begin = time.perf_counter()
        ranks = _ranks(self._running.program, self._running.cut)
        places = self._places()
        sent = self._switch.switch(programs, stage_cut, states, num_replicas)
        cost_s = time.perf_counter() - begin
        self._cost_model.regroup(self._running.host.grid, self._spec.zero)
        now = self._places()
        size = sent + sum(place.nbytes for name, place in places.items() if place.device != now[name].device)
        layers = layers_moved(ranks, _ranks(self._running.program, self._running.cut))
        return Replanned(plan=self._plan(), layers=layers, moved_bytes=size, cost_s=cost_s)

    def _places(self) -> dict[str, _StatePlacement]:
        """Return, for each parameter and buffer, its device and the number of bytes to copy if the device changes."""
        optimizers = self._running.assembly.optimizers.values()
        states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
        places: dict[str, _StatePlacement] = {}
        for name, tensor in named_tensors(self._roots):
            held = [tensor]
            if isinstance(tensor, nn.Parameter):
                state = pytree.tree_leaves(states.get(tensor))
                held += [leaf for leaf in (*state, tensor.grad) if isinstance(leaf, Tensor)]
                held = [leaf for leaf in held if leaf.dim()]
            places[name] = _StatePlacement(tensor.device, sum(leaf.nbytes for leaf in held))
        return places


def _ranks(program: Program, cut: StageLayers) -> dict[str, int]:
    """Return the rank of each layer; for a bidirectional schedule, the rank that holds the layer's first copy."""
    return {name: program.placement[stage] for stage, names in enumerate(cut) for name in names}


def _copy_s(size: int, source: torch.device, target: torch.device) -> float:
    """Return the time of a copy between two devices in seconds, estimated from a measured copy of fixed size."""
    block = torch.empty(_COPIED, dtype=torch.uint8, device=source)
    for _ in range(2):  # the first copy is warm-up
        begin = time.perf_counter()
        block.to(target, copy=True)[-1].item()  # item() waits for the copy
        seconds = time.perf_counter() - begin
    return seconds * size / _COPIED
