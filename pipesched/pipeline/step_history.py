"""Step history: the traces of a pipeline's last steps, the stage costs measured in them, a prediction and the plan."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.memory_forecast import MemoryForecast
from pipesched.pipeline.planned_rows import clearly_differs
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.step_times import StepTimes
from pipesched.planning.plan import Plan
from pipesched.runtime.executors.threads import Timeline
from pipesched.simulation.bounds import program_bound
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.costs import Costs
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Span, Spans, Trace
from pipesched.units import counted

__all__ = ["FEWEST", "StepHistory"]

_MUCH = 0.5  # a stage that takes this much longer than expected shows that its process or its layers are slow
FEWEST = 3  #: the number of measured steps that a search for a better plan requires

_FIRST = "the first step, which includes memory allocation and warm-up"


class StepHistory:
    """The traces of the last steps under the running plan, and the predicted trace of the next step."""

    def __init__(self, running: RunningPlan, cost_model: CostModel, memory: MemoryForecast) -> None:
        self._running = running
        self._cost_model = cost_model
        self._memory = memory

    @property
    def trace(self) -> Trace | None:
        """The trace of the last step in this process; None before the first step.

        For an asynchronous schedule, the trace covers the steps since the last flush, but at most the last six.
        """
        running = self._running
        if running.stream is not None:
            return self.trace_of(running.stream.timelines, running.stream.versions)
        if not running.runs:
            return None
        trace = replace(self.trace_of([running.runs[-1]]), notes=tuple(self._notes_of_measurement()))
        if running.assembly.programs.streams or not running.host.grid.in_one_process:
            return trace  # the trace is incomplete: it has part of a stream of steps, or one of several ranks
        return self._with_bound(trace)

    def gather_trace(self) -> Trace | None:
        """Return the trace of the last step for all ranks, with times on one clock. Collective under a mesh."""
        running = self._running
        host = running.host
        if host.grid.in_one_process or not running.runs:
            return self.trace
        if running.stream is not None:
            spans = host.collectives.gather_spans(running.stream.timelines)
            return replace(self.trace_of([], running.stream.versions), spans=Spans.of(tuple(spans)))
        spans = host.collectives.gather_spans([running.runs[-1]])
        notes = tuple(self._notes_of_measurement())
        return self._with_bound(replace(self.trace_of([]), spans=Spans.of(tuple(spans)), notes=notes))

    def gather_steps(self) -> tuple[list[Trace], dict[Hashable, float]]:
        """Return the traces of the last steps for all ranks, and the slowness of unclear processes. Collective.

        A process is unclear if it has no stages, or if a stage takes much longer than expected in comparison with other
        processes: the process or its layers have become slow. It measures the layers to find out.

        The first step of the plan, which includes warm-up, is left out if there are enough others. With several
        replicas or planes, the actions of each rank are those of the process in which this rank took the longest.
        """
        runs = list(self._running.runs)
        runs = runs[1:] if len(runs) > FEWEST else runs
        grid = self._running.host.grid
        if grid.in_one_process:
            return self._traces(tuple(run.spans()) for run in runs), {}
        gather = self._running.host.collectives.gathered_in_all
        if not all(gather(self._cost_model.is_agreed)):
            self._cost_model.agree(self._running.host.collectives.agreed(self._cost_model.measured))
        own = StepTimes.of(runs)
        every, strays = zip(*gather((own.sent, self._strays(runs))), strict=True)
        spans = own.spans(every, [grid.ranks_at(position) for position in range(len(grid.pipeline))])
        return self._traces(spans), self._probed(strays)

    def _traces(self, steps: Iterable[Sequence[Span]]) -> list[Trace]:
        """Return the traces of steps with these spans."""
        whole = self.trace_of([])
        return [replace(whole, spans=spans) for spans in steps]

    def _probed(self, strays: Sequence[float | None]) -> dict[Hashable, float]:
        """Return the slowness of the processes that are unclear, given how far each strays. Collective."""
        limit = (1 + _MUCH) * min((ratio for ratio in strays if ratio is not None), default=0.0)
        unclear = {rank for rank, ratio in enumerate(strays) if ratio is None or ratio > limit}
        if not unclear:
            return {}
        host = self._running.host
        own = self._cost_model.slowness_here() if host.grid.rank in unclear else None
        slowness = host.collectives.gathered_in_all(own)
        found: dict[Hashable, float] = {}
        for rank in unclear:  # the ranks of a tensor group wait for the slowest of them
            place = host.grid.in_first_plane(rank)
            found[place] = max(slowness[rank], found.get(place, 0.0))
        return found

    def _strays(self, runs: Iterable[Timeline]) -> float | None:
        """Return how many times longer than expected a stage of this process takes; None if it has no stages."""
        assembly = self._running.assembly
        if not assembly.stages:
            return None
        expected = self._cost_model.expected_costs(assembly.programs, assembly.cut)
        steps = self._traces(tuple(run.spans()) for run in runs)
        measured = measured_costs(steps, assembly.program.num_stages, expected)
        work = [(expected.forward_s[own], measured.forward_s[own]) for own in assembly.stages]
        return max((now / due for due, now in work if due), default=1.0)

    def trace_of(self, runs: Iterable[Timeline], versions: tuple[tuple[int, ...], ...] = ()) -> Trace:
        """Return the trace of these runs, with the stages' costs if the layers have been measured.

        Args:
            runs: the timelines of one or several steps.
            versions: the weight versions that each stage holds, for an asynchronous schedule. Default: none.

        """
        running = self._running
        searched_for = set(running.last_programs.sizes) if running.last_programs else ()
        sizes_of = f" for micro-batches of {len(searched_for)} sizes" if searched_for else ""
        name = f"{running.program.name}{sizes_of}, measured"
        sizes = (
            None
            if self._cost_model.layers is None
            else self._cost_model.stage_costs(running.assembly.programs, running.cut)
        )
        spans = tuple(span for run in runs for span in run.spans())
        return Trace(spans, len(running.host.grid.devices), name, sizes, versions)

    def _with_bound(self, trace: Trace) -> Trace:
        """Return the trace with a lower bound on the step time, or unchanged if micro-batches differ in size."""
        if self._running.num_sizes > 1:
            return trace
        program = self._running.assembly.programs.of(trace.num_microbatches).plain
        bound_s = program_bound(program, measured_costs([trace], program.num_stages, trace.costs))
        return replace(trace, versions=program.versions, bound_s=bound_s)

    @property
    def predicted(self) -> Trace:
        """The simulated trace of a step with ``costs``. Measures the layers if no costs are known."""
        if self._cost_model.layers is None:
            self._running.flush()  # no step may run while the layers are measured
        programs = self._running.assembly.programs
        return simulate(
            programs.full.without_messages, self.costs or self._cost_model.expected_costs(programs, self._running.cut)
        )

    @property
    def costs(self) -> Costs | None:
        """The stages' costs: medians over earlier steps, or else sums of layer costs; None if neither is known."""
        running = self._running
        by_layers = None
        if self._cost_model.layers is not None:
            by_layers = self._cost_model.expected_costs(running.assembly.programs, running.cut)
        earlier = [self.trace_of([run]) for run in self._earlier]
        if not earlier:
            return by_layers
        sizes = by_layers and replace(by_layers, overheads=None)  # measured actions contain the overheads
        return measured_costs(earlier, len(running.assembly.stages), sizes)

    def plan(self, model: nn.Module) -> Plan:
        """Return the running plan of the user's model, with ``costs`` and the sizes of the optimizers' states."""
        running = self._running
        costs = self.costs
        unknown = []
        try:
            costs = None if costs is None else self._memory.with_states(costs)
        except Exception as error:  # an optimizer may step only the user's own parameters
            unknown = [f"the memory of the optimizer is not known: it cannot step other parameters ({error})"]
        plan = running.plan(self._cost_model, model, costs)
        rows = max(running.rows, default=None) if self._earlier else self._rows_of_layers
        notes = (*self._cost_model.notes, *self._notes_of_prediction(), *unknown, *running.unused_devices)
        rows = None if costs is None else rows
        return replace(plan, posted=self._memory.posted, notes=notes, microbatch_rows=rows)

    @property
    def _rows_of_layers(self) -> int | None:
        """The number of rows of the micro-batches for which the layers' costs are known."""
        return self._cost_model.planned.rows or self._running.splitter.evidence.rows

    @property
    def _earlier(self) -> list[Timeline]:
        """The timelines of the steps before the last step, for the prediction.

        The first step includes warm-up, so it is left out if there are other steps. The list is empty under a mesh,
        because this process has measured only its own rank.
        """
        earlier = list(self._running.runs)[:-1] if self._running.host.grid.in_one_process else []
        return earlier[1:] if len(earlier) > 1 else earlier

    def _notes_of_prediction(self) -> Iterator[str]:
        """Yield notes for the plan: the replicas that run it, and the times that the prediction uses."""
        grid = self._running.host.grid
        if len(grid.rows) > 1:
            ranks = f"{grid.num_processes} ranks in all"
            yield f"{len(grid.rows)} replicas run this plan, on {ranks}; this report is about one replica"
        if len(grid.every_plane) > 1:
            yield (
                f"{len(grid.every_plane)} ranks may split each layer of a rank of this plan, so it has "
                f"{grid.num_processes} ranks in all; this report is about one of them"
            )
        if self._running.runs and not self._running.assembly.programs.streams:
            num_earlier = len(self._earlier)
            first = num_earlier == 1 and len(self._running.runs) == 2
            source = f"action times of {_FIRST if first else counted(num_earlier, 'earlier step')}"
            yield f"predicted from {source if num_earlier else 'measured layer times'}"

    def _notes_of_measurement(self) -> Iterator[str]:
        """Yield notes for the trace of the last step: the conditions under which it was measured."""
        running = self._running
        if running.assembly.programs.streams:
            return
        if running.num_sizes > 1:
            yield self._uneven()
        known = self._rows_of_layers
        if known and running.rows and clearly_differs(known, running.rows):
            what = "predicted memory is" if self._earlier else "predicted times and memory are"
            yield (
                f"{what} for micro-batches of {counted(known, 'row')}; the measured step has micro-batches of "
                f"{counted(max(running.rows), 'row')}"
            )
        if len(running.runs) == 1:
            yield f"the measured step is {_FIRST}; run more steps before you compare"

    def _uneven(self) -> str:
        """Return a note on a measured step whose micro-batches have different sizes."""
        running = self._running
        programs = running.assembly.programs
        sizes = f"the measured step has micro-batches of {counted(running.num_sizes, 'size')}"
        if running.last_programs is None or not running.last_programs.sizes:
            return f"{sizes}, run in the order for equal sizes"
        searched = counted(programs.num_searched, "order")
        return (
            f"{sizes}, run in an order found for these sizes ({searched} found so far for unequal sizes); the "
            f"prediction is for equal sizes"
        )
