"""Replan: a pipeline that is given one plan after another, and goes on as if it had always had the last one."""

import time
from collections.abc import Hashable, Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.assembly import Assembly, AssemblySpec, StageCut
from pipesched.pipeline.observation import Observed
from pipesched.planning.boundary_refinement import refined
from pipesched.planning.cost_correction import Known, StageTimes
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.replan_verdict import Replanned, certain, check_steps_left, layers_moved, strayed, verdict
from pipesched.program.checkpoint_options import offloading
from pipesched.program.program import Program
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_host import ThreadRanks
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import TIMES
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.simulator import simulate
from pipesched.tensors.payload import pytree
from pipesched.user_warning import warn

__all__ = ["Planned"]

_FEWEST = 3  # steps
_EFFORT = 200_000  # actions that are simulated to find where cuts are best
_COPIED = 1 << 22  # bytes, to learn how fast they go to another device


class _Place(NamedTuple):
    """Of a parameter or a buffer: its device, and its bytes with those of what goes with it."""

    device: torch.device
    nbytes: int


class Planned(Observed):
    """What was decided, and may be decided anew between two steps."""

    _spec: AssemblySpec
    _splitter: Splitter
    _asked: Pins
    _kinds: dict[str, Hashable] | None

    def replan(self, plan: Plan | None = None, *, steps_left: int | None = None, measure: bool = False) -> Replanned:
        """Go on with another plan: that which is given, or a better one, if there is one.

        Without a plan the medians of the last steps say what layers cost now, and layers are cut anew, for the same
        schedule; ``boundaries=`` and ``together=`` that leave some of the cut open hold, and so does
        ``memory_limit_bytes=``. The better cut is taken where
        the step that is predicted of it is shorter by more than 3 % and twice the noise, and, over ``steps_left`` steps
        if they are known, by more than moving costs. A rank that takes longer than others for equal layers gets fewer.
        Where no layer times are known yet layers are measured first, with the sample; with ``measure`` they are anew,
        which tells apart layers of one stage that have come to differ. Print what is returned: it says why.

        Weights, buffers, gradients and the states of optimizers go with their layers, random numbers and the count of
        steps go on: with as many micro-batches the result is, to the bit, that of a run that had this plan from its
        first step. Parameters stay the same objects, and so does the optimizer of each stage that there still is: a
        learning rate scheduler goes on, and a stage that is new needs one of its own. An optimizer of your own keeps
        its state where it is: with several kinds of devices move it too.
        Flushes first. A plan that cannot be applied raises what making a pipeline raises, and the old one runs on.
        Raises InputError over a mesh, and where ``wrap=`` has changed the stages.
        """
        check_steps_left(steps_left)
        site = self._replannable()
        site.executor.check_open("replan")
        site.executor.check_outside("replan")
        self._settle()
        if plan is None:
            return self._better(site, steps_left, measure)
        wishes = PlanRequest().pinned(plan, list(self._layers))
        programs = self._programs(site, wishes)
        pins = Pins(list(self._layers), wishes.boundaries)
        return self._moved(site, programs, self._divided(pins, programs, plan))

    def _better(self, site: ThreadRanks, steps_left: int | None, measure: bool) -> Replanned:
        steps = [self._trace_of([run], ()) for run in self._runs]
        steps = steps[1:] if len(steps) > _FEWEST else steps  # the first one under a plan warms up
        if len(steps) < _FEWEST:
            return Replanned(self.plan, f"{_FEWEST} steps of a plan tell what it takes; {len(steps)} were measured")
        if measure:
            self._profile = self._kinds = None
        noise, now = strayed(steps), self._assembly
        measured = measured_costs(steps, now.program.num_stages, self._profiled_costs())
        self._learn(measured, certain(noise))
        programs = self._programs(site, now.programs.wishes)
        division = self._divided(self._asked, programs, None)
        update_s = sum(measured.update_s) / (sum(measured.weight_bytes) or 1)
        before_s = self._step_s(now.programs, now.cut, update_s)
        self._refine(programs, division, update_s)
        after_s = self._step_s(programs, division.cut, update_s)
        there = self._ranks(programs.plain(programs.num_microbatches), division.cut)
        layers = layers_moved(self._ranks(now.program, now.cut), there)
        size, cost_s = self._moving(site, layers)
        kept = verdict(before_s, after_s, noise=noise, cost_s=cost_s, steps_left=steps_left)
        found = Replanned(self.plan, kept, layers, size, before_s, after_s, noise, cost_s)
        if kept:
            return found
        moved = self._moved(site, programs, division)
        return replace(found, plan=moved.plan, moved_bytes=moved.moved_bytes, cost_s=moved.cost_s)

    def _learn(self, measured: Costs, tolerance: float) -> None:
        """Layers cost what stages took, as far as that tells."""
        program, profile = self._assembly.program, self._profiled()
        stages = [
            StageTimes(
                self._assembly.cut[part],
                self._host.devices[program.placement[stage]],
                *(getattr(measured, time)[stage] for time in TIMES),
            )
            for stage, part in enumerate(program.weights)
        ]
        if self._kinds is None:
            self._kinds = dict(profile)
        known = Known(profile, self._kinds, self._slow).corrected(stages, tolerance)
        self._profile, self._slow, self._overheads = dict(known.layers), dict(known.slow), None  # a part of these

    def _refine(self, programs: ProgramFactory, division: StageCut, update_s: float) -> None:
        """Move the division's cuts, or those of now where they are better, wherever that shortens the step."""
        pins, left = self._asked, _EFFORT

        def step_s(cut: StageLayers) -> float:
            nonlocal left
            left -= len(programs.timed(programs.num_microbatches).columns)
            return self._step_s(programs, cut, update_s, self._limits)

        now = self._assembly.cut
        starts = [now] if pins.allows([pins.places[names[0]] for names in now]) else []
        seconds = [costs.forward_s + costs.backward_s for costs in self._treated(programs).values()]
        best = min([*starts, division.cut], key=step_s)
        found = refined(best, pins, seconds, step_s, goes_on=lambda: left > 0)
        if found != division.cut:
            division.cut, division.partition = found, None

    def _step_s(
        self, programs: ProgramFactory, cut: StageLayers, update_s: float, limits: tuple[int, ...] | None = None
    ) -> float:
        """The predicted step of programs whose stages have these layers; endless where a rank would need more memory
        than its limit. update_s: for a byte of weights.
        """
        programs.connect(self._layered.edges(cut), offloading(programs.checkpoint, cut))
        costs = self._predicted_costs(programs, cut)
        costs = replace(costs, update_s=tuple(update_s * size for size in costs.weight_bytes))
        timed = programs.timed(programs.num_microbatches)
        held = rank_memory(timed, costs) if limits else ()
        if any(own.total_bytes > limit for own, limit in zip(held, limits or (), strict=False)):
            return inf
        return simulate(timed, costs).makespan_s * programs.num_microbatches / timed.num_microbatches

    def _moving(self, site: ThreadRanks, layers: Mapping[str, tuple[int, int]]) -> tuple[int, float]:
        """The bytes that go to another device where layers go to other ranks, and the seconds that all of it takes."""
        graph, places = self._layered.graph(self._profiled()), self._places()
        sizes: dict[tuple[torch.device, torch.device], dict[str, int]] = {}
        for layer, ranks in layers.items():
            way = site.all_devices[ranks[0]], site.all_devices[ranks[1]]
            if way[0] != way[1]:
                names = (*graph.nodes[layer]["parameters"], *graph.nodes[layer]["buffers"])
                sizes.setdefault(way, {}).update({name: places[name].nbytes for name in names})
        total = {way: sum(own.values()) for way, own in sizes.items()}
        return sum(total.values()), self._assembly.made_s + sum(_copy_s(size, *way) for way, size in total.items())

    # ---- applying a plan --------------------------------------------------------------------------------------------

    def _programs(self, site: ThreadRanks, wishes: PlanRequest) -> ProgramFactory:
        programs = ProgramFactory(wishes, len(site.all_devices), updates=self._spec.optimizer is not None)
        programs.check_updates()
        programs.training(programs.num_microbatches)
        self._layered.check(programs.plain(programs.num_microbatches))
        return programs

    def _moved(self, site: ThreadRanks, programs: ProgramFactory, division: StageCut) -> Replanned:
        begin = time.perf_counter()
        ranks, places = self._ranks(self._assembly.program, self._assembly.cut), self._places()
        self._apply(site, programs, division)
        cost_s = time.perf_counter() - begin
        now = self._places()
        size = sum(place.nbytes for name, place in places.items() if place.device != now[name].device)
        layers = layers_moved(ranks, self._ranks(self._assembly.program, self._assembly.cut))
        return Replanned(self.plan, layers=layers, moved_bytes=size, cost_s=cost_s)

    def _ranks(self, program: Program, cut: StageLayers) -> dict[str, int]:
        """Where each layer runs; of several chains the first."""
        return {name: program.placement[stage] for stage, names in enumerate(cut) for name in names}

    def _places(self) -> dict[str, "_Place"]:
        """Where each parameter and buffer lies, and what lies with it."""
        states = {p: state for made in self._assembly.optimizers.values() for p, state in made.state.items()}
        places = {name: _Place(buffer.device, buffer.nbytes) for name, buffer in self.named_buffers()}
        for name, parameter in self.named_parameters():
            beside = [leaf for leaf in pytree.tree_leaves(states.get(parameter)) if isinstance(leaf, Tensor)]
            held = [parameter, *beside, *([] if parameter.grad is None else [parameter.grad])]
            places[name] = _Place(parameter.device, sum(tensor.nbytes for tensor in held if tensor.dim()))
        return places

    def _apply(self, site: ThreadRanks, programs: ProgramFactory, division: StageCut) -> None:
        """Raises what making a pipeline raises; the old plan then runs on."""
        splitter = replace(self._splitter, num_microbatches=programs.num_microbatches, fixed=programs.fixed)
        other = site.use(programs.num_ranks)
        try:
            other.start()
            now = Assembly(self._spec, other, programs, division, self._assembly.optimizers)
        except BaseException:
            other.close()
            self._assembly.put_back()
            raise
        now.take_over()
        site.close()
        self._host, self._assembly, self._splitter, self._stream = other, now, splitter, None
        self._runs.clear()
        if now.undriven:
            warn(
                f"a scheduler drives the optimizers that it was made with; those of stages {now.undriven} are new, "
                f"with the settings of now; make schedulers for them too, of pipe.optimizers"
            )

    def _replannable(self) -> ThreadRanks:
        if not isinstance(self._host, ThreadRanks):
            raise InputError(
                f"replan moves layers within one process; this pipeline runs over a mesh of {len(self.devices)} ranks; "
                f"save its state, and make a new pipeline with plan="
            )
        if self._spec.wrap is not None:
            raise InputError(
                f"wrap= has changed each stage as a whole, and a layer does not leave it; this pipeline of "
                f"{self.num_stages} stages has wrap=; save its state, and make a new pipeline with plan="
            )
        return self._host


def _copy_s(size: int, one: torch.device, other: torch.device) -> float:
    """The seconds in which so many bytes go from one device to another, by a copy that is measured."""
    some = torch.empty(_COPIED, dtype=torch.uint8, device=one)
    for _ in range(2):  # the first warms up
        begin = time.perf_counter()
        some.to(other, copy=True)[-1].item()  # which waits for it
        seconds = time.perf_counter() - begin
    return seconds * size / _COPIED
