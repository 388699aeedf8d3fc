"""Observed: what a pipeline shows of itself: what was decided, traces, predictions, and the profile behind them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import proxy

import torch
from torch import nn

from pipesched.boundaries import Cutter, Pins, tied_bytes
from pipesched.bounds import program_bound
from pipesched.costs import Costs
from pipesched.executors.local import Timeline
from pipesched.layered import Layered
from pipesched.links import Links
from pipesched.lowering import CheckpointMode
from pipesched.partitioner import Partition
from pipesched.plan import Plan, Tie
from pipesched.planning import Programs
from pipesched.profiler import LayerCosts, measured_costs, stage_costs
from pipesched.program import Program
from pipesched.simulator import simulate
from pipesched.sites import InProcess, OverMesh, Site
from pipesched.stage import Stage
from pipesched.stream import Stream
from pipesched.trace import Spans, Trace
from pipesched.wrapped import Wrapped

__all__ = ["Observed"]


class Observed(Wrapped):
    """A wrapped model with programs that run on a site: its plan, and their times."""

    _layers: dict[str, nn.Module]
    _layered: Layered
    _threads: int
    _site: Site
    _programs: Programs
    _cut: tuple[tuple[str, ...], ...]
    _stages: dict[int, Stage]
    _stream: Stream | None
    _runs: deque[Timeline]
    _profile: dict[str, LayerCosts] | None
    _partition: Partition | None
    _cutter: Cutter
    _links: Links | None

    def _settle(self) -> None:
        """Wait until nothing is under way."""

    # ---- what was decided -------------------------------------------------------------------------------------

    def _decide_cut(self, pins: Pins, program: Program, links: Links | None, plan: Plan | None) -> None:
        """Rank 0 cuts, for all."""
        self._links = links
        own = proxy(self)  # a pipeline that nobody holds ends at once: what it keeps does not hold it
        self._cutter = Cutter(pins, program, lambda: own._layered.graph(own._profiled()), self.checkpoint, links)
        self._cut, found = self._site.agreed(self._cutter.cut)
        self._partition = found if plan is None else plan.partition

    @property
    def plan(self) -> Plan:
        """The plan that runs, with the costs known so far."""
        program = self._programs.plain(self.num_microbatches)
        if self._partition is None and self._profile is not None:
            self._partition = self._cutter.of(self._cut)
        options, ties = self._programs.options, self._tied()
        return Plan(self._cut, program.name, program, self.checkpoint, self._costs, options, self._partition, ties)

    def _tied(self) -> tuple[Tie, ...]:
        """The weights that several calls use, those of the same stages together."""
        count = len(self._cut)
        uses = [(name, use.rank) for use in self._layered.uses(self._cut, range(count)) for name in use.names]
        stages: dict[str, list[int]] = {}
        for name, stage in uses:
            stages.setdefault(name, []).append(stage)
        where: list[Any] = list(self._programs.plain(self.num_microbatches).placement)
        if isinstance(self._site, InProcess):  # uses on one device share its memory
            where = [self._site.devices[rank] for rank in where]
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
        return self._site.devices

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into; with several chains of them the stages of one."""
        return len(self._cut)

    @property
    def checkpoint(self) -> CheckpointMode:
        """The checkpoint mode."""
        return self._programs.checkpoint

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage but stage 0."""
        return [names[0] for names in self._cut[1:]]

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The layers of each stage; the layers themselves, not copies."""
        return [nn.Sequential(*(self._layers[name] for name in names)) for names in self._cut]

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches a full batch is cut into."""
        return self._programs.num_microbatches

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
        return simulate(self._programs.timed(self.num_microbatches), self._costs or self._profiled_costs())

    def _read(self, run: Timeline) -> Trace:
        trace = self._trace_of([run], ())
        if self._programs.streams or not isinstance(self._site, InProcess):
            return trace  # a part: of a stream, without a beginning from which versions could be told, or of the ranks
        return self._bounded(trace)

    def gather_trace(self) -> Trace | None:
        """As ``trace``, of all ranks on one clock; None before the first step. Collective under a mesh."""
        if not isinstance(self._site, OverMesh) or not self._runs:
            return self.trace
        if self._stream is not None:
            spans = self._site.gather(self._stream.timelines)
            return replace(self._trace_of([], self._stream.versions), spans=Spans.of(tuple(spans)))
        spans = self._site.gather([self._runs[-1]])
        return self._bounded(replace(self._trace_of([], ()), spans=Spans.of(tuple(spans))))

    def _bounded(self, trace: Trace) -> Trace:
        program = self._programs.plain(trace.num_microbatches)
        bound_s = program_bound(program, measured_costs([trace], program.num_stages, trace.costs))
        return replace(trace, versions=program.versions, bound_s=bound_s)

    def _trace_of(self, runs: Iterable[Timeline], versions: tuple[tuple[int, ...], ...]) -> Trace:
        name = f"{self._programs.plain(self.num_microbatches).name}, measured"
        sizes = self._profiled_costs() if self._profile is not None else None
        spans = tuple(span for run in runs for span in run.spans())
        return Trace(spans, len(self._site.devices), name, sizes, versions)

    @property
    def _costs(self) -> Costs | None:
        """The medians of earlier steps, with the profile's sizes; without earlier steps the profile's own figures."""
        profiled = self._profiled_costs() if self._profile is not None else None
        if not isinstance(self._site, InProcess):  # this rank has not seen what the others took
            return profiled
        earlier = [self._read(run) for run in list(self._runs)[:-1]]
        return measured_costs(earlier, len(self._stages), profiled) if earlier else profiled

    def _profiled_costs(self) -> Costs:
        profile = self._profiled()
        weights = self._programs.plain(self.num_microbatches).weights
        costs = stage_costs([[profile[name] for name in self._cut[part]] for part in weights])
        return replace(costs, links=self._links)

    def _profiled(self) -> dict[str, LayerCosts]:
        if self._profile is None:
            self._settle()  # the layers are called from this thread
            self._profile = self._layered.measure(self._site.devices[0], self._threads)
        return self._profile

    def __repr__(self) -> str:
        program = self._programs.plain(self.num_microbatches)
        stages = "\n".join(
            f"  stage {index} on rank {program.placement[index]} ({stage.device}): {', '.join(stage.layers) or 'empty'}"
            + (f" (a copy of stage {program.weights[index]})" if index != program.weights[index] else "")
            for index, stage in self._stages.items()
        )
        return (
            f"Pipeline({program.name}, {program.num_ranks} ranks, {program.num_stages} stages, "
            f"{self.num_microbatches} micro-batches, checkpoint={self.checkpoint!r})\n{stages}"
        )
