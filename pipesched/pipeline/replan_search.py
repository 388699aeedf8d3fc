"""Replan search: finds a better plan for a running pipeline, based on the measured times of its last steps."""

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipesched.errors import DeviceCountError, MemoryLimitError, PartitionError, ScheduleError
from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.auto_plan import AutoPlan
from pipesched.pipeline.construction import binds_all_ranks, checked_programs
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.gathering import named_tensors
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.cost_correction import MeasuredStage
from pipesched.planning.evaluated_candidate import WORTH
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.refinement.boundary_refinement import refined
from pipesched.planning.replan_verdict import certain, layers_moved, strayed, verdict
from pipesched.program.program import Program
from pipesched.runtime.rank_grid import Rows
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import TIMES, LayerCosts
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Trace
from pipesched.tensors.payload import pytree

__all__ = ["FoundPlan", "PlanSearch", "ranks_of_layers", "state_places"]

_EFFORT = 200_000  # the search for better boundaries ends after this number of simulated actions
#: The search for another schedule ends after this number of simulated actions, and unasked after fewer: a search may
#: take a small share of the time between two searches.
_MOST_EFFORT, _LEAST_EFFORT = 300_000, 30_000
_ACTIONS_PER_S = 250_000
_SHARE = 0.02
_COPIED = 1 << 22  # the size in bytes of the test copy that measures the speed between two devices
_SENT_BYTES_PER_S = 5e8  # the speed of transfers between processes, until one has been measured


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The result of a search for a better plan."""

    #: The better plan; None if there is none.
    plan: Plan | None
    #: Why the running plan should be kept; empty if the better plan should replace it.
    kept: str
    #: The arrangement of the ranks for the better plan.
    rows: Rows
    #: The layers that would move: name -> (rank before, rank after).
    moves: Mapping[str, tuple[int, int]]
    #: The size in bytes of what would move.
    moved_bytes: int
    before_s: float
    after_s: float
    noise: float
    #: The predicted time of the move, in seconds.
    cost_s: float
    #: The corrected costs of the layers; None if they are those that all processes have.
    layers: dict[str, LayerCosts] | None
    #: The corrected factors by which devices are slower than the fastest.
    slow: dict[Hashable, float]


class _Candidate(NamedTuple):
    """A plan that might be better."""

    plan: Plan
    rows: Rows
    step_s: float


class _StatePlacement(NamedTuple):
    """The device of a parameter or buffer, and the total size of the tensor, its gradient and its optimizer state."""

    device: torch.device
    nbytes: int


class PlanSearch:
    """Finds a better plan. Rank 0 searches on behalf of all ranks.

    Args:
        running: the running plan.
        cost_model: the known costs of layers and devices. A search corrects them.
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        spec: the model and the user's options for its stages.
        asked: the boundaries that the user fixed.
        limits: the maximum number of bytes that each rank may hold, or None if there is no limit.
        auto_plan: searches among all schedules.
        request: the user's choices.

    """

    def __init__(
        self,
        *,
        running: RunningPlan,
        cost_model: CostModel,
        roots: Mapping[str, nn.Module],
        spec: AssemblySpec,
        asked: Pins,
        limits: tuple[int, ...] | None,
        auto_plan: AutoPlan,
        request: PlanRequest,
    ) -> None:
        self._running = running
        self._cost_model = cost_model
        self._roots = roots
        self._spec = spec
        self._asked = asked
        self._limits = limits
        self._auto_plan = auto_plan
        self._request = request
        self._has_searched = False

    def find(
        self,
        steps: Sequence[Trace],
        probed: Mapping[Hashable, float],
        steps_left: int | None,
        *,
        measure: bool = False,
        every: int | None = None,
    ) -> FoundPlan:
        """Search for a better plan.

        Args:
            steps: the traces of the last steps, with the actions of all ranks.
            probed: the slowness of processes that have measured the layers themselves.
            steps_left: the number of steps still to run; None if unknown.
            measure: whether to measure the layers again first. Default: False.
            every: the number of steps after which this method is called unasked. It then keeps the plan without a
                search if the ranks take the times that the last search expected. Default: None (the user asked).

        """
        running, cost_model = self._running, self._cost_model
        if measure:
            cost_model.forget()
        now = running.assembly
        noise = strayed(steps)
        expected = cost_model.stage_costs(now.programs, now.cut)
        measured = measured_costs(steps, now.program.num_stages, expected)
        update_s = sum(measured.update_s) / (sum(measured.weight_bytes) or 1)
        rows = running.host.grid.first_rows
        changed = _differs(measured, expected, certain(noise)) or self._have_changed(probed, certain(noise))
        if every is not None and self._has_searched and not changed:
            return self._unchanged(self._step_s(now.programs, now.cut, update_s, rows), noise)
        self._has_searched = True
        known = {**cost_model.slow, **probed}
        cost_model.slow = {
            place: own for place, own in known.items() if place not in probed or own > 1 + certain(noise)
        }
        self._learn(measured, certain(noise))
        before_s = self._step_s(now.programs, now.cut, update_s, rows)
        effort = _MOST_EFFORT if every is None else int(_SHARE * every * before_s * _ACTIONS_PER_S)
        others = self._other_schedules(update_s, min(_MOST_EFFORT, max(_LEAST_EFFORT, effort)))
        best = self._best([self._same_schedule(update_s), *others])
        after = ranks_of_layers(best.plan.program, best.plan.stages)
        moves = layers_moved(
            self._processes(ranks_of_layers(now.program, now.cut), rows), self._processes(after, best.rows)
        )
        size, cost_s = self._moving(moves)
        kept = verdict(before_s, best.step_s, noise=noise, cost_s=cost_s, steps_left=steps_left)
        return FoundPlan(
            plan=None if kept else best.plan,
            kept=kept,
            rows=best.rows,
            moves=moves,
            moved_bytes=size,
            before_s=before_s,
            after_s=best.step_s,
            noise=noise,
            cost_s=cost_s,
            layers=cost_model.measured(),
            slow=cost_model.slow,
        )

    def _have_changed(self, probed: Mapping[Hashable, float], tolerance: float) -> bool:
        """Return whether the slowness that a process has measured clearly differs from what is known."""
        known = {place: self._cost_model.slowness(place) for place in probed}
        return any(abs(own - known[place]) > tolerance * known[place] for place, own in probed.items())

    def _unchanged(self, step_s: float, noise: float) -> FoundPlan:
        """Return that the running plan is kept, because the ranks take the expected times."""
        return FoundPlan(
            plan=None,
            kept="the times of the ranks have not changed since the last search",
            rows=self._running.host.grid.first_rows,
            moves={},
            moved_bytes=0,
            before_s=step_s,
            after_s=step_s,
            noise=noise,
            cost_s=0.0,
            layers=None,
            slow=self._cost_model.slow,
        )

    def _learn(self, measured: Costs, tolerance: float) -> None:
        """Correct the known costs of layers and devices with the measured times of the stages."""
        program = self._running.program
        places = self._cost_model.places
        stages = [
            MeasuredStage(
                layers=self._running.cut[part],
                device=places[program.placement[stage]],
                **{time: getattr(measured, time)[stage] for time in TIMES},
            )
            for stage, part in enumerate(program.weights)
        ]
        self._cost_model.learn(stages, tolerance)

    def _same_schedule(self, update_s: float) -> _Candidate:
        """Return the running plan with the best cut."""
        rows = self._running.host.grid.first_rows
        programs = checked_programs(self._running.assembly.programs.request, self._running.host.grid, self._spec)
        cut, _ = self._cost_model.partitioner(self._asked, programs).partition()
        cut = self._refined(programs, cut, update_s)
        return _Candidate(_plan(programs, cut), rows, self._step_s(programs, cut, update_s, rows))

    def _other_schedules(self, update_s: float, effort: int) -> Iterator[_Candidate]:
        """Yield the best plan of a search among all schedules that the user allows, for each arrangement to try."""
        grid = self._running.host.grid
        num_microbatches = self._running.assembly.programs.num_microbatches
        request = replace(self._request, num_microbatches=num_microbatches)
        auto_plan = replace(self._auto_plan, devices=grid.all_devices, replicas=self._cost_model.replicas)
        for rows in self._arrangements():
            places = self._cost_model.places_of(grid.arranged(rows))
            slow = [self._cost_model.slow.get(place, 1.0) for place in places]
            speeds = {rank: 1 / own for rank, own in enumerate(slow) if own != 1}
            try:
                plan = auto_plan.again(
                    request,
                    self._cost_model.measured(),
                    self._cost_model.planned.rows,
                    speeds=speeds,
                    effort=effort,
                    all_ranks=binds_all_ranks(self._spec, grid),
                )
                programs = checked_programs(PlanRequest().pinned(plan, list(self._spec.layers)), grid, self._spec)
            except (PartitionError, MemoryLimitError, ScheduleError, DeviceCountError):
                continue  # such as a schedule that a search does not cover
            yield _Candidate(plan, rows, self._step_s(programs, plan.stages, update_s, rows))

    def _arrangements(self) -> list[Rows]:
        """Return the arrangements of ranks to try: the running one and, if ranks are slow, one where these come last.

        A plan leaves out the last ranks if it uses fewer than all.
        """
        grid = self._running.host.grid
        slow = self._cost_model.slow
        alike = self._limits is None or len({*self._limits}) == 1
        if grid.in_one_process or len(grid.rows) > 1 or not slow or self._cost_model.links is not None or not alike:
            return [grid.first_rows]
        ranks = tuple(sorted(grid.first_rows[0], key=lambda rank: slow.get(rank, 1.0)))
        return [grid.first_rows] if ranks == grid.first_rows[0] else [grid.first_rows, (ranks,)]

    def _best(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """Return the fastest candidate. A candidate must be clearly faster than those before it to be preferred."""
        best = candidates[0]
        for candidate in candidates[1:]:
            if candidate.step_s < best.step_s * (1 - WORTH):
                best = candidate
        return best

    def _refined(self, programs: ProgramFactory, cut: StageLayers, update_s: float) -> StageLayers:
        """Move the stage boundaries wherever that shortens the predicted step, and return the stages.

        Starts from ``cut`` or from the running cut, whichever has the shorter predicted step.
        """
        pins = self._asked
        rows = self._running.host.grid.first_rows
        left = _EFFORT

        def step_s(cut: StageLayers) -> float:
            nonlocal left
            left -= len(programs.full.without_messages.columns)
            return self._step_s(programs, cut, update_s, rows, limited=True)

        now = self._running.cut
        starts = [now] if pins.allows([pins.places[names[0]] for names in now]) else []
        seconds = [costs.forward_s + costs.backward_s for costs in self._cost_model.treated(programs).values()]
        best = min([*starts, cut], key=step_s)
        return refined(best, pins, seconds, step_s, goes_on=lambda: left > 0)

    def _step_s(
        self, programs: ProgramFactory, cut: StageLayers, update_s: float, rows: Rows, *, limited: bool = False
    ) -> float:
        """Return the predicted step time of these stages in seconds; infinity if a rank would exceed its memory limit.

        Args:
            programs: the programs that run the stages.
            cut: the layers of each stage.
            update_s: the time of an update, in seconds per byte of weights.
            rows: the arrangement of the ranks.
            limited: whether the memory limits apply. Default: False.

        """
        limits = self._limits if limited else None
        places = self._cost_model.places_of(self._running.host.grid.arranged(rows))
        programs.connect(self._cost_model.layered.edges(cut), cut)
        costs = self._cost_model.stage_costs(programs, cut, places=places)
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
        grid = self._running.host.grid
        held = state_places(self._running, self._roots)
        tensors = {name: tensor.nbytes for name, tensor in named_tensors(self._roots)}
        names = {name: [*graph.nodes[name]["parameters"], *graph.nodes[name]["buffers"]] for name in layers}
        if not grid.in_one_process:
            own = self._running.assembly.held_parameters()
            here = {id(parameter) for parameter in own}
            own_bytes = sum(parameter.nbytes for parameter in own) or 1
            parameters = {name: id(tensor) for name, tensor in named_tensors(self._roots)}
            with_states = sum(place.nbytes for name, place in held.items() if parameters[name] in here)
            size = sum(tensors[name] for layer in names.values() for name in layer) * with_states // own_bytes
            return size, self._running.assembly.made_s + size / _SENT_BYTES_PER_S
        devices = grid.all_devices
        sizes: dict[tuple[torch.device, torch.device], dict[str, int]] = {}
        for layer, ranks in layers.items():
            pair = devices[ranks[0]], devices[ranks[1]]
            if pair[0] != pair[1]:
                sizes.setdefault(pair, {}).update({name: held[name].nbytes for name in names[layer]})
        total = {pair: sum(by_name.values()) for pair, by_name in sizes.items()}
        copying_s = sum(_copy_s(size, *pair) for pair, size in total.items())
        return sum(total.values()), self._running.assembly.made_s + copying_s

    def _processes(self, ranks: Mapping[str, int], rows: Rows) -> dict[str, int]:
        """Return the process of each layer's rank, in the first replica."""
        return {layer: rows[0][rank] for layer, rank in ranks.items()}


def state_places(running: RunningPlan, roots: Mapping[str, nn.Module]) -> dict[str, _StatePlacement]:
    """Return, for each parameter and buffer, its device and the number of bytes to copy if the device changes."""
    optimizers = running.assembly.optimizers.values()
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    places: dict[str, _StatePlacement] = {}
    for name, tensor in named_tensors(roots):
        held = [tensor]
        if isinstance(tensor, nn.Parameter):
            state = pytree.tree_leaves(states.get(tensor))
            held += [leaf for leaf in (*state, tensor.grad) if isinstance(leaf, Tensor)]
            held = [leaf for leaf in held if leaf.dim()]
        places[name] = _StatePlacement(tensor.device, sum(leaf.nbytes for leaf in held))
    return places


def ranks_of_layers(program: Program, cut: StageLayers) -> dict[str, int]:
    """Return the rank of each layer; for a bidirectional schedule, the rank that holds the layer's first copy."""
    return {name: program.placement[stage] for stage, names in enumerate(cut) for name in names}


def _differs(measured: Costs, expected: Costs, tolerance: float) -> bool:
    """Return whether the work of a stage takes clearly more or less time than expected."""
    pairs = zip(_work_s(measured), _work_s(expected), strict=True)
    return any(abs(own - due) > tolerance * due for own, due in pairs)


def _work_s(costs: Costs) -> list[float]:
    """Return the time of each stage's work on a micro-batch."""
    return [sum(times) for times in zip(*(getattr(costs, time) for time in TIMES), strict=True)]


def _plan(programs: ProgramFactory, cut: StageLayers) -> Plan:
    program = programs.full.plain
    return Plan(
        stages=cut,
        schedule=program.name,
        program=program,
        checkpoint=programs.checkpoint,
        options=programs.options,
        completion=programs.completion,
    )


def _copy_s(size: int, source: torch.device, target: torch.device) -> float:
    """Return the time of a copy between two devices in seconds, estimated from a measured copy of fixed size."""
    block = torch.empty(_COPIED, dtype=torch.uint8, device=source)
    for _ in range(2):  # the first copy is warm-up
        begin = time.perf_counter()
        block.to(target, copy=True)[-1].item()  # item() waits for the copy
        seconds = time.perf_counter() - begin
    return seconds * size / _COPIED
