"""Step history: the last steps of a pipeline as traces, and what its stages cost by them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipesched.pipeline.cost_book import CostBook
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.rank_host import MeshRanks, ThreadRanks
from pipesched.simulation.bounds import program_bound
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.costs import Costs
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Spans, Trace
from pipesched.units import counted

__all__ = ["StepHistory"]


class StepHistory:
    """The last steps under the running plan, measured, and the next one, predicted."""

    def __init__(self, running: RunningPlan, book: CostBook) -> None:
        self._running = running
        self._book = book

    @property
    def trace(self) -> Trace | None:
        """The last step in this process; None before the first. Of an asynchronous schedule all steps under way."""
        running = self._running
        if running.stream is not None:
            return self.trace_of(running.stream.timelines, running.stream.versions)
        if not running.runs:
            return None
        trace = self.trace_of([running.runs[-1]])
        if running.assembly.programs.streams or not isinstance(running.host, ThreadRanks):
            return trace  # a part: of a stream, without a beginning from which versions could be told, or of the ranks
        return self._with_bound(trace)

    def gather_trace(self) -> Trace | None:
        """As ``trace``, of all ranks on one clock. Collective under a mesh."""
        running = self._running
        host = running.host
        if not isinstance(host, MeshRanks) or not running.runs:
            return self.trace
        if running.stream is not None:
            spans = host.gather(running.stream.timelines)
            return replace(self.trace_of([], running.stream.versions), spans=Spans.of(tuple(spans)))
        spans = host.gather([running.runs[-1]])
        return self._with_bound(replace(self.trace_of([]), spans=Spans.of(tuple(spans))))

    def steps(self) -> list[Trace]:
        """The last steps in this process, the first of a plan included."""
        return [self.trace_of([run]) for run in self._running.runs]

    def trace_of(self, runs: Iterable[Timeline], versions: tuple[tuple[int, ...], ...] = ()) -> Trace:
        """What these runs were, with the stages' sizes where they are known.

        Args:
            runs: timelines of one or several steps.
            versions: of weights that each stage holds, for an asynchronous schedule.

        """
        running = self._running
        name = f"{running.program.name}, measured"
        sizes = None if self._book.layers is None else self._book.stage_costs(running.assembly.programs, running.cut)
        spans = tuple(span for run in runs for span in run.spans())
        return Trace(spans, len(running.host.devices), name, sizes, versions)

    def _with_bound(self, trace: Trace) -> Trace:
        program = self._running.assembly.programs.of(trace.num_microbatches).plain
        bound_s = program_bound(program, measured_costs([trace], program.num_stages, trace.costs))
        return replace(trace, versions=program.versions, bound_s=bound_s)

    @property
    def predicted(self) -> Trace:
        """The step, simulated with ``costs``. Measures layers where nothing is known."""
        if self._book.layers is None:
            self._running.flush()  # layers are measured in this thread
        programs = self._running.assembly.programs
        return simulate(programs.full.timed, self.costs or self._book.expected_costs(programs, self._running.cut))

    @property
    def costs(self) -> Costs | None:
        """What stages cost: the medians of earlier steps; without any by layer times; None where neither is known."""
        running = self._running
        by_layers = None
        if self._book.layers is not None:
            by_layers = self._book.expected_costs(running.assembly.programs, running.cut)
        earlier = [self.trace_of([run]) for run in self._earlier]
        if not earlier:
            return by_layers
        sizes = by_layers and replace(by_layers, overheads=None)  # measured actions contain them
        return measured_costs(earlier, len(running.assembly.stages), sizes)

    @property
    def _earlier(self) -> list[Timeline]:
        """The steps before the last one whose times serve a prediction: without the first, which warms up, where there
        are others. Under a mesh none: this rank has not seen what the others took.
        """
        earlier = list(self._running.runs)[:-1] if isinstance(self._running.host, ThreadRanks) else []
        return earlier[1:] if len(earlier) > 1 else earlier

    def notes(self) -> Iterator[str]:
        """How the prediction and the measured step came about."""
        runs = self._running.runs
        if runs and not self._running.assembly.programs.streams:
            first = "the first step, which also allocates memory and warms up"
            earlier = len(self._earlier)
            taken = f"actions took in {counted(earlier, 'earlier step') if len(runs) > 2 else first}"
            yield f"predicted from what {taken if earlier else 'layers took when they were measured'}"
            if len(runs) == 1:
                yield f"measured is {first}; run more before you compare"
