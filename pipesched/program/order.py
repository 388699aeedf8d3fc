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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any

import numpy as np

from pipesched.checks import is_count, shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES, NUM_KINDS, Columns, Ints, Orders
from pipesched.program.actions import Action, Kind
from pipesched.program.dependencies import chain
from pipesched.program.near_equal_parts import near_equal_parts
from pipesched.program.placement import Placement, PlacementRule, chunks_of, linear, loop, v
from pipesched.program.program import Program

__all__ = ["Order", "Schedule", "Shape", "linear", "loop", "schedule", "v"]


@dataclass(frozen=True)
class Shape:
    """What a schedule is written for."""

    num_ranks: int
    num_microbatches: int
    chunks_per_rank: int
    placement: Placement
    num_chains: int = 1
    num_steps: int = 1  # an asynchronous schedule runs on from step to step: num_microbatches counts those of all
    slices_per_microbatch: int = 1  # token slices: num_microbatches counts slices, those of a micro-batch in a row

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in stage order."""
        return chunks_of(self.placement, rank)

    def microbatches(self, stage: int) -> range:
        """The micro-batches that visit a stage: with several chains each has its even share, in turn."""
        shares = near_equal_parts(self.num_microbatches, self.num_chains)
        own = stage * self.num_chains // self.num_stages
        first = sum(shares[:own])
        return range(first, first + shares[own])

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
        chunks = self.chunks(rank)
        sizes = self.groups()
        forwards = [chunk for size in sizes for chunk in chunks for _ in range(size)]
        backwards = [chunk for size in sizes for chunk in reversed(chunks) for _ in range(size)]
        return forwards, backwards

    def even_ranks(self) -> int:
        """The number of ranks, for a schedule whose ranks mirror each other in pairs. Raises ScheduleError if odd."""
        if self.num_ranks % 2:
            near = [str(count) for count in (self.num_ranks - 1, self.num_ranks + 1) if count]
            raise ScheduleError(
                f"two directions need an even number of ranks; got {self.num_ranks}; use {' or '.join(near)}, "
                f"with any number of micro-batches"
            )
        return self.num_ranks

    def groups(self) -> list[int]:
        """The micro-batches in even groups of at least p, for interleaving (Megatron-LM: groups of p, no rest)."""
        return near_equal_parts(self.num_microbatches, max(1, self.num_microbatches // self.num_ranks))


class Order:
    """One rank's order while it is written. Each method adds the stage's next micro-batch, if any is left."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._limit = shape.num_microbatches
        self._numbers: list[int] = []  # each action as one: (stage x kinds + kind) x micro-batches + micro-batch
        self._left: list[dict[int, Iterator[int]]] = [{} for _ in range(NUM_KINDS)]  # by kind and stage
        self._owed: dict[int, deque[int]] = {}  # by stage, the numbers of the W that are due after an I
        self._joined: list[int] = []
        self._versions: dict[tuple[int, int], int] = {}

    def F(self, stage: int, *, version: int | None = None) -> None:
        """Forward. version: with weights after so many updates of the stage, where not with the newest."""
        if self._add(stage, _F) and version is not None:
            self._versions[stage, self._numbers[-1] % self._limit] = version

    def B(self, stage: int) -> None:
        """Full backward. B and I count together: each takes the next micro-batch that has gone back by neither."""
        self._add(stage, _B)

    def I(self, stage: int) -> None:  # noqa: E743
        """Input gradients only; a W for the same micro-batch must follow."""
        if self._add(stage, _B):
            self._numbers[-1] += (_I - _B) * self._limit
            self._owed.setdefault(stage, deque()).append(self._numbers[-1] + (_W - _I) * self._limit)

    def W(self, stage: int) -> None:
        """Weight gradients of the oldest I that has none yet. Raises ScheduleError where no I is before it."""
        if owed := self._owed.get(stage):
            self._numbers.append(owed.popleft())
        elif left := length_hint(self._left[_B].get(stage, range(self._limit))):
            raise ScheduleError(
                f"a W follows an I of its stage; {left} micro-batches have not gone back on stage {stage}, and no I "
                f"waits for its W; write order.I({stage}) first"
            )

    def UPDATE(self, stage: int) -> None:
        """The optimizer's step on the stage's weights, with the gradients since the one before."""
        self._add(stage, _UPDATE)

    def overlap(self, forward: int, backward: int) -> None:
        """A forward and a full backward of another micro-batch at the same time: both end when both are done."""
        first = self._add(forward, _F)
        if self._add(backward, _B) and first:
            self._joined.append(len(self._numbers) - 2)

    def _add(self, stage: int, kind: int) -> bool:
        left = self._left[kind].get(stage)
        if left is None:
            left = self._left[kind][stage] = self._numbers_of(stage, kind)
        number = next(left, None)
        if number is None:
            return False
        self._numbers.append(number)
        return True

    def _numbers_of(self, stage: int, kind: int) -> Iterator[int]:
        """The numbers of a stage's actions of one kind, in turn."""
        if not isinstance(stage, int) or not 0 <= stage < self._shape.num_stages:
            raise ScheduleError(
                f"an order's actions are of the stages 0..{self._shape.num_stages - 1}; got {stage!r}; "
                f"take them from shape.chunks(rank)"
            )
        line = (stage * NUM_KINDS + kind) * self._limit
        own = self._shape.microbatches(stage)
        return iter(range(line + own.start, line + own.stop))

    @property
    def actions(self) -> list[Action]:
        """What is written so far."""
        return list(self.columns())

    def columns(self) -> Columns:
        """What is written so far, as columns."""
        lines, microbatches = np.divmod(np.array(self._numbers, np.int64), self._limit)
        stages, kinds = np.divmod(lines, NUM_KINDS)
        if self._shape.slices_per_microbatch > 1:
            microbatches = np.where(np.isin(kinds, _BACKWARD), self._last_slice_first(microbatches), microbatches)
        columns = Columns.numbered(stages, kinds, microbatches)
        columns.joined[self._joined] = True
        return columns

    def _last_slice_first(self, numbers: Ints) -> Ints:
        """Backwards go through a micro-batch's slices from the last, which depends on all others, to the first."""
        whole, part = np.divmod(numbers, self._shape.slices_per_microbatch)
        slices: Ints = (whole + 1) * self._shape.slices_per_microbatch - 1 - part
        return slices

    @property
    def versions(self) -> dict[tuple[int, int], int]:
        """The version of each (stage, micro-batch) whose forward was written with one."""
        return self._versions


_F, _B, _I, _W, _UPDATE = (CODES[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.UPDATE))
_BACKWARD = (_B, _I, _W)

#: What an author writes: (rank, shape) -> Order; or (shape) -> the Orders of all ranks, where one rank's order depends
#: on the others'. Keyword-only parameters with defaults are the schedule's own options.
OrderFunction = Callable[..., Any]


@dataclass(frozen=True)
class Schedule:
    """An algorithm that makes programs: a named function with a placement rule and options."""

    name: str
    function: OrderFunction
    placement: PlacementRule
    options: Mapping[str, Any] = field(default_factory=dict)
    num_chains: int = 1

    @property
    def description(self) -> str:
        """The docstring that the author wrote."""
        return inspect.getdoc(self.function) or ""

    @property
    def searches(self) -> bool:
        """Whether the orders of all ranks are made at once: they depend on each other, and take longer to make."""
        return len(_required(self.function)) == 1

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

    def program(self, num_ranks: int, num_microbatches: int, *, steps: int = 1, **options: Any) -> Program:
        """Build the program for so many ranks and micro-batches. Raises ScheduleError for counts below 1.

        steps: so many steps, of so many micro-batches each, that run on into each other: for schedules with updates.
        """
        if options:
            return self.with_options(**options).program(num_ranks, num_microbatches, steps=steps)
        own = {name: value for name, value in self.options.items() if name not in _OF_THE_SHAPE}
        slices = self.options.get("slices_per_microbatch", 1)
        chunks_per_rank = self.chunks_per_rank
        counts = {"ranks": num_ranks, "micro-batches": num_microbatches, "chunks a rank": chunks_per_rank}
        counts |= {"steps": steps, "slices a micro-batch": slices}
        for what, count in counts.items():
            if not is_count(count):
                raise ScheduleError(
                    f"schedule {self.name!r} needs a whole number of {what}, at least 1; got {shown(count)}; pass 1 "
                    f"or more"
                )
        units = num_microbatches * steps * slices
        if (pairs := num_ranks * chunks_per_rank * self.num_chains * units) > _MOST_PAIRS:
            raise ScheduleError(
                f"a program lists the actions of at most {_MOST_PAIRS:,} pairs of a stage and a micro-batch; "
                f"{self.name!r} has {pairs:,} for "
                f"{', '.join(f'{count:,} {what}' for what, count in counts.items() if count > 1)}; ask for fewer"
            )
        placement = self.placement(num_ranks, chunks_per_rank * self.num_chains)
        shape = Shape(
            num_ranks=num_ranks,
            num_microbatches=units,
            chunks_per_rank=chunks_per_rank,
            placement=placement,
            num_chains=self.num_chains,
            num_steps=steps,
            slices_per_microbatch=slices,
        )
        orders = self._written(shape, own)
        program = Program(
            orders=Orders.of_ranks([order.columns() for order in orders]),
            placement=placement,
            num_microbatches=units,
            graph=chain(len(placement), self.num_chains),
            name=self.name,
            versions=_versions(orders, shape),
            slices_per_microbatch=slices,
        )
        if steps > 1 and not program.has_updates:
            raise ScheduleError(
                f"steps run on into each other where a schedule updates its weights itself; {self.name!r} does not; "
                f"ask for one step"
            )
        return program if self.num_chains == 1 else _with_chains(program, shape)

    def _written(self, shape: Shape, options: Mapping[str, Any]) -> list[Order]:
        if self.searches:
            written = self.function(shape, **options)
            orders = list(written) if isinstance(written, Iterable) else [written]
        else:
            orders = [self.function(rank, shape, **options) for rank in range(shape.num_ranks)]
        strange = [order for order in orders if not isinstance(order, Order)]
        if strange or len(orders) != shape.num_ranks:
            got = repr(strange[0]) if strange else f"{len(orders)} Orders"
            raise ScheduleError(
                f"a schedule returns an Order for each of {shape.num_ranks} ranks; {self.name!r} returned {got}; "
                f"end the function with 'return order'"
            )
        return orders


def _required(function: OrderFunction) -> list[str]:
    """The parameters that a schedule's function is called with."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in positional and each.default is each.empty]


def _versions(orders: Sequence[Order], shape: Shape) -> tuple[tuple[int, ...], ...]:
    """The versions that were written, by stage and micro-batch; () for stages without."""
    written = {pair: version for order in orders for pair, version in order.versions.items()}
    stages = {stage for stage, _ in written}
    return tuple(
        tuple(written.get((stage, microbatch), 0) for microbatch in range(shape.num_microbatches))
        if stage in stages
        else ()
        for stage in range(shape.num_stages if stages else 0)
    )


def _with_chains(program: Program, shape: Shape) -> Program:
    """Several chains of stages over one set of weights."""
    length = shape.num_stages // shape.num_chains
    routes: list[tuple[int, ...]] = []
    for first in range(0, shape.num_stages, length):
        routes += [tuple(range(first, first + length))] * len(shape.microbatches(first))
    return replace(program, weights=tuple(range(length)) * shape.num_chains, routes=tuple(routes))


#: Options that say what a schedule is written for.
_MOST_PAIRS = 10**8  # they take some ten gigabytes
_OF_THE_SHAPE = ("chunks_per_rank", "slices_per_microbatch")


def schedule(
    name: str,
    *,
    placement: PlacementRule = linear,
    chunks_per_rank: int | None = None,
    num_chains: int = 1,
    slices_per_microbatch: int | None = None,
) -> Callable[[OrderFunction], Schedule]:
    """Make a Schedule of a function. The placement rule lays the stages out on the ranks.

    ``chunks_per_rank``: the default number of stages a rank holds; without it the schedule holds one and has no
    such option. num_chains: how many pipelines run at once over the same weights, each on its share of the
    micro-batches; stage ``s`` of the second of 2 chains of p is number ``p + s``. slices_per_microbatch: the default
    number of token slices, for a schedule of causal models that runs slice by slice.
    """
    _check_arguments(name, placement, num_chains)

    def decorate(function: OrderFunction) -> Schedule:
        if not callable(function):
            raise ScheduleError(
                f"a schedule is a function (rank, shape) -> Order; {name!r} is {shown(function)}; decorate a function"
            )
        parameters = inspect.signature(function).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        bare = [option for option, default in own.items() if default is inspect.Parameter.empty]
        if bare:
            raise ScheduleError(
                f"a schedule builds without options; {bare[0]!r} of {name!r} has no default; give it one"
            )
        if len(_required(function)) not in (1, 2):
            raise ScheduleError(
                f"a schedule is a function (rank, shape) -> Order, or (shape) -> the Orders of all ranks; {name!r} "
                f"takes ({', '.join(_required(function))}); give its options defaults, behind a '*'"
            )
        shape = {"chunks_per_rank": chunks_per_rank, "slices_per_microbatch": slices_per_microbatch}
        given = {option: count for option, count in shape.items() if count is not None}
        return Schedule(name=name, function=function, placement=placement, options=given | own, num_chains=num_chains)

    return decorate


def _check_arguments(name: Any, placement: Any, num_chains: Any) -> None:
    """Raise ScheduleError for what ``schedule`` does not take. Other counts are checked where programs are made."""
    if not isinstance(name, str) or not name:
        raise ScheduleError(
            f"a schedule has a name; got {shown(name)}; write @schedule('my-schedule') above the function"
        )
    if not callable(placement):
        raise ScheduleError(
            f"a placement rule is a function (ranks, chunks) -> the rank of each stage; {name!r} has "
            f"{shown(placement)}; pass linear, loop or v of pipesched.program.order"
        )
    if not is_count(num_chains):
        raise ScheduleError(
            f"a schedule runs a whole number of pipelines at once; {name!r} has num_chains={shown(num_chains)}; pass 1 "
            f"or more"
        )
