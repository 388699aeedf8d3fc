"""Plan: all decisions in one value: partition, schedule, shape and checkpointing; with its predicted trace."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from pipesched.costs import Costs
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.lowering import CheckpointMode, add_recompute
from pipesched.program import Program
from pipesched.simulator import simulate
from pipesched.trace import Trace
from pipesched.validation import validate

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What runs: stages (each a tuple of layer names), the program, checkpointing, and what a micro-batch costs.

    stages: those of one chain, where several run on the same weights; costs count all. schedule: the name of the
    algorithm that made the program. options: its plain ones, numbers, flags and words.
    """

    stages: tuple[tuple[str, ...], ...]
    schedule: str
    program: Program
    checkpoint: CheckpointMode = "never"
    costs: Costs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def boundaries(self) -> list[str]:
        """The first layer of every stage but stage 0."""
        return [layers[0] for layers in self.stages[1:]]

    def predicted(self) -> Trace | None:
        """The simulated step; None where no costs are known."""
        return simulate(add_recompute(self.program, self.checkpoint), self.costs) if self.costs else None

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
            plan = cls(stages, values["schedule"], program, values["checkpoint"], costs, options)
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
