"""Running plan: what a pipeline runs now: ranks, stages, how batches are split, and the last steps."""

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.model.class_names import class_names
from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.assembly import Assembly
from pipesched.pipeline.cost_book import CostBook
from pipesched.planning.plan import Plan, Tie
from pipesched.program.checkpoint_options import checkpoint_in_words
from pipesched.program.program import Program
from pipesched.runtime.async_steps import Stream
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_host import RankHost, ThreadRanks
from pipesched.simulation.costs import Costs
from pipesched.simulation.tied_weight_costs import tied_traffic_bytes
from pipesched.units import counted

__all__ = ["RunningPlan"]

_REMEMBERED = 6  # steps whose times serve the next prediction


@dataclass(kw_only=True)
class RunningPlan:
    """The parts that a replan replaces, together. The other parts of a pipeline share it."""

    host: RankHost
    assembly: Assembly
    splitter: Splitter
    stream: Stream | None = None  #: of an asynchronous schedule: the steps under way
    step: int = 0  #: how many steps were begun
    runs: deque[Timeline] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  #: the last steps, measured

    @property
    def program(self) -> Program:
        """The program of a full batch, as its author wrote it."""
        return self.assembly.program

    @property
    def cut(self) -> StageLayers:
        """The layers of each stage."""
        return self.assembly.cut

    def flush(self) -> Tensor | None:
        """Finish the steps of an asynchronous schedule that are under way. Returns the loss of the last one."""
        return self.stream.flush() if self.stream is not None and self.stream.open else None

    def replace(self, *, host: RankHost, assembly: Assembly, splitter: Splitter) -> None:
        """Go on with another plan: the count of steps stays, what was measured of steps goes."""
        self.host = host
        self.assembly = assembly
        self.splitter = splitter
        self.stream = None
        self.runs.clear()

    def plan(self, book: CostBook, model: nn.Module, costs: Costs | None) -> Plan:
        """The plan that runs.

        Args:
            book: what layers cost.
            model: the user's model.
            costs: what the stages cost; None where that is not known.

        """
        programs = self.assembly.programs
        stage_cut = self.assembly.stage_cut
        if stage_cut.partition is None and book.layers is not None:
            stage_cut.partition = stage_cut.partitioner.evaluate(stage_cut.cut)
        return Plan(
            stages=stage_cut.cut,
            schedule=self.program.name,
            program=self.program,
            checkpoint=programs.checkpoint,
            costs=costs,
            options=programs.options,
            partition=stage_cut.partition,
            ties=self._ties(book.layered, model),
            alternatives=stage_cut.alternatives,
            layer_classes=class_names(model, chain.from_iterable(stage_cut.cut)),
        )

    def _ties(self, layered: LayeredModel, model: nn.Module) -> tuple[Tie, ...]:
        """The weights that several calls use, those of the same stages together."""
        cut = self.assembly.cut
        stages_of: dict[str, list[int]] = {}
        for use in layered.uses(cut, range(len(cut))):
            for name in use.names:
                stages_of.setdefault(name, []).append(use.rank)
        tied: dict[tuple[int, ...], list[str]] = {}
        for name, stages in stages_of.items():
            if len(stages) > 1:
                tied.setdefault(tuple(stages), []).append(name)
        sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
        return tuple(
            Tie(
                tuple(names),
                stages,
                tied_traffic_bytes(
                    sum(sizes.get(name, 0) for name in names), [self._memory_of(stage) for stage in stages]
                ),
            )
            for stages, names in tied.items()
        )

    def _memory_of(self, stage: int) -> Any:
        """Stands for the memory in which a stage's weights lie: in one process ranks of one device share it."""
        rank = self.program.placement[stage]
        return self.host.devices[rank] if isinstance(self.host, ThreadRanks) else rank

    @property
    def unused_devices(self) -> list[str]:
        """Says which devices the plan leaves out; empty where it uses all."""
        every = self.host.all_devices
        used = len(self.host.devices)
        if used == len(every):
            return []
        names = ", ".join(map(str, every[used:]))
        return [f"{counted(len(every) - used, 'device')} of {len(every)} not used, as the plan has {used}: {names}"]

    def __str__(self) -> str:
        program = self.program
        programs = self.assembly.programs
        heading = (
            f"Pipeline({program.name}, {counted(program.num_ranks, 'rank')}, {counted(program.num_stages, 'stage')}, "
            f"{counted(programs.num_microbatches, 'micro-batch')}, "
            f"checkpoint={checkpoint_in_words(programs.checkpoint)!r})"
        )
        stages = [
            f"stage {index} on rank {program.placement[index]} ({stage.device}): {', '.join(stage.layers) or 'empty'}"
            + (f" (a copy of stage {program.weights[index]})" if index != program.weights[index] else "")
            for index, stage in self.assembly.stages.items()
        ]
        return "\n  ".join([heading, *stages, *self.unused_devices])
