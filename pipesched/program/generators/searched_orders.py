"""Searched orders: turns costs in seconds into a search problem, and the result of the search into orders.

The search uses whole numbers as times. Costs that are integers or fractions are converted exactly if no result
exceeds 2**32. Otherwise, the longest time becomes 2**32, and all others are scaled by the same factor and rounded.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from numbers import Rational
from typing import Any, Protocol

import numpy as np

from pipesched.checks import is_count, is_whole, shown
from pipesched.errors import MemoryLimitError, ScheduleError
from pipesched.program.action_arrays import CODES
from pipesched.program.actions import Kind
from pipesched.program.generators.zero_bubble import ActionCosts
from pipesched.program.liveness import peak_in_flight, rank_limits
from pipesched.program.order import Order, Schedule, Shape
from pipesched.program.program import Program
from pipesched.program.search.problem import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    ROUNDS,
    WEIGHT_GRAD,
    OrderProblem,
    Resource,
    num_evaluated,
)
from pipesched.units import counted

__all__ = ["StageCosts", "num_changes", "num_lists", "num_steps", "searched_orders", "shortened_orders"]

_STEPS = 2_400_000  # the number of annealing steps at effort 1
_LISTS = 600  # the number of list schedules at effort 1
_FEW_LISTS = 16  # the minimum number of list schedules
_LISTED = 160_000  # the maximum total number of actions of all list schedules, unless _FEW_LISTS schedules have more
_CLIMBS = 700  # the maximum number of list schedules that rule search writes, at effort 1
_FEW_ACTIONS = 100  # with at most this many actions, annealing takes all its steps, and rule search is skipped
_CLIMBED = 2_100_000  # the maximum total number of actions of the list schedules of rule search, at effort 1
_CHANGES = 16_000  # the number of orders that periodic search evaluates, at effort 1
_CHANGED = 24_000_000  # the maximum total number of actions of these orders, at effort 1
_LONGEST_S = 20.0  # how long a search of effort 1 takes in plain Python, at most
_FEW_CHANGES = 500  # periodic search is skipped if it could evaluate fewer orders than this
_LONGEST = 1 << 32  # the longest time, in units of the search
_MOST_SEARCHED = 20_000  # with more (stage, micro-batch) pairs, a search does not start from schedules that search too
_KIND_OF = {Kind.F: FORWARD, Kind.I: INPUT_GRAD, Kind.W: WEIGHT_GRAD, Kind.B: BACKWARD}
_WRITE: tuple[Callable[[Order, int], None], ...] = (Order.F, Order.I, Order.W, Order.B)


class _LinkTimes(Protocol):
    """The links between ranks, as in ``pipesched.simulation.links``."""

    def latencies(self, senders: Any, receivers: Any) -> Any:
        """Return the latency of each message in seconds."""

    def travel(self, senders: Any, receivers: Any, sizes: Any) -> Any:
        """Return the time for which each message occupies its link, in seconds."""


class StageCosts(ActionCosts, Protocol):
    """The attributes of ``pipesched.Costs`` that the search reads: seconds and bytes of each stage."""

    @property
    def backward_s(self) -> Sequence[float]:
        """The seconds that a full backward (B) takes on each stage."""

    @property
    def links(self) -> _LinkTimes | None:
        """The links between ranks, or None."""

    @property
    def output_bytes(self) -> Sequence[int]:
        """The size of each stage's output in bytes."""

    @property
    def activation_bytes(self) -> Sequence[int]:
        """The bytes of activations that each stage holds for one micro-batch, from the F to the I or B."""

    @property
    def weight_grad_bytes(self) -> Sequence[int]:
        """The bytes that each stage holds for one micro-batch from the I to the W."""


def searched_orders(
    shape: Shape,
    costs: StageCosts | Sequence[StageCosts] | None,
    *,
    limits: dict[str, int | Sequence[int] | None],
    effort: float,
    starts: Iterable[Schedule | Program],
) -> list[Order]:
    """Search for the orders of all ranks with the shortest makespan.

    The program is exact (see `Program.exact`). Its makespan is at most that of any program in ``starts`` that is within
    the limits. The limit ``max_in_flight`` is the maximum number of (stage, micro-batch) pairs on a rank;
    ``memory_limit_bytes`` is the maximum number of bytes that a rank's micro-batches hold.

    Args:
        shape: the ranks, micro-batches and placement.
        costs: the costs of the stages, or a list with the costs of each micro-batch. None: every F, I and W takes the
            same time.
        limits: the two limits, keyed by name. Each is one number, a list with one number per rank, or None.
        effort: the number of search steps, relative to the default.
        starts: schedules and programs to start from. Starts that do not fit the shape or the limits are skipped.

    Raises:
        ScheduleError: an argument is invalid.
        MemoryLimitError: no orders stay within the limits.

    """
    if not isinstance(effort, int | float | Fraction) or not 0 <= effort < _LONGEST:
        raise ScheduleError(f"effort must be a number, at least 0; got {shown(effort)}; pass 1 for the default")
    from pipesched.program.search.compiled import MACHINE_CODE  # here, because the modules import numpy
    from pipesched.program.search.search import search

    of_each = _of_each_microbatch(shape, costs)
    resources = _resources(shape, of_each, limits)
    passed: dict[str, Any] = {"costs": of_each[0] if costs is not None and len(set(map(id, of_each))) == 1 else None}
    passed |= {"max_in_flight": limits["max_in_flight"] if is_count(limits["max_in_flight"]) else None}
    known = [_codes(program) for program in _known(shape, starts, passed)]
    actions = 3 * shape.num_stages * shape.num_microbatches
    evaluated = 3 * shape.num_stages * num_evaluated(shape.num_ranks, shape.num_microbatches)
    found = MACHINE_CODE.run(
        lambda: search(
            _problem(shape, of_each, resources),
            known,
            steps=num_steps(actions, effort),
            lists=num_lists(actions, effort),
            climbs=_climbs(shape, effort),
            changes=num_changes(evaluated, effort),
        ),
        expected_s=_LONGEST_S * effort,
    )
    if found is None:
        given = ", ".join(f"{name}={shown(limit)}" for name, limit in limits.items() if limit is not None)
        raise MemoryLimitError(
            f"a rank must have room for a micro-batch on each of its stages; no order was found for "
            f"{counted(shape.num_stages, 'stage')} on {counted(shape.num_ranks, 'rank')} within {given}; raise the "
            f"limit, use more ranks, or cut the model into smaller stages"
        )
    return [_order(shape, codes) for codes in found.orders]


def num_steps(actions: int, effort: float) -> int:
    """Return the number of annealing steps for a program with this number of actions."""
    return int(_STEPS * effort * min(1, _FEW_ACTIONS / actions) ** 3.2)


def num_lists(actions: int, effort: float) -> int:
    """Return the number of list schedules to try for a program with this number of actions."""
    return max(_FEW_LISTS, min(int(_LISTS * math.sqrt(effort)), _LISTED // actions))


def _climbs(shape: Shape, effort: float) -> int:
    """Return the maximum number of list schedules for `rule_search`; 0 for problems that annealing solves better."""
    actions = 3 * shape.num_stages * min(shape.num_microbatches, ROUNDS * shape.num_ranks)
    if actions <= _FEW_ACTIONS:
        return 0
    return int(effort * min(_CLIMBS, _CLIMBED // actions))


def num_changes(actions: int, effort: float) -> int:
    """Return the number of orders that `periodic_search` evaluates, with this number of actions each.

    Returns 0 if these would be too few orders to help, or if there are no actions (see `num_evaluated`).
    """
    changes = int(effort * min(_CHANGES, _CHANGED // max(1, actions)))
    return changes if actions and changes >= _FEW_CHANGES else 0


def shortened_orders(shape: Shape, found: Program) -> list[Order]:
    """Return the orders of a program, excluding the micro-batches that the shape does not have.

    Raises ScheduleError if the program has a different placement, or cannot be the result of a search.
    """
    if found.placement != shape.placement or found.num_ranks != shape.num_ranks or not _is_searched(found):
        raise ScheduleError(
            f"found= must be the program of an earlier search for the same placement; it places the stages on ranks "
            f"{found.placement}, but the pipeline places them on {shape.placement}; also pass "
            f"placement=program.placement"
        )
    rows = found.columns.microbatch < shape.num_microbatches
    kept = replace(found, orders=found.orders.where(rows), num_microbatches=shape.num_microbatches)
    return [_order(shape, codes) for codes in _codes(kept)]


class _EqualCosts:
    """The default costs: each F, I and W takes the same time, and messages take no time."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.forward_s = self.input_grad_s = self.weight_grad_s = (1,) * num_stages
        self.backward_s = (2,) * num_stages
        self.transfer_s = 0
        self.links = None
        self.output_bytes = self.activation_bytes = self.weight_grad_bytes = (0,) * num_stages


_FIELDS = tuple(vars(_EqualCosts(1)))


def _of_each_microbatch(shape: Shape, costs: Any) -> list[StageCosts]:
    """Return the costs of each micro-batch. Raises ScheduleError for costs that do not fit the shape."""
    if costs is None:
        costs = _EqualCosts(shape.num_stages)
    several = isinstance(costs, Sequence) and not isinstance(costs, str)
    of_each = list(costs) if several else [costs] * shape.num_microbatches
    if len(of_each) != shape.num_microbatches:
        raise ScheduleError(
            f"costs= must be one pipesched.Costs, or one for each micro-batch; got {len(of_each)}"
            f" for {counted(shape.num_microbatches, 'micro-batch')}; make the numbers agree"
        )
    for own in {id(own): own for own in of_each}.values():
        if not all(hasattr(own, name) for name in _FIELDS):
            raise ScheduleError(
                f"costs= must be a pipesched.Costs with one number for each stage; got {shown(own)}; pass Costs(...)"
            )
        if own.num_stages != shape.num_stages:
            raise ScheduleError(
                f"costs must have one number for each stage; there are {counted(shape.num_stages, 'stage')}, but the "
                f"costs have {own.num_stages}; pass costs for {counted(shape.num_stages, 'stage')}"
            )
    return of_each


def _problem(shape: Shape, of_each: Sequence[StageCosts], resources: Sequence[Resource]) -> OrderProblem:
    """Return the search problem, with all times as integer multiples of a common unit."""
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    times = [[[getattr(own, name)[stage] for own in of_each] for stage in range(shape.num_stages)] for name in names]
    ways = list(zip(shape.placement, shape.placement[1:], strict=False))
    there = [[_lag(own, way[0], way[1], stage) for own in of_each] for stage, way in enumerate(ways)]
    back = [[_lag(own, way[1], way[0], stage) for own in of_each] for stage, way in enumerate(ways)]
    tables = [*times, there, back]
    numbers = {number for table in tables for row in table for number in row}
    unit = _unit(numbers)
    rounded = {number: round(number * unit) for number in numbers}
    whole = [[[rounded[number] for number in row] for row in table] for table in tables]
    return OrderProblem(
        num_ranks=shape.num_ranks,
        placement=shape.placement,
        num_microbatches=shape.num_microbatches,
        times=whole[:KINDS],
        forward_lags=whole[KINDS],
        backward_lags=whole[KINDS + 1],
        resources=resources,
    )


def _lag(costs: StageCosts, sender: int, receiver: int, stage: int) -> float:
    """Return the time in seconds to send a stage's output, or its gradient, between two ranks; 0 within a rank."""
    if sender == receiver:
        return 0
    if costs.links is None:
        return costs.transfer_s
    ends = np.array([sender]), np.array([receiver])
    sizes = np.array([costs.output_bytes[stage]], object)
    own: float = costs.links.latencies(*ends)[0] + costs.links.travel(*ends, sizes)[0]
    return costs.transfer_s + own


def _unit(times: set[float]) -> Fraction:
    """Return the number by which times are multiplied before they are rounded to whole numbers."""
    longest = max(times)
    if longest <= 0:
        return Fraction(1)
    if all(isinstance(time, Rational) for time in times):
        exact = [Fraction(time) for time in times]
        unit = Fraction(math.lcm(*(time.denominator for time in exact)))
        unit /= math.gcd(*(int(time * unit) for time in exact))
        if longest * unit <= _LONGEST:
            return unit
    return _LONGEST / Fraction(longest)


def _resources(shape: Shape, of_each: Sequence[StageCosts], limits: dict[str, Any]) -> list[Resource]:
    """Return the resources that have a limit: the (stage, micro-batch) pairs in flight, and the bytes held."""
    stages = range(shape.num_stages)

    def table(amounts: Callable[[StageCosts], Sequence[int]]) -> list[list[int]]:
        return [[amounts(own)[stage] for own in of_each] for stage in stages]

    none = table(lambda _: (0,) * shape.num_stages)
    one = table(lambda _: (1,) * shape.num_stages)
    activations = table(lambda own: own.activation_bytes)
    weight_grads = table(lambda own: own.weight_grad_bytes)
    amounts = {
        "max_in_flight": ([one, none, none, none], [none, none, one, one]),
        "memory_limit_bytes": ([activations, weight_grads, none, none], [none, activations, weight_grads, activations]),
    }
    return [
        Resource(takes=amounts[name][0], gives=amounts[name][1], limits=_limits(shape, name, limit))
        for name, limit in limits.items()
        if limit is not None
    ]


def _limits(shape: Shape, name: str, limit: Any) -> list[int]:
    """Return the limit of each rank. Raises ScheduleError for a wrong type, number or length."""
    own = rank_limits(limit, shape.num_ranks) if name == "max_in_flight" else _as_list(limit, shape.num_ranks)
    if not all(is_whole(number) for number in own) or len(own) != shape.num_ranks:
        raise ScheduleError(
            f"{name} must be a whole number, or a list with one for each rank; got {shown(limit)} for "
            f"{counted(shape.num_ranks, 'rank')}; pass one number, or a list of {shape.num_ranks}"
        )
    if name == "max_in_flight":
        for rank, number in enumerate(own):
            if number < len(shape.chunks(rank)):
                raise ScheduleError(
                    f"a rank must have room for a micro-batch on each of its stages; rank {rank} has "
                    f"{counted(len(shape.chunks(rank)), 'stage')}, but max_in_flight allows {number}; pass "
                    f"{len(shape.chunks(rank))} or more"
                )
    return [max(0, min(number, _LONGEST << 28)) for number in own]


def _as_list(limit: Any, num_ranks: int) -> list[Any]:
    return list(limit) if isinstance(limit, Iterable) else [limit] * num_ranks


def _known(shape: Shape, starts: Iterable[Schedule | Program], passed: dict[str, Any]) -> list[Program]:
    """Return the programs to start from, the simplest first.

    Programs without a split backward come before programs with one. Within each group, programs that were built without
    a search come first. Programs that are equal in both respects are sorted by the number of micro-batches in flight.
    """
    found = []
    for start in starts:
        program = start if isinstance(start, Program) else _built(start, shape, passed)
        if program is not None and _is_start(program, shape):
            searches = isinstance(start, Schedule) and start.searches
            peak = sum(peak_in_flight(program.orders.rank(rank)) for rank in range(program.num_ranks))
            found.append((bool(program.columns.are(Kind.I).any()), searches, peak, program.name, program))
    return [program for *_, program in sorted(found, key=lambda entry: entry[:-1])]


def _built(schedule: Schedule, shape: Shape, passed: dict[str, Any]) -> Program | None:
    """Return a schedule's program for the shape, or None if the schedule does not support the shape."""
    large = shape.num_stages * shape.num_microbatches > _MOST_SEARCHED
    if schedule.num_chains > 1 or (large and schedule.searches):
        return None
    options = {name: value for name, value in passed.items() if name in schedule.options and value is not None}
    chunks, rest = divmod(shape.num_stages, shape.num_ranks)
    if "chunks_per_rank" in schedule.options:
        options["chunks_per_rank"] = chunks
    elif chunks != 1:
        return None
    if rest or tuple(schedule.placement(shape.num_ranks, chunks)) != shape.placement:
        return None
    try:
        return schedule.program(shape.num_ranks, shape.num_microbatches, **options)
    except ScheduleError:  # the schedule does not support these counts or limits
        return None


def _is_start(program: Program, shape: Shape) -> bool:
    same = (program.placement, program.num_microbatches) == (shape.placement, shape.num_microbatches)
    return same and _is_searched(program) and program.num_ranks == shape.num_ranks


def _is_searched(program: Program) -> bool:
    """Return whether a program is exact (see `Program.exact`), is a chain of stages, and has only F, I, W and B."""
    kinds = set(np.unique(program.columns.kind).tolist()) <= {CODES[kind] for kind in _KIND_OF}
    return kinds and program.exact and program.is_chain


def _codes(program: Program) -> list[list[int]]:
    """Return the orders of a program as codes of actions."""
    columns = program.columns
    kinds = np.array([_KIND_OF.get(kind, -1) for kind in CODES])
    codes = (columns.stage * program.num_microbatches + columns.microbatch) * KINDS + kinds[columns.kind]
    return [own.tolist() for own in np.split(codes, program.orders.offsets[1:-1])]


def _order(shape: Shape, codes: Sequence[int]) -> Order:
    order = Order(shape)
    for code in codes:
        _WRITE[code % KINDS](order, code // KINDS // shape.num_microbatches)
    return order
