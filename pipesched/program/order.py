"""Writing schedules: `Order`, `Shape`, `Schedule` and the decorator `schedule`.

A schedule is a function ``def name(rank: int, shape: Shape) -> Order`` that writes the order of one rank:

    @schedule("gpipe")
    def gpipe(rank: int, shape: Shape) -> Order:
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
        for _ in range(shape.num_microbatches):
            order.B(rank)
        return order

Micro-batches are numbered automatically: the first ``order.F(2)`` is 2F0, the next is 2F1. Calls beyond the last
micro-batch add nothing, so a loop written for many micro-batches also works for few.
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
from pipesched.units import counted

__all__ = ["Order", "Schedule", "Shape", "linear", "loop", "schedule", "v"]


@dataclass(frozen=True)
class Shape:
    """The pipeline that an order is written for: the numbers of ranks and micro-batches, and the stage placement."""

    num_ranks: int
    #: The total number of micro-batches over all steps; with token slices, the total number of slices.
    num_microbatches: int
    chunks_per_rank: int
    #: The rank of each stage.
    placement: Placement
    #: The number of pipelines that run at once over the same weights.
    num_chains: int = 1
    #: The number of steps that an asynchronous schedule runs without draining.
    num_steps: int = 1
    #: The number of token slices in a micro-batch. The slices of a micro-batch have consecutive numbers.
    slices_per_microbatch: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank: its stages in ascending order."""
        return chunks_of(self.placement, rank)

    def microbatches(self, stage: int) -> range:
        """Return the micro-batches that pass through a stage.

        If there are several chains, each chain gets a range of micro-batches, and these ranges have near-equal lengths.
        """
        shares = near_equal_parts(self.num_microbatches, self.num_chains)
        nth_chain = stage * self.num_chains // self.num_stages
        first = sum(shares[:nth_chain])
        return range(first, first + shares[nth_chain])

    def exactly(self, count: int, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank. Raises ScheduleError if a rank does not have exactly ``count`` chunks."""
        if self.chunks_per_rank != count:
            raise ScheduleError(
                f"this schedule needs {counted(count, 'stage')} on each rank; got "
                f"chunks_per_rank={self.chunks_per_rank}; cut the model into {count * self.num_ranks} stages for "
                f"{counted(self.num_ranks, 'rank')} (chunks_per_rank={count})"
            )
        return self.chunks(rank)

    def interleaved(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the order of a rank's chunks in interleaved 1F1B (Megatron-LM, Narayanan et al. 2021).

        Micro-batches run group by group (see `groups`). Within a group, forward passes run chunk by chunk, and backward
        passes run from the last chunk to the first.

        Returns:
            The stage of each forward, and the stage of each backward.

        """
        chunks = self.chunks(rank)
        sizes = self.groups()
        forwards = [chunk for size in sizes for chunk in chunks for _ in range(size)]
        backwards = [chunk for size in sizes for chunk in reversed(chunks) for _ in range(size)]
        return forwards, backwards

    def even_ranks(self) -> int:
        """Return the number of ranks of a bidirectional schedule. Raises ScheduleError if it is odd."""
        if self.num_ranks % 2:
            near = [str(count) for count in (self.num_ranks - 1, self.num_ranks + 1) if count]
            raise ScheduleError(
                f"a bidirectional schedule needs an even number of ranks; got {self.num_ranks}; use "
                f"{' or '.join(near)} ranks, with any number of micro-batches"
            )
        return self.num_ranks

    def groups(self) -> list[int]:
        """Return the sizes of the groups of micro-batches for interleaving.

        There are as many groups as possible with at least p micro-batches each, where p is the number of ranks. Their
        sizes differ by at most 1. (In Megatron-LM, every group has p micro-batches.) If there are fewer than p
        micro-batches, they form one group.
        """
        return near_equal_parts(self.num_microbatches, max(1, self.num_microbatches // self.num_ranks))


class Order:
    """The order of one rank, written action by action.

    Each action method appends an action for a stage's next micro-batch, or nothing if no micro-batch is left:

        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
            order.B(rank)

    Args:
        shape: the shape that the schedule's function receives.

    Raises:
        ScheduleError: a method is called with a number that is not a stage, or W is called without an earlier I.

    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._limit = shape.num_microbatches
        #: Each action as one number: (stage x NUM_KINDS + kind) x number of micro-batches + micro-batch.
        self._numbers: list[int] = []
        #: The actions that have not been written yet, indexed by kind and keyed by stage.
        self._left: list[dict[int, Iterator[int]]] = [{} for _ in range(NUM_KINDS)]
        #: The W actions that have not been written yet although their I has been written, keyed by stage.
        self._owed: dict[int, deque[int]] = {}
        self._joined: list[int] = []
        self._versions: dict[tuple[int, int], int] = {}

    def F(self, stage: int, *, version: int | None = None) -> None:
        """Append a forward that uses the weights after ``version`` updates. Default: the newest weights."""
        if self._add(stage, _F) and version is not None:
            self._versions[stage, self._numbers[-1] % self._limit] = version

    def B(self, stage: int) -> None:
        """Append a full backward. Both B and I take the next micro-batch that has neither a B nor an I yet."""
        self._add(stage, _B)

    def I(self, stage: int) -> None:  # noqa: E743
        """Append the input gradients (I) of the next micro-batch. A W for the same micro-batch must follow."""
        if self._add(stage, _B):
            self._numbers[-1] += (_I - _B) * self._limit
            self._owed.setdefault(stage, deque()).append(self._numbers[-1] + (_W - _I) * self._limit)

    def W(self, stage: int) -> None:
        """Append the weight gradients of the oldest I without a W.

        Raises ScheduleError if every I has its W, but some micro-batches have no backward yet.
        """
        if owed := self._owed.get(stage):
            self._numbers.append(owed.popleft())
        elif left := length_hint(self._left[_B].get(stage, range(self._limit))):
            raise ScheduleError(
                f"a W must follow an I of its stage; on stage {stage}, every I already has its W, and "
                f"{counted(left, 'micro-batch')} still need{'s' * (left == 1)} a backward; write order.I({stage}) first"
            )

    def UPDATE(self, stage: int) -> None:
        """Append an optimizer step on a stage's weights, with the gradients accumulated since the last UPDATE."""
        self._add(stage, _UPDATE)

    def overlap(self, forward: int, backward: int) -> None:
        """Append a forward of stage ``forward`` that overlaps with a full backward of stage ``backward``.

        The two actions start and end together.
        """
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
        """Return all actions of one kind on a stage in micro-batch order, encoded as in ``_numbers``."""
        if not isinstance(stage, int) or not 0 <= stage < self._shape.num_stages:
            raise ScheduleError(
                f"an order may only contain actions of the stages 0..{self._shape.num_stages - 1}; got {stage!r}; "
                f"take a stage from shape.chunks(rank)"
            )
        line = (stage * NUM_KINDS + kind) * self._limit
        microbatches = self._shape.microbatches(stage)
        return iter(range(line + microbatches.start, line + microbatches.stop))

    @property
    def actions(self) -> list[Action]:
        """The actions written so far."""
        return list(self.columns())

    def columns(self) -> Columns:
        """Return the actions written so far, as columns."""
        lines, microbatches = np.divmod(np.array(self._numbers, np.int64), self._limit)
        stages, kinds = np.divmod(lines, NUM_KINDS)
        if self._shape.slices_per_microbatch > 1:
            microbatches = np.where(np.isin(kinds, _BACKWARD), self._last_slice_first(microbatches), microbatches)
        columns = Columns.numbered(stages, kinds, microbatches)
        columns.joined[self._joined] = True
        return columns

    def _last_slice_first(self, numbers: Ints) -> Ints:
        """Reverse the order of the slices in each micro-batch, for its backward.

        The backward starts with the last slice, because the forward of this slice uses all other slices.
        """
        whole, part = np.divmod(numbers, self._shape.slices_per_microbatch)
        slices: Ints = (whole + 1) * self._shape.slices_per_microbatch - 1 - part
        return slices

    @property
    def versions(self) -> dict[tuple[int, int], int]:
        """The weight versions passed to ``F`` as ``version=``, keyed by (stage, micro-batch)."""
        return self._versions


_F, _B, _I, _W, _UPDATE = (CODES[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.UPDATE))
_BACKWARD = (_B, _I, _W)

#: The function of a schedule: (rank, shape) -> Order, or (shape) -> list of Orders if the ranks' orders depend on each
#: other. Its keyword-only parameters are the options of the schedule, and must have defaults.
OrderFunction = Callable[..., Any]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule, which builds the program for any number of ranks and micro-batches.

    Get a schedule by name with `pipesched.schedules.get`, or write a function with the decorator `schedule`:

        zb_v = pipesched.schedules.get("zb-v")
        program = zb_v.program(num_ranks=4, num_microbatches=8)
        wider = pipesched.schedules.get("interleaved-1f1b").with_options(chunks_per_rank=4)

    Args:
        name: the schedule's name, such as "zb-v".
        function: (rank, shape) -> Order, or (shape) -> the Orders of all ranks.
        placement: (num_ranks, chunks_per_rank) -> the rank of each stage.
        options: the options and their defaults. Default: none.
        num_chains: the number of pipelines that run at once over the same weights. Default: 1.
        given: the names of the options that `with_options` has set; ignored by ``==``. Default: none.

    """

    name: str
    function: OrderFunction
    placement: PlacementRule
    options: Mapping[str, Any] = field(default_factory=dict)
    num_chains: int = 1
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def description(self) -> str:
        """The docstring of the schedule's function."""
        return inspect.getdoc(self.function) or ""

    @property
    def searches(self) -> bool:
        """Whether the function returns the orders of all ranks. Such functions usually search, which takes longer."""
        return len(_required(self.function)) == 1

    @property
    def module(self) -> str:
        """The name of the module that defines the schedule."""
        return self.function.__module__

    @property
    def chunks_per_rank(self) -> int:
        """The number of stages that a rank holds: an option of schedules with chunks, otherwise 1."""
        return self.options.get("chunks_per_rank", 1)  # type: ignore[no-any-return]

    @property
    def fixed_placement(self) -> Placement | None:
        """The rank of each stage, if the option ``placement`` has been set. Raises ScheduleError if it is invalid."""
        given = self.options.get("placement")
        if given is None:
            return None
        if not isinstance(given, Iterable) or isinstance(given, str | bytes):
            raise ScheduleError(
                f"placement= must be a list with the rank of each stage; got {shown(given)}; pass a list"
            )
        ranks = tuple(given)
        if not all(is_count(rank, 0) for rank in ranks) or set(ranks) != set(range(max(ranks, default=0) + 1)):
            raise ScheduleError(
                f"placement= must be a list with the rank of each stage, and every rank must hold a stage; got "
                f"{shown(given)}; for example, pass (0, 1, 1, 0)"
            )
        return ranks

    def with_options(self, **options: Any) -> "Schedule":
        """Return a copy of the schedule with new values for some options.

        Args:
            options: new values by name, such as ``chunks_per_rank=4``. Other options keep their values.

        Raises:
            ScheduleError: the schedule has no such option.

        """
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = ", ".join(self.options)
            raise ScheduleError(
                f"schedule {self.name!r} takes {f'only the options {known}' if known else 'no options'}; got "
                f"{unknown[0]}={options[unknown[0]]!r}; leave it out"
            )
        return replace(self, options={**self.options, **options}, given=self.given | set(options))

    def program(self, num_ranks: int, num_microbatches: int, *, steps: int = 1, **options: Any) -> Program:
        """Build the program for a number of ranks and micro-batches.

        Args:
            num_ranks: the number of ranks, at least 1.
            num_microbatches: the number of micro-batches of a step, at least 1.
            steps: the number of steps to run without draining the pipeline in between, for schedules with updates.
                Default: 1.
            options: values of the schedule's options for this program, such as ``chunks_per_rank=4``.

        Returns:
            The program, without communication; `lower` adds the communication.

        Raises:
            ScheduleError: a count is below 1, an option is unknown, or the schedule does not support these counts.

        """
        if options:
            return self.with_options(**options).program(num_ranks, num_microbatches, steps=steps)
        own_options = {name: value for name, value in self.options.items() if name not in _OF_THE_SHAPE}
        slices = self.options.get("slices_per_microbatch", 1)
        fixed = self.fixed_placement
        chunks_per_rank = self.chunks_per_rank if fixed is None else max(map(fixed.count, fixed))
        counts = {"ranks": num_ranks, "micro-batches": num_microbatches, "chunks per rank": chunks_per_rank}
        counts |= {"steps": steps, "slices per micro-batch": slices}
        for name, count in counts.items():
            if not is_count(count):
                raise ScheduleError(
                    f"schedule {self.name!r} needs a whole number of {name}, at least 1; got {shown(count)}; pass 1 "
                    f"or more"
                )
        units = num_microbatches * steps * slices
        if (pairs := num_ranks * chunks_per_rank * self.num_chains * units) > _MOST_PAIRS:
            raise ScheduleError(
                f"a program may have at most {_MOST_PAIRS:,} pairs of a stage and a micro-batch; {self.name!r} has "
                f"{pairs:,} for {', '.join(f'{count:,} {name}' for name, count in counts.items() if count > 1)}; use "
                f"fewer micro-batches, ranks or chunks per rank"
            )
        placement = self._placed(num_ranks)
        shape = Shape(
            num_ranks=num_ranks,
            num_microbatches=units,
            chunks_per_rank=chunks_per_rank,
            placement=placement,
            num_chains=self.num_chains,
            num_steps=steps,
            slices_per_microbatch=slices,
        )
        orders = self._written(shape, own_options)
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
                f"steps= must be 1 for a schedule without UPDATE actions; {self.name!r} has none, and steps={steps} "
                f"was passed; pass steps=1"
            )
        return program if self.num_chains == 1 else _with_chains(program, shape)

    def _placed(self, num_ranks: int) -> Placement:
        """Return the rank of each stage. Raises ScheduleError if ``placement`` needs another number of ranks."""
        fixed = self.fixed_placement
        if fixed is None:
            return self.placement(num_ranks, self.chunks_per_rank * self.num_chains)
        if max(fixed) + 1 != num_ranks:
            raise ScheduleError(
                f"placement= must place stages on all {counted(num_ranks, 'rank')}; its ranks are 0..{max(fixed)}; "
                f"correct the placement, or use {counted(max(fixed) + 1, 'rank')}"
            )
        return fixed

    def _written(self, shape: Shape, options: Mapping[str, Any]) -> list[Order]:
        if self.searches:
            written = self.function(shape, **options)
            orders = list(written) if isinstance(written, Iterable) else [written]
        else:
            orders = [self.function(rank, shape, **options) for rank in range(shape.num_ranks)]
        strange = [order for order in orders if not isinstance(order, Order)]
        if strange or len(orders) != shape.num_ranks:
            got = repr(strange[0]) if strange else f"{counted(len(orders), 'Order')}"
            raise ScheduleError(
                f"a schedule must return an Order for each of {shape.num_ranks} ranks; {self.name!r} returned {got}; "
                f"end the function with 'return order'"
            )
        return orders


def _required(function: OrderFunction) -> list[str]:
    """Return the names of the positional parameters of a schedule's function that have no default."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]


def _versions(orders: Sequence[Order], shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the weight versions passed to ``Order.F``, indexed by stage and micro-batch.

    The entry of a stage without versions is ().
    """
    written = {pair: version for order in orders for pair, version in order.versions.items()}
    stages = {stage for stage, _ in written}
    return tuple(
        tuple(written.get((stage, microbatch), 0) for microbatch in range(shape.num_microbatches))
        if stage in stages
        else ()
        for stage in range(shape.num_stages if stages else 0)
    )


def _with_chains(program: Program, shape: Shape) -> Program:
    """Set the ``weights`` and ``routes`` of a program in which several chains use the same weights."""
    length = shape.num_stages // shape.num_chains
    routes: list[tuple[int, ...]] = []
    for first in range(0, shape.num_stages, length):
        routes += [tuple(range(first, first + length))] * len(shape.microbatches(first))
    return replace(program, weights=tuple(range(length)) * shape.num_chains, routes=tuple(routes))


_MOST_PAIRS = 10**8  # a program with this many pairs takes about 10 GB of memory
#: Options that the schedule's function receives as fields of the shape, not as keyword arguments.
_OF_THE_SHAPE = ("chunks_per_rank", "slices_per_microbatch")


def schedule(
    name: str,
    *,
    placement: PlacementRule = linear,
    chunks_per_rank: int | None = None,
    num_chains: int = 1,
    slices_per_microbatch: int | None = None,
) -> Callable[[OrderFunction], Schedule]:
    """Turn a function that writes one rank's order into a `Schedule`.

        @pipesched.schedule("my-gpipe")
        def my_gpipe(rank: int, shape: pipesched.Shape) -> pipesched.Order:
            order = pipesched.Order(shape)
            for _ in range(shape.num_microbatches):
                order.F(rank)
            for _ in range(shape.num_microbatches):
                order.B(rank)
            return order

    Args:
        name: the schedule's name, in kebab-case.
        placement: the rule that places stages on ranks: linear, loop or v, or a function (num_ranks, chunks_per_rank)
            -> the rank of each stage. Default: linear.
        chunks_per_rank: the default number of stages that a rank holds. It becomes an option of the schedule. Default:
            None (always one stage per rank).
        num_chains: the number of pipelines that run at once over the same weights, each with its share of the
            micro-batches. With two chains of p stages, stage s of the second chain has the number p + s. Default: 1.
        slices_per_microbatch: the default number of token slices of a micro-batch, for schedules that run causal models
            slice by slice. It becomes an option of the schedule. Default: None (no slices).

    Returns:
        A decorator for the function.

    Raises:
        ScheduleError: an argument is invalid, the function's positional parameters are neither (rank, shape) nor
            (shape), or an option of the function has no default.

    """
    _check_arguments(name, placement, num_chains)

    def decorate(function: OrderFunction) -> Schedule:
        if not callable(function):
            raise ScheduleError(
                f"a schedule must be a function (rank, shape) -> Order; {name!r} is {shown(function)}; decorate a "
                f"function"
            )
        parameters = inspect.signature(function).parameters.values()
        keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        bare = [option for option, default in keywords.items() if default is inspect.Parameter.empty]
        if bare:
            raise ScheduleError(
                f"every option of a schedule must have a default; {bare[0]!r} of {name!r} has none; give it a default"
            )
        if len(_required(function)) not in (1, 2):
            raise ScheduleError(
                f"a schedule must be a function (rank, shape) -> Order, or (shape) -> the Orders of all ranks; "
                f"{name!r} takes ({', '.join(_required(function))}); make the options keyword-only, with defaults, "
                f"after a '*'"
            )
        shape = {"chunks_per_rank": chunks_per_rank, "slices_per_microbatch": slices_per_microbatch}
        options = {option: count for option, count in shape.items() if count is not None} | keywords
        return Schedule(name=name, function=function, placement=placement, options=options, num_chains=num_chains)

    return decorate


def _check_arguments(name: Any, placement: Any, num_chains: Any) -> None:
    """Raise ScheduleError for an invalid argument of ``schedule``. `Schedule.program` checks the chunks and slices."""
    if not isinstance(name, str) or not name:
        raise ScheduleError(
            f"a schedule must have a name; got {shown(name)}; write @schedule('my-schedule') above the function"
        )
    if not callable(placement):
        raise ScheduleError(
            f"a placement rule must be a function (num_ranks, chunks_per_rank) -> the rank of each stage; {name!r} has "
            f"{shown(placement)}; pass linear, loop or v from pipesched.order"
        )
    if not is_count(num_chains):
        raise ScheduleError(
            f"num_chains must be a whole number, at least 1; {name!r} has num_chains={shown(num_chains)}; "
            f"pass 1 or more"
        )
