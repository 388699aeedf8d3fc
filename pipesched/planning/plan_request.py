"""Plan request: a user's choices of schedule, stages, micro-batches, boundaries and checkpointing for a plan."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pipesched.checks import is_count, shown
from pipesched.errors import PartitionError, ScheduleError
from pipesched.planning.pins import Boundaries
from pipesched.planning.plan import Plan
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.program.order import Schedule
from pipesched.program.program import Program
from pipesched.units import counted

__all__ = ["PlanRequest"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The choices of a user. If a choice is None or "auto", pipesched makes the choice."""

    schedule: str | Schedule | Program = "auto"
    num_stages: int | None = None
    num_microbatches: int | None = None
    boundaries: Boundaries | None = None
    checkpoint: Checkpoint | None = None
    together: Sequence[Collection[str]] = ()
    num_ranks: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule.lower() == "auto":
            object.__setattr__(self, "schedule", "auto")
        count: Any = self.num_microbatches
        if isinstance(count, float) and count.is_integer():  # such as 8.0 from a configuration file
            object.__setattr__(self, "num_microbatches", int(count))
        if self.num_microbatches is not None and not is_count(self.num_microbatches):
            raise ScheduleError(
                f"num_microbatches must be a whole number, at least 1; got {shown(count)}; pass 1 or more"
            )
        if self.num_stages is not None and not is_count(self.num_stages):
            raise PartitionError(
                f"num_stages must be a whole number, at least 1; got {shown(self.num_stages)}; pass 1 or more"
            )

    def pinned(self, plan: Plan, names: list[str]) -> "PlanRequest":
        """Return the request that reproduces ``plan``.

        Raises PartitionError if the plan is for another model, or if this request already contains other choices.

        Args:
            plan: the plan to reproduce.
            names: the layers of the model, in execution order.

        """
        if not isinstance(plan, Plan):
            raise PartitionError(f"plan= must be a Plan; got {plan!r}; read a saved plan with Plan.load(path)")
        of_plan = [name for layers in plan.stages for name in layers]
        if of_plan != names:
            raise PartitionError(
                f"a plan must have each layer of its model in exactly one stage; the plan has "
                f"{counted(len(of_plan), 'layer')}, the model has {len(names)}; {_first_difference(of_plan, names)}; "
                f"make a new plan for this model"
            )
        if self != PlanRequest():
            raise PartitionError(
                "a plan already includes all choices; got plan= and other options, such as schedule= or checkpoint=; "
                "pass plan= alone"
            )
        program = plan.program
        return PlanRequest(
            schedule=plan.maker() or plan.chained,  # a schedule, unlike a program, also works for short batches
            num_stages=program.num_weights,
            num_microbatches=program.num_microbatches,
            boundaries=plan.boundaries,
            checkpoint=plan.checkpoint,
            num_ranks=program.num_ranks,
        )


def _first_difference(of_plan: list[str], of_model: list[str]) -> str:
    count = Counter(of_plan)
    if count.keys() & {*of_model}:
        for name in of_model:
            if count[name] != 1:
                return f"layer {name!r} is in {'several stages' if count[name] else 'no stage'} of the plan"
    pairs = enumerate(zip_longest(of_plan, of_model))
    position, (planned, own) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    if planned is None or own is None:
        return f"layer {position}, {own or planned!r}, is missing from the {'plan' if planned is None else 'model'}"
    return f"layer {position} is {planned!r} in the plan and {own!r} in the model"
