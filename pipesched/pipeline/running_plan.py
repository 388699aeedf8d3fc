"""Running plan: the ranks, stages and batch splitting that a pipeline uses now, and the timelines of recent steps."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.errors import InputError
from pipesched.model.module_tree import class_names
from pipesched.partitioning.result import StageLayers
from pipesched.pipeline.assembly import Assembly
from pipesched.pipeline.cost_model import CostModel
from pipesched.planning.plan import Plan, Tie
from pipesched.planning.program_factory import StepPrograms
from pipesched.program.checkpoint_options import checkpoint_in_words
from pipesched.program.program import Program
from pipesched.runtime.async_steps import Stream
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.rank_host import RankHost
from pipesched.simulation.costs import Costs
from pipesched.simulation.tied_weight_costs import tied_traffic_bytes
from pipesched.units import counted

__all__ = ["RunningPlan"]

_REMEMBERED = 6  # the number of measured steps that are kept for the next prediction


@dataclass(kw_only=True)
class RunningPlan:
    """The parts of a pipeline that a replan replaces. The pipeline's other parts share this object."""

    host: RankHost
    assembly: Assembly
    splitter: Splitter
    seed: int  #: the seed of all random numbers
    updates: bool  #: whether a step updates the weights, because the user passed ``optimizer=``
    stream: Stream | None = None  #: the steps of an asynchronous schedule that are under way
    step: int = 0  #: the number of steps that have started
    last_programs: StepPrograms | None = None  #: the programs of the last synchronous step
    num_sizes: int = 0  #: the number of different micro-batch sizes in the last step; 0 if pipesched cut the batch
    rows: Sequence[int] = ()  #: the number of rows of each micro-batch in the last step; empty before the first step
    runs: deque[Timeline] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  #: the timelines of the last steps

    @property
    def program(self) -> Program:
        """The program for a full batch, before updates, recomputes and transfers are added."""
        return self.assembly.program

    @property
    def cut(self) -> StageLayers:
        """The layers of each stage."""
        return self.assembly.cut

    def flush(self) -> Tensor | None:
        """Finish the steps that are under way. Returns the loss of the last step, or None if no step is under way."""
        return self.stream.flush() if self.stream is not None and self.stream.open else None

    def check_idle(self, method: str) -> None:
        """Raise InputError if a step is running. ``method`` is the name of the method that changes weights."""
        stream = self.stream
        runs = self.host.executor if stream is None or not stream.open else stream
        if runs.busy:
            raise InputError(
                f"{method}() must not be called while a step runs, because the step uses the weights and gradients "
                f"that it changes; it was called by a layer, a hook or another thread; call it after the step has "
                f"returned"
            )

    def replace(self, *, host: RankHost, assembly: Assembly, splitter: Splitter) -> None:
        """Switch to another plan. The step count continues; the measured steps are discarded."""
        self.host = host
        self.assembly = assembly
        self.splitter = splitter
        self.stream = None
        self.last_programs = None
        self.num_sizes = 0
        self.rows = ()
        self.runs.clear()

    def plan(self, cost_model: CostModel, model: nn.Module, costs: Costs | None) -> Plan:
        """Return the running plan.

        Args:
            cost_model: the known costs of layers and devices.
            model: the user's model.
            costs: the stages' costs; None if they are not known.

        """
        programs = self.assembly.programs
        stage_cut = self.assembly.stage_cut
        if stage_cut.partition is None and cost_model.layers is not None:
            stage_cut.partition = stage_cut.partitioner.evaluate(stage_cut.cut)
        return Plan(
            stages=stage_cut.cut,
            schedule=self.program.name,
            program=self.program,
            checkpoint=programs.checkpoint,
            costs=costs,
            options=programs.options,
            partition=stage_cut.partition,
            ties=self._ties(cost_model.layered, model),
            alternatives=stage_cut.alternatives,
            layer_classes=class_names(model, chain.from_iterable(stage_cut.cut)),
            replication=cost_model.replication(programs),
            completion=programs.completion,
            advice=stage_cut.advice,
        )

    def _ties(self, layered: LayeredModel, model: nn.Module) -> tuple[Tie, ...]:
        """Return one Tie for each group of stages that share weights."""
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
        """Return a key that is equal for two stages if they share memory, that is, one device of one process."""
        rank = self.program.placement[stage]
        return self.host.grid.devices[rank] if self.host.grid.in_one_process else rank

    @property
    def unused_devices(self) -> list[str]:
        """A list with one line of text that names the unused devices; empty if the plan uses all devices."""
        devices = self.host.grid.all_devices
        used = len(self.host.grid.devices)
        if used == len(devices):
            return []
        names = ", ".join(map(str, devices[used:]))
        count = counted(len(devices) - used, "device")
        return [f"{count} of {len(devices)} unused ({names}), because the plan has {counted(used, 'rank')}"]

    def __str__(self) -> str:
        program = self.program
        programs = self.assembly.programs
        heading = (
            f"Pipeline({program.name}, {counted(program.num_ranks, 'rank')}, {counted(program.num_stages, 'stage')}, "
            f"{counted(programs.num_microbatches, 'micro-batch')}, "
            f"{f'{len(self.host.grid.rows)} replicas, ' * (len(self.host.grid.rows) > 1)}"
            f"{f'{len(self.host.grid.every_plane)} planes, ' * (len(self.host.grid.every_plane) > 1)}"
            f"checkpoint={checkpoint_in_words(programs.checkpoint)!r})"
        )
        stages = [
            f"stage {index} on rank {program.placement[index]} ({stage.device}): {', '.join(stage.layers) or 'empty'}"
            + (f" (a copy of stage {program.weights[index]})" if index != program.weights[index] else "")
            for index, stage in self.assembly.stages.items()
        ]
        return "\n  ".join([heading, *stages, *self.unused_devices])
