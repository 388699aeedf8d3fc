"""Plan: all decisions in one value: partition, schedule, shape and checkpointing; with its predicted trace."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from pipesched.costs import Costs
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.lowering import CheckpointMode, add_recompute
from pipesched.partitioning.answer import Partition, quote_bytes, quote_time, span
from pipesched.program import Program
from pipesched.simulator import simulate
from pipesched.trace import Trace
from pipesched.validation import validate

__all__ = ["Plan", "Tie"]


@dataclass(frozen=True)
class Tie:
    """Parameters that several calls use. stages: of each use, in order. bytes_per_step: what is sent for them: the
    weights to the ranks or devices of later uses, and from each of these uses a gradient back.
    """

    parameters: tuple[str, ...]
    stages: tuple[int, ...]
    bytes_per_step: int

    def __str__(self) -> str:
        others = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        places = sorted({*self.stages})
        if len(places) == 1:
            way = f"all {len(self.stages)} uses are in stage {places[0]}"
        else:
            cost = f"{quote_bytes(self.bytes_per_step)} a step are sent" if self.bytes_per_step else "nothing is sent"
            way = f"used in stages {', '.join(map(str, places))}, gradients are summed, {cost}"
        return f"tied: {self.parameters[0]}{others}: {way}"


@dataclass(frozen=True)
class Plan:
    """What runs: stages (each a tuple of layer names), the program, checkpointing, and what a micro-batch costs.

    stages: those of one chain, where several run on the same weights; costs count all. schedule: the name of the
    algorithm that made the program. options: its plain ones, numbers, flags and words. partition: what the stages cost
    and why they are cut so, where layers were measured. ties: the weights that several calls use.
    """

    stages: tuple[tuple[str, ...], ...]
    schedule: str
    program: Program
    checkpoint: CheckpointMode = "never"
    costs: Costs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    partition: Partition | None = None
    ties: tuple[Tie, ...] = ()

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage but stage 0."""
        return [layers[0] for layers in self.stages[1:]]

    def predicted(self) -> Trace | None:
        """The simulated step; None where no costs are known."""
        return simulate(add_recompute(self.program, self.checkpoint), self.costs) if self.costs else None

    def explain(self) -> str:
        """What each stage has and costs, the bottleneck and why it cannot be better, ties, and the predicted step."""
        program, predicted = self.program, self.predicted()
        shape = f"{program.num_ranks} ranks, {program.num_microbatches} micro-batches"
        lines = [f"{self.schedule} on {shape}, checkpoint {self.checkpoint!r}"]
        if self.partition is not None:
            lines.append(self.partition.explain())
        else:
            ranks = program.placement
            lines += [f"stage {at} on rank {ranks[at]}: {span(names)}" for at, names in enumerate(self.stages)]
            lines.append("what stages cost is not known: layers are measured where no boundaries are given")
        lines += map(str, self.ties)
        if predicted is not None:
            step, bubble = quote_time(predicted.makespan_s), predicted.bubble_ratio
            lines.append(f"predicted: {step} a step, bubble {bubble:.1%}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them. ``predicted`` is for the reader: it is computed anew on load."""
        predicted = self.predicted()
        summary = {"makespan_s": predicted.makespan_s, "bubble_ratio": predicted.bubble_ratio} if predicted else None
        return {
            "schedule": self.schedule,
            "options": dict(self.options),
            "num_ranks": self.program.num_ranks,
            "num_microbatches": self.program.num_microbatches,
            "checkpoint": self.checkpoint,
            "stages": [list(layers) for layers in self.stages],
            "predicted": summary,
            "ties": [asdict(tie) for tie in self.ties],
            "partition": self.partition.to_dict() if self.partition else None,
            "costs": self.costs.to_dict() if self.costs else None,
            "program": str(self.program).splitlines(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The inverse of ``to_dict``. The program is validated: raises ScheduleError where it is wrong."""
        try:
            program = Program.parse("\n".join(values["program"]))
            costs = Costs.from_dict(values["costs"]) if values.get("costs") else None
            stages = tuple(tuple(layers) for layers in values["stages"])
            options = dict(values.get("options", {}))
            found = values.get("partition")
            cut = Partition.from_dict({**found, "stages": values["stages"]}) if found else None
            ties = tuple(
                Tie(tuple(tie["parameters"]), tuple(tie["stages"]), tie["bytes_per_step"])
                for tie in values.get("ties", ())
            )
            plan = cls(stages, values["schedule"], program, values["checkpoint"], costs, options, cut, ties)
        except (KeyError, TypeError) as error:
            raise ScheduleError(f"a plan has {', '.join(_KEYS)}; {error} is missing or wrong; save it again") from error
        if values["checkpoint"] not in get_args(CheckpointMode):
            raise ScheduleError(
                f"checkpoint is one of {', '.join(get_args(CheckpointMode))}; the plan has got "
                f"{values['checkpoint']!r}; correct it"
            )
        if len(stages) != program.num_weights:
            raise ScheduleError(
                f"a plan has as many stages as its program has weight copies; it lists {len(stages)}, the program has "
                f"{program.num_weights}; correct one of them"
            )
        names = [name for layers in stages for name in layers]
        if len({*names}) < len(names):
            doubled = next(name for name in names if names.count(name) > 1)
            raise ScheduleError(
                f"every layer is in exactly one stage; the plan has {doubled!r} {names.count(doubled)} times; "
                f"correct it"
            )
        validate(program)
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Plan":
        """Read a plan. Raises ScheduleError naming the file where it is none."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (json.JSONDecodeError, PipeschedError) as error:
            raise ScheduleError(f"{path}: {error}") from error


_KEYS = ("schedule", "stages", "checkpoint", "program")
