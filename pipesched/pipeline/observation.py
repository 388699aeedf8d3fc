"""Observation: what a pipeline shows of itself: what was decided, traces, predictions, and the profile behind them."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import proxy

import networkx as nx
import torch
from torch import nn

from pipesched.capture.captured_model import CapturedModel, Cut
from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import MemoryLimitError
from pipesched.model.state_guard import set_aside
from pipesched.pipeline.assembly import Assembly, AssemblySpec, StageCut
from pipesched.pipeline.module_interface import ModuleInterface
from pipesched.planning.cost_correction import slowed
from pipesched.planning.plan import Plan, Tie
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.report import Report
from pipesched.planning.stage_cutter import Cutter, Pins
from pipesched.profiling.layer_profiler import QUICK
from pipesched.profiling.layered_costs import measure
from pipesched.profiling.loss_costs import with_supposed_loss
from pipesched.profiling.optimizer_memory import another, upkeep_of
from pipesched.profiling.stage_memory_probe import StageSizes, costs_with, messages_of, stage_sizes
from pipesched.program.checkpoint_options import Checkpoint, checkpoint_in_words, offloading
from pipesched.program.program import Program
from pipesched.runtime.async_steps import Stream
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.rank_host import MeshRanks, RankHost, ThreadRanks
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.bounds import program_bound
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import LayerCosts, costs_of, stage_costs, treated
from pipesched.simulation.layer_memory import SCALARS_BYTES
from pipesched.simulation.links import Links
from pipesched.simulation.memory import AHEAD, RankMemory, rank_memory
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.profile import Profile
from pipesched.simulation.simulator import simulate
from pipesched.simulation.tied_weight_costs import tied_bytes
from pipesched.simulation.trace import Spans, Trace
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.units import counted, quote_bytes
from pipesched.user_warning import warn

__all__ = ["Observed"]

_LOSS_BYTES = 8  # of a micro-batch


class Observed(ModuleInterface):
    """A wrapped model with programs that run on a site: its plan, and their times."""

    _layers: dict[str, nn.Module]
    _layered: LayeredModel
    _threads: int
    _spec: AssemblySpec
    _host: RankHost
    _assembly: Assembly
    _stream: Stream | None = None
    _runs: deque[Timeline]
    _profile: dict[str, LayerCosts] | None
    _slow: dict[Hashable, float]
    _links: Links | None
    _limits: tuple[int, ...] | None
    _planned_rows: int
    _step: int
    _overheads: Overheads | None

    def _settle(self) -> None:
        """Wait until nothing is under way."""

    # ---- what was decided -------------------------------------------------------------------------------------

    def _divided(self, pins: Pins, programs: ProgramFactory, plan: Plan | None) -> StageCut:
        """Rank 0 cuts, for all."""
        own: Observed = proxy(self)  # a pipeline that nobody holds ends at once: what it keeps does not hold it
        program = programs.plain(programs.num_microbatches)
        speeds = {rank: 1 / slow for rank in program.placement if (slow := self._slowness(rank)) != 1}

        def graph() -> "nx.DiGraph[str]":
            return own._layered.graph(own._treated(programs))

        cutter = Cutter(pins, program, graph, programs.checkpoint, self._links, speeds=speeds)
        cut, found = self._host.agreed(cutter.cut)
        self._host.learn(self._layered, cut)
        return (
            StageCut(cut, cutter, found) if plan is None else StageCut(cut, cutter, plan.partition, plan.alternatives)
        )

    @property
    def plan(self) -> Plan:
        """The plan that runs, with the costs known so far."""
        program, division, programs = self._assembly.program, self._assembly.division, self._assembly.programs
        if division.partition is None and self._profile is not None:
            division.partition = division.cutter.of(division.cut)
        return Plan(
            division.cut,
            program.name,
            program,
            programs.checkpoint,
            self._costs,
            programs.options,
            division.partition,
            self._tied(),
            division.alternatives,
        )

    def _tied(self) -> tuple[Tie, ...]:
        """The weights that several calls use, those of the same stages together."""
        count = len(self._assembly.cut)
        uses = [(name, use.rank) for use in self._layered.uses(self._assembly.cut, range(count)) for name in use.names]
        stages: dict[str, list[int]] = {}
        for name, stage in uses:
            stages.setdefault(name, []).append(stage)
        where: list[Any] = list(self._assembly.program.placement)
        if isinstance(self._host, ThreadRanks):  # uses on one device share its memory
            where = [self._host.devices[rank] for rank in where]
        sizes = {name: parameter.nbytes for name, parameter in self.model.named_parameters()}
        ties: dict[tuple[int, ...], list[str]] = {}
        for name, own in stages.items():
            if len(own) > 1:
                ties.setdefault(tuple(own), []).append(name)
        return tuple(
            Tie(
                tuple(names),
                own,
                tied_bytes(sum(sizes.get(name, 0) for name in names), [where[stage] for stage in own]),
            )
            for own, names in ties.items()
        )

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank; under a mesh this process's own, for all."""
        return self._host.devices

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into; with several chains of them the stages of one."""
        return len(self._assembly.cut)

    @property
    def checkpoint(self) -> Checkpoint:
        """What becomes of what forwards save: a mode for all stages, or a word by layer."""
        return self._assembly.programs.checkpoint

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage but stage 0."""
        return [names[0] for names in self._assembly.cut[1:]]

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The layers of each stage; the layers themselves, not copies."""
        return [nn.Sequential(*(self._layers[name] for name in names)) for names in self._assembly.cut]

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches a full batch is cut into."""
        return self._assembly.programs.num_microbatches

    # ---- what was measured ------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace | None:
        """The last step, measured; None before the first. On a GPU this waits for the step to end.

        Of an asynchronous schedule: what all ranks have run since the last flush, or up to it; the last six steps of
        it where there are more, which then count as in flight only what begins with them. Under a mesh: this rank's
        part; ``gather_trace`` has all.
        """
        if self._stream is not None:
            return self._trace_of(self._stream.timelines, self._stream.versions)
        return self._read(self._runs[-1]) if self._runs else None

    @property
    def predicted(self) -> Trace:
        """The step, simulated: from what actions took in the steps before the last one, else from layer times.

        Of an asynchronous schedule: as many steps as show how it goes on, and a flush.
        """
        return simulate(self._assembly.programs.timed(self.num_microbatches), self._costs or self._expected_costs())

    @property
    def predicted_memory(self) -> tuple[RankMemory, ...]:
        """What each rank holds at once in a step, at most, by what it is for. Of an asynchronous schedule: in so many
        steps as show how it goes on.
        """
        program, costs = self._assembly.program, self._with_upkeep(self._profiled_costs())
        messages, stages = None, self._stage_sizes()
        if stages:
            loss = None if self.loss_fn is None else self._profiled()[self._assembly.cut[-1][-1]].loss_layer
            costs, messages = costs_with(costs, program, stages, loss), messages_of(program, stages)
        timed = self._assembly.programs.timed(self.num_microbatches)
        costs = _with_losses(costs, timed, known=not stages or self.loss_fn is not None)
        return rank_memory(timed, costs, posted=self._posted, messages=messages)

    def _stage_sizes(self) -> Sequence[StageSizes]:
        """What the stages of a captured model need, each run in one piece; none where that cannot be."""
        layered, now, whole = self._layered, self._assembly, self._spec
        if not isinstance(layered, CapturedModel) or whole.wrap is not None or lacks_contents(layered.model):
            return ()
        if now.sizes is None:
            self._settle()
            devices = [self._host.devices[now.program.placement[part]] for part in range(now.program.num_weights)]
            with self._guard.lifted(), set_aside(self.model):
                now.sizes = stage_sizes(layered, now.cut, devices, self._host, now.keep, own_loss=whole.loss_fn is None)
        return now.sizes

    @property
    def _posted(self) -> int:
        return 0 if isinstance(self._host, ThreadRanks) else AHEAD

    def _check_room(self, rows: Sequence[int]) -> None:
        """Raise MemoryLimitError for micro-batches of more rows than were planned for, with which a rank would hold
        more than its limit. What was measured is taken in proportion to rows. Warns in the first step of other sizes.
        """
        if self._step == 0 and self._planned_rows not in (0, max(rows)) and self._host.holds(0):
            warn(
                f"the plan was found for micro-batches of {counted(self._planned_rows, 'row')}, by the sample or "
                f"batch_size; those of the first step have {counted(max(rows), 'row')}: {sum(rows)} rows in "
                f"{counted(len(rows), 'micro-batch')}; pass batch_size={sum(rows)} to Pipeline"
            )
        limits = self._limits
        if limits is None or max(rows) <= max(self._planned_rows, self._assembly.most_rows):
            return
        known = Profile({self._planned_rows: self._layered.graph(self._profiled())}).graph(max(rows))
        larger = {name: costs_of(known, name) for name in known}
        costs = self._with_upkeep(self._predicted_costs(self._assembly.programs, self._assembly.cut, larger))
        needs = rank_memory(self._assembly.programs.timed(len(rows)), costs, posted=self._posted)
        worst = max(range(len(needs)), key=lambda rank: needs[rank].total_bytes - limits[rank])
        need, limit = needs[worst].total_bytes, limits[worst]
        if need > limit:
            most = self._planned_rows * self.num_microbatches
            raise MemoryLimitError(
                f"memory_limit_bytes holds for the batch that was planned, of {most} rows in {self.num_microbatches} "
                f"micro-batches of {self._planned_rows}; this step has {sum(rows)} rows in {len(rows)}, of up to "
                f"{max(rows)}, with which rank {worst} needs {quote_bytes(need)}, {quote_bytes(need - limit)} more "
                f"than its {quote_bytes(limit)}; pass at most {most} rows, or make the pipeline with "
                f"batch_size={sum(rows)}"
            )
        self._assembly.most_rows = max(rows)

    def _with_upkeep(self, costs: Costs) -> Costs:
        """With what the stages' optimizers hold and need, on all ranks as those of this one."""
        known = next(iter(self._assembly.optimizers.values()), None)
        if known is None:
            return costs
        layers = [body.layers.values() for body in self._assembly.bodies]
        stages = [[p for layer in layers[part] for p in layer.parameters()] for part in self._assembly.program.weights]
        found = [upkeep_of(another(known), list(dict.fromkeys(parameters))) for parameters in stages]
        return replace(
            costs,
            optimizer_bytes=tuple(own.state_bytes for own in found),
            update_transient_bytes=tuple(own.transient_bytes for own in found),
        )

    def _read(self, run: Timeline) -> Trace:
        trace = self._trace_of([run], ())
        if self._assembly.programs.streams or not isinstance(self._host, ThreadRanks):
            return trace  # a part: of a stream, without a beginning from which versions could be told, or of the ranks
        return self._bounded(trace)

    def gather_trace(self) -> Trace | None:
        """As ``trace``, of all ranks on one clock; None before the first step. Collective under a mesh."""
        if not isinstance(self._host, MeshRanks) or not self._runs:
            return self.trace
        if self._stream is not None:
            spans = self._host.gather(self._stream.timelines)
            return replace(self._trace_of([], self._stream.versions), spans=Spans.of(tuple(spans)))
        spans = self._host.gather([self._runs[-1]])
        return self._bounded(replace(self._trace_of([], ()), spans=Spans.of(tuple(spans))))

    def report(self) -> Report:
        """The plan explained, and the last step beside what was predicted of it. Collective under a mesh.

        ``print`` shows it, ``save("report.html")`` writes a page, other endings a picture or text.
        """
        return Report(self.plan, self.gather_trace(), self.predicted, (*self._came_about(), *self._unused))

    def _came_about(self) -> Iterator[str]:
        """How the prediction and the measured step came about."""
        if self._runs and not self._assembly.programs.streams:
            first, earlier = "the first step, which also allocates memory and warms up", len(self._earlier)
            taken = f"actions took in {counted(earlier, 'earlier step') if len(self._runs) > 2 else first}"
            yield f"predicted from what {taken if earlier else 'layers took when they were measured'}"
            if len(self._runs) == 1:
                yield f"measured is {first}; run more before you compare"

    @property
    def _unused(self) -> list[str]:
        """Devices that the plan leaves out."""
        every, used = self._host.all_devices, len(self._host.devices)
        if used == len(every):
            return []
        names = ", ".join(map(str, every[used:]))
        return [f"{counted(len(every) - used, 'device')} of {len(every)} not used, as the plan has {used}: {names}"]

    def _bounded(self, trace: Trace) -> Trace:
        program = self._assembly.programs.plain(trace.num_microbatches)
        bound_s = program_bound(program, measured_costs([trace], program.num_stages, trace.costs))
        return replace(trace, versions=program.versions, bound_s=bound_s)

    def _trace_of(self, runs: Iterable[Timeline], versions: tuple[tuple[int, ...], ...]) -> Trace:
        name = f"{self._assembly.program.name}, measured"
        sizes = self._profiled_costs() if self._profile is not None else None
        spans = tuple(span for run in runs for span in run.spans())
        return Trace(spans, len(self._host.devices), name, sizes, versions)

    @property
    def _costs(self) -> Costs | None:
        """The medians of earlier steps, with the profile's sizes; without earlier steps the profile's own figures, with
        what ranks take beside: of what was measured of ranks it is a part.
        """
        profiled = self._expected_costs() if self._profile is not None else None
        earlier = [self._trace_of([run], ()) for run in self._earlier]
        sizes = profiled and replace(profiled, overheads=None)
        return measured_costs(earlier, len(self._assembly.stages), sizes) if earlier else profiled

    @property
    def _earlier(self) -> list[Timeline]:
        """The steps before the last one whose times serve a prediction: without the first, which warms up, where there
        are others. Under a mesh none: this rank has not seen what the others took.
        """
        earlier = list(self._runs)[:-1] if isinstance(self._host, ThreadRanks) else []
        return earlier[1:] if len(earlier) > 1 else earlier

    def _expected_costs(self) -> Costs:
        return replace(self._profiled_costs(), overheads=self._overheads)

    def _profiled_costs(self) -> Costs:
        return self._predicted_costs(self._assembly.programs, self._assembly.cut)

    def _predicted_costs(
        self, programs: ProgramFactory, cut: Cut, layers: Mapping[str, LayerCosts] | None = None
    ) -> Costs:
        """What stages of these layers cost, by layer times, on devices of which some are known to be slow. layers: what
        they cost, as measured unless given.
        """
        profile = treated(self._profiled() if layers is None else layers, programs.checkpoint)
        program = programs.plain(programs.num_microbatches)
        stages = [[profile[name] for name in cut[part]] for part in program.weights]
        going = offloading(programs.checkpoint, cut)
        costs = stage_costs(stages, len(cut), host_bytes_per_s=self._host_bytes_per_s if going else None)
        return replace(slowed(costs, [self._slowness(rank) for rank in program.placement]), links=self._links)

    @cached_property
    def _host_bytes_per_s(self) -> float | None:
        return host_bytes_per_s(self._host.devices[0])

    def _slowness(self, rank: int) -> float:
        """How many times as long as others a rank's device takes, as far as steps have told."""
        return self._slow.get(self._host.all_devices[rank], 1.0) if self._slow else 1.0

    def _treated(self, programs: ProgramFactory) -> dict[str, LayerCosts]:
        """What layers cost as the programs treat what they save."""
        return treated(self._profiled(), programs.checkpoint)

    def _profiled(self, *, crowds: bool = False) -> dict[str, LayerCosts]:
        """What layers cost. crowds: also beside another rank's in this process, where they are measured now."""
        if self._profile is None:
            effort = replace(QUICK, crowds=crowds and not lacks_contents(self.model))
            self._settle()  # the layers are called from this thread
            with self._guard.lifted(), set_aside(self.model, self.loss_fn):
                profile = measure(self._layered, self._host.devices[0], self._threads, effort)
                if self.loss_fn is not None and not lacks_contents(self.model):
                    (last, costs), where = profile.popitem(), self._host.devices[0]
                    costs = with_supposed_loss(costs, self.loss_fn, self._layered.output(), where, self._threads)
                    profile[last] = costs
            self._profile = profile
        return self._profile

    def __repr__(self) -> str:
        program = self._assembly.program
        stages = "\n".join(
            f"  stage {index} on rank {program.placement[index]} ({stage.device}): {', '.join(stage.layers) or 'empty'}"
            + (f" (a copy of stage {program.weights[index]})" if index != program.weights[index] else "")
            for index, stage in self._assembly.stages.items()
        )
        return (
            f"Pipeline({program.name}, {counted(program.num_ranks, 'rank')}, {counted(program.num_stages, 'stage')}, "
            f"{counted(self.num_microbatches, 'micro-batch')}, checkpoint={checkpoint_in_words(self.checkpoint)!r})"
            + "".join(f"\n{line}" for line in (stages, *(f"  {line}" for line in self._unused)))
        )


def _with_losses(costs: Costs, program: Program, *, known: bool) -> Costs:
    """The same with the losses of all micro-batches, which live until the step ends. known: whether costs have those
    that a loss of few micro-batches needs.
    """
    more = max(SCALARS_BYTES, _LOSS_BYTES * program.num_microbatches) - SCALARS_BYTES * known
    ends = [not takers for takers in program.graph.consumers]
    sizes = [size + more * end for size, end in zip(costs.buffer_bytes, ends, strict=True)]
    return replace(costs, buffer_bytes=tuple(sizes))
