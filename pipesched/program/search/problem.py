"""Problem: the stages, times and memory limits for which orders are searched. All numbers are integers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pipesched.program.placement import Placement, chunks_of
from pipesched.program.search.compiled import Whole, whole

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT_GRAD",
    "KINDS",
    "ROUNDS",
    "WEIGHT_GRAD",
    "OrderProblem",
    "Resource",
    "Tables",
    "num_evaluated",
]

#: The kinds of actions. An action's code is (stage x number of micro-batches + micro-batch) x KINDS + kind.
FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD = range(4)
KINDS = 4
#: If a step has more than this number of micro-batches per rank, orders are first improved for this number.
ROUNDS = 4
_FEWEST = 16


def num_evaluated(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of micro-batches for which `periodic_search` evaluates orders; 0 for too few micro-batches."""
    return min(num_microbatches, max(ROUNDS * num_ranks, _FEWEST)) if num_microbatches >= _FEWEST else 0


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A limited resource of the ranks, such as memory: the amounts that actions take and give back, and the limits.

    An action takes one amount at its start, and gives back another amount at its end.

    Attributes:
        takes: the amount that each action takes, indexed by kind, stage and micro-batch.
        gives: the amount that each action gives back, indexed in the same way.
        limits: the maximum amount that each rank can hold at once.

    """

    takes: Sequence[Sequence[Sequence[int]]]
    gives: Sequence[Sequence[Sequence[int]]]
    limits: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class OrderProblem:
    """A chain of stages on ranks, with the time of each action.

    Attributes:
        num_ranks: the number of ranks.
        placement: the rank of each stage.
        num_microbatches: the number of micro-batches.
        times: the time of each action, indexed by kind (F, I, W, B), stage and micro-batch.
        forward_lags: the time of each message to the next stage, indexed by stage (all but the last) and micro-batch.
        backward_lags: the time of each message back from the next stage, indexed in the same way.
        resources: the limited resources of the ranks. Default: none.

    """

    num_ranks: int
    placement: Placement
    num_microbatches: int
    times: Sequence[Sequence[Sequence[int]]]
    forward_lags: Sequence[Sequence[int]]
    backward_lags: Sequence[Sequence[int]]
    resources: Sequence[Resource] = field(default=())

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return tuple(chunks_of(self.placement, rank) for rank in range(self.num_ranks))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all micro-batches take the same times and amounts."""
        tables = (*self.times, self.forward_lags, self.backward_lags)
        tables += tuple(table for of in self.resources for table in (*of.takes, *of.gives))
        return all(min(row) == max(row) for table in tables for row in table)

    def shortened(self, count: int) -> "OrderProblem | None":
        """Return the problem with only ``count`` micro-batches; None if it has no more, or if they are not uniform."""
        return replace(self, num_microbatches=count) if count < self.num_microbatches and self.is_uniform else None

    @cached_property
    def fuses(self) -> bool:
        """Whether some B is faster than its I and W together, or takes less of a resource than its I."""
        _, inputs, weights, backwards = map(_flat, self.times)
        if any(b < i + w for i, w, b in zip(inputs, weights, backwards, strict=True)):
            return True
        amounts = [(_flat(of.takes[INPUT_GRAD]), _flat(of.takes[BACKWARD])) for of in self.resources]
        return any(b < i for of in amounts for i, b in zip(*of, strict=True))

    @cached_property
    def tables(self) -> "Tables":
        """The problem as flat sequences."""
        return _tables(self)


class Tables(NamedTuple):
    """A problem as flat sequences, for compiled functions. A slot is a place for one action in a rank's order."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    #: The number of resources.
    num_resources: int
    #: `OrderProblem.fuses` as 1 or 0.
    fuses: int
    #: The initial end times: 0 for actions that need no other action, -1 (not known yet) for all others.
    blank: Whole
    #: The first slot of each rank, followed by the number of all slots.
    first: Whole
    #: The rank of each slot.
    rank_of_slot: Whole
    #: The rank of each stage.
    rank_of: Whole
    #: The stage of each (stage, micro-batch) pair, because a lookup takes less time than a division.
    stage_of: Whole
    #: The position in ``chunks`` of each rank's first stage, followed by the number of stages.
    first_chunk: Whole
    #: The stages of all ranks, rank after rank.
    chunks: Whole
    #: The time of each action.
    seconds: Whole
    #: For each action, the index of the end time that it waits for.
    needs: Whole
    #: For each action, the time of the message that it waits for.
    lag: Whole
    #: For each action, the index of the end time that it sets.
    yields: Whole
    #: For each resource and action, the amount that the action takes at its start.
    takes: Whole
    #: For each resource and action, the amount that the action gives back at its end.
    gives: Whole
    #: For each resource and rank, the limit.
    limits: Whole
    #: For each resource and rank, an amount that suffices to run any micro-batch on all stages of the rank.
    enough: Whole


def _flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [number for row in rows for number in row]


def _tables(problem: OrderProblem) -> Tables:
    count = problem.num_microbatches
    pairs = [(stage, microbatch) for stage in range(problem.num_stages) for microbatch in range(count)]
    actions = [(kind, *pair) for pair in pairs for kind in range(KINDS)]
    free, nobody = 2 * len(pairs), 2 * len(pairs) + 1  # end times for actions that need none or set none
    needs: list[int] = []
    yields: list[int] = []
    lag: list[int] = []
    for kind, stage, microbatch in actions:
        pair = stage * count + microbatch
        if kind == FORWARD and stage > 0:
            needs.append(pair - count)
            lag.append(problem.forward_lags[stage - 1][microbatch])
        elif kind in (INPUT_GRAD, BACKWARD) and stage + 1 < problem.num_stages:
            needs.append(len(pairs) + pair + count)
            lag.append(problem.backward_lags[stage][microbatch])
        else:
            needs.append(free)
            lag.append(0)
        yields.append(nobody if kind == WEIGHT_GRAD else pair if kind == FORWARD else len(pairs) + pair)
    first = [0]
    first_chunk = [0]
    for chunks in problem.chunks:
        first.append(first[-1] + 3 * len(chunks) * count)
        first_chunk.append(first_chunk[-1] + len(chunks))
    of_all = problem.resources
    return Tables(
        num_ranks=problem.num_ranks,
        num_stages=problem.num_stages,
        num_microbatches=count,
        num_resources=len(of_all),
        fuses=int(problem.fuses),
        blank=whole([*[-1] * free, 0, -1]),
        first=whole(first),
        rank_of_slot=whole(rank for rank, chunks in enumerate(problem.chunks) for _ in range(3 * len(chunks) * count)),
        rank_of=whole(problem.placement),
        stage_of=whole(stage for stage, _ in pairs),
        first_chunk=whole(first_chunk),
        chunks=whole(stage for chunks in problem.chunks for stage in chunks),
        seconds=whole(problem.times[kind][stage][microbatch] for kind, stage, microbatch in actions),
        needs=whole(needs),
        lag=whole(lag),
        yields=whole(yields),
        takes=whole(of.takes[kind][stage][microbatch] for of in of_all for kind, stage, microbatch in actions),
        gives=whole(of.gives[kind][stage][microbatch] for of in of_all for kind, stage, microbatch in actions),
        limits=whole(limit for of in of_all for limit in of.limits),
        enough=whole(_enough(of, chunks, count) for of in of_all for chunks in problem.chunks),
    )


def _enough(of: Resource, chunks: Sequence[int], count: int) -> int:
    """Return an amount of a resource that suffices to run any micro-batch, alone, on all stages of a rank."""

    def needed(microbatch: int) -> int:
        forwards = sum(of.takes[FORWARD][stage][microbatch] for stage in chunks)
        kinds = INPUT_GRAD, BACKWARD
        return forwards + max((min(of.takes[kind][stage][microbatch] for kind in kinds) for stage in chunks), default=0)

    return max(map(needed, range(count)))
