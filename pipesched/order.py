"""What the author of a schedule uses, and all that a file in ``schedules/`` imports.

A schedule is a function ``def name(rank: int, shape: Shape) -> Order`` that writes down one rank's order:

    @schedule("gpipe")
    def gpipe(rank: int, shape: Shape) -> Order:
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
        for _ in range(shape.num_microbatches):
            order.B(rank)
        return order

Micro-batches number themselves: the first ``order.F(2)`` is 2F0, the next one 2F1. Asking for more than there are
adds nothing, so a rule that is stated for many micro-batches also serves few.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipesched import placement
from pipesched.actions import Action, Kind
from pipesched.errors import ScheduleError
from pipesched.placement import Placement, PlacementRule
from pipesched.program import Program

__all__ = ["Order", "Schedule", "Shape", "loop", "linear", "schedule", "v"]

linear, loop, v = placement.linear, placement.loop, placement.v


@dataclass(frozen=True)
class Shape:
    """What a schedule is written for."""

    num_ranks: int
    num_microbatches: int
    chunks_per_rank: int
    placement: Placement

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in stage order."""
        return placement.chunks_of(self.placement, rank)

    def exactly(self, count: int, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, for a schedule written for so many. Raises ScheduleError for another number."""
        if self.chunks_per_rank != count:
            raise ScheduleError(
                f"this schedule holds {count} stages on each rank; asked for {self.chunks_per_rank}; cut the model "
                f"into {count * self.num_ranks} stages for {self.num_ranks} ranks (chunks_per_rank={count})"
            )
        return self.chunks(rank)

    def interleaved(self, rank: int) -> tuple[list[int], list[int]]:
        """The stage of each forward and of each backward of a rank: group by group, and in a group chunk by chunk,
        for backwards from the last chunk to the first (Megatron-LM, Narayanan et al. 2021).
        """
        chunks, sizes = self.chunks(rank), self.groups()
        forwards = [chunk for size in sizes for chunk in chunks for _ in range(size)]
        backwards = [chunk for size in sizes for chunk in reversed(chunks) for _ in range(size)]
        return forwards, backwards

    def groups(self) -> list[int]:
        """The micro-batches in even groups of at least p, for interleaving (Megatron-LM: groups of p, no rest)."""
        count = max(1, self.num_microbatches // self.num_ranks)
        return [self.num_microbatches // count + (group < self.num_microbatches % count) for group in range(count)]


class Order:
    """One rank's order while it is written. Each method adds the stage's next micro-batch, if any is left."""

    def __init__(self, shape: Shape) -> None:
        self.actions: list[Action] = []
        self._limit = shape.num_microbatches
        self._count: Counter[tuple[int, Kind]] = Counter()

    def F(self, stage: int) -> None:
        """Forward."""
        self._add(stage, Kind.F)

    def B(self, stage: int) -> None:
        """Full backward."""
        self._add(stage, Kind.B)

    def I(self, stage: int) -> None:  # noqa: E743
        """Input gradients only; a W for the same micro-batch must follow."""
        self._add(stage, Kind.I)

    def W(self, stage: int) -> None:
        """Weight gradients, after I."""
        self._add(stage, Kind.W)

    def _add(self, stage: int, kind: Kind) -> None:
        microbatch = self._count[stage, kind]
        if microbatch < self._limit:
            self._count[stage, kind] += 1
            self.actions.append(Action(stage, kind, microbatch))


#: What an author writes: (rank, shape) -> Order, or (shape) -> the Orders of all ranks, where one rank's order depends
#: on the others'. Keyword-only parameters with defaults are the schedule's own options.
OrderFunction = Callable[..., Any]


@dataclass(frozen=True)
class Schedule:
    """An algorithm that makes programs: a named function with a placement rule and options."""

    name: str
    function: OrderFunction
    placement: PlacementRule
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """The docstring that the author wrote."""
        return inspect.getdoc(self.function) or ""

    @property
    def module(self) -> str:
        """The module that defines the schedule."""
        return self.function.__module__

    @property
    def chunks_per_rank(self) -> int:
        """How many stages a rank holds: an option where the schedule has chunks, else 1."""
        return self.options.get("chunks_per_rank", 1)  # type: ignore[no-any-return]

    def with_options(self, **options: Any) -> "Schedule":
        """The same schedule with other defaults. Raises ScheduleError for an unknown option."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            raise ScheduleError(
                f"schedule {self.name!r} takes the options: {', '.join(self.options) or 'none'}; "
                f"got {unknown[0]}={options[unknown[0]]!r}; leave it out"
            )
        return replace(self, options={**self.options, **options})

    def program(self, num_ranks: int, num_microbatches: int, **options: Any) -> Program:
        """Build the program for so many ranks and micro-batches. Raises ScheduleError for counts below 1."""
        if options:
            return self.with_options(**options).program(num_ranks, num_microbatches)
        own = {name: value for name, value in self.options.items() if name != "chunks_per_rank"}
        chunks_per_rank = self.chunks_per_rank
        counts = {"ranks": num_ranks, "micro-batches": num_microbatches, "chunks a rank": chunks_per_rank}
        for what, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ScheduleError(
                    f"schedule {self.name!r} needs a whole number of {what}, at least 1; got {count!r}; pass 1 or more"
                )
        shape = Shape(num_ranks, num_microbatches, chunks_per_rank, self.placement(num_ranks, chunks_per_rank))
        written = self._written(shape, own)
        return Program(tuple(tuple(o.actions) for o in written), shape.placement, num_microbatches, name=self.name)

    def _written(self, shape: Shape, options: Mapping[str, Any]) -> list[Order]:
        parameters = inspect.signature(self.function).parameters.values()
        if sum(p.kind is not p.KEYWORD_ONLY for p in parameters) == 1:
            return list(self.function(shape, **options))
        return [self.function(rank, shape, **options) for rank in range(shape.num_ranks)]


def schedule(
    name: str, *, placement: PlacementRule = linear, chunks_per_rank: int | None = None
) -> Callable[[OrderFunction], Schedule]:
    """Make a Schedule of a function. The placement rule lays the stages out on the ranks.

    ``chunks_per_rank``: the default number of stages a rank holds; without it the schedule holds one and has no
    such option.
    """

    def decorate(function: OrderFunction) -> Schedule:
        parameters = inspect.signature(function).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        bare = [option for option, default in own.items() if default is inspect.Parameter.empty]
        if bare:
            raise ScheduleError(
                f"a schedule builds without options; {bare[0]!r} of {name!r} has no default; give it one"
            )
        chunks = {} if chunks_per_rank is None else {"chunks_per_rank": chunks_per_rank}
        return Schedule(name, function, placement, chunks | own)

    return decorate
