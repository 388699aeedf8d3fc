"""Search: finds the best partition of a model into stages.

The result is exact for chains and small graphs. For large graphs, the search tries several linear orders of the layers
and keeps the best partition that it finds.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from pipesched.partitioning.bisection import INFINITE, FoundPartition, smallest
from pipesched.partitioning.blocks import cuts_of, reduce_blocks
from pipesched.partitioning.linear_orders import linear_orders
from pipesched.partitioning.order_ideals import Ideals, enumerate_ideals
from pipesched.partitioning.problem import CutProblem

__all__ = ["PartitionSolution", "fill_up", "solve"]

_MOST_LIMITED = 100_000  # up to this many ideals, the first search includes memory limits and takes a few seconds
_RESTARTS = 24


@dataclass(frozen=True, kw_only=True)
class PartitionSolution:
    """The result of a search for a partition."""

    #: The best partition; None if no partition exists or none was found.
    found: FoundPartition | None
    #: A lower bound on the bottleneck, in ticks.
    lower: int
    #: Whether it is proved that no partition is better or, if ``found`` is None, that there is no partition.
    exact: bool
    #: The number of order ideals that were searched.
    ideals: int
    #: The number of bounds that were probed.
    probes: int


def solve(problem: CutProblem, most_ideals: int) -> PartitionSolution:
    """Find the partition with the smallest bottleneck. The result is exact if the search is small enough."""
    if problem.options:
        return _with_choices(problem)
    if problem.blocks.is_chain:
        found, probes = _along(problem, range(len(problem.blocks)))
        return _exact(found, 0, probes)
    in_order, tried = _along(problem, range(len(problem.blocks)))
    if in_order is not None and in_order.bottleneck == problem.lower:
        return _exact(in_order, 0, tried)
    may_be_empty = not problem.layout.exactly and not problem.pins
    small = _reduced(problem) if may_be_empty else problem  # otherwise stages may need blocks without cost
    ideals = enumerate_ideals(small.blocks, small.counted, most_ideals)
    if ideals is None:
        return _along_many(problem, problem.lower, in_order, 0, tried)
    known = in_order.bottleneck if in_order else INFINITE
    if problem.layout.capped and len(ideals) > _MOST_LIMITED:
        return _with_limits(problem, small, ideals, in_order, tried)
    return _searched(problem, small, ideals, known, tried)


def _with_choices(problem: CutProblem) -> PartitionSolution:
    """Search the blocks in graph order, with a choice of activation options for each layer."""
    chain = problem.checkpointed_chain(range(len(problem.blocks)))
    slowest = sum(max(option.ticks for option in options) for options in problem.options)
    found, probes = smallest(problem.lower, problem.lower + slowest // len(problem.layout.slots), chain.probe)
    found = found and chain.settled(found)
    solution = _exact(found, 0, probes)
    return solution if chain.knapsack.exact else replace(solution, lower=problem.lower, exact=False)


def _searched(problem: CutProblem, small: CutProblem, ideals: Ideals, known: int, tried: int) -> PartitionSolution:
    """Search all orders of the blocks.

    Args:
        problem: the original problem.
        small: the problem to search, with merged blocks.
        ideals: the order ideals of ``small``.
        known: the bottleneck of a known partition.
        tried: the number of probes so far.

    """
    found, probes = smallest(problem.lower, known, small.lattice(ideals, known).probe)
    return _exact(found and _of(problem, small, found), len(ideals), probes + tried)


def _exact(found: FoundPartition | None, ideals: int, probes: int) -> PartitionSolution:
    lower = found.bottleneck if found else 0
    return PartitionSolution(found=found, lower=lower, exact=True, ideals=ideals, probes=probes)


def _along(problem: CutProblem, order: Sequence[int]) -> tuple[FoundPartition | None, int]:
    """Search one order of the blocks. Returns the best partition and the number of probes."""
    largest = int(problem.blocks.total(problem.blocks.layers.ticks).max())
    return smallest(problem.lower, problem.lower + largest, problem.chain(order).probe)


def _along_many(
    problem: CutProblem, lower: int, best: FoundPartition | None, ideals: int, probes: int
) -> PartitionSolution:
    """Search several orders of the blocks, one after the other, and return the best partition.

    Args:
        problem: the problem.
        lower: a lower bound on the bottleneck.
        best: the best partition so far.
        ideals: the number of order ideals searched so far.
        probes: the number of probes so far.

    """
    for order in linear_orders(problem.blocks, _RESTARTS):
        if best and best.bottleneck == lower:
            break
        chain = problem.chain(order)
        below = lower if best is None else best.bottleneck - 1
        probes += 1
        if best is None or isinstance(chain.probe(below), FoundPartition):
            found, tried = smallest(lower, below, chain.probe)
            best = found or best
            probes += tried
    exact = best is not None and best.bottleneck == lower
    return PartitionSolution(found=best, lower=lower, exact=exact, ideals=ideals, probes=probes)


def _with_limits(
    problem: CutProblem, small: CutProblem, ideals: Ideals, in_order: FoundPartition | None, tried: int
) -> PartitionSolution:
    """Search a graph with many order ideals under memory limits.

    A search without limits gives a lower bound. If the partition found by this search stays within the limits, it is
    the result. Otherwise several orders are searched with limits. If no partition is found, all orders are searched,
    which can take minutes.
    """
    layout = problem.layout
    free = replace(small, layout=layout.without_limits)
    known = in_order.bottleneck if in_order else INFINITE
    unlimited, probes = smallest(problem.lower, known, free.lattice(ideals, known).probe)
    if unlimited is None:
        return _exact(None, len(ideals), tried + probes)
    limits = {(slot.source, slot.target, slot.rank): slot.limit for slot in layout.slots}
    slots = [replace(slot, limit=limits[slot.source, slot.target, slot.rank]) for slot in unlimited.slots]
    found = _of(problem, small, replace(unlimited, slots=slots))
    if _keeps_limits(problem, found):
        return _exact(found, len(ideals), tried + probes)
    solution = _along_many(problem, unlimited.bottleneck, in_order, len(ideals), tried + probes)
    return solution if solution.found else _searched(problem, small, ideals, known, solution.probes)


def _keeps_limits(problem: CutProblem, found: FoundPartition) -> bool:
    cuts = cuts_of(problem.blocks, found.order)
    for slot, (first, last) in zip(found.slots, pairwise([0, *found.ends]), strict=True):
        memory = slot.memory(cuts)
        if slot.limit is not None and memory[last] - memory[first] > slot.limit:
            return False
    return True


def _reduced(problem: CutProblem) -> CutProblem:
    """Return the problem with blocks merged where this does not change the smallest bottleneck."""
    by_size = problem.communication != "none"
    return replace(problem, blocks=reduce_blocks(problem.blocks, by_size=by_size, by_memory=problem.layout.capped))


def _of(problem: CutProblem, small: CutProblem, found: FoundPartition) -> FoundPartition:
    """Convert a partition of the reduced problem to a partition of the original problem."""
    order: list[int] = []
    ends = []
    for first, last in pairwise([0, *found.ends]):
        layers = sorted(layer for block in found.order[first:last] for layer in small.blocks.members[block])
        order += dict.fromkeys(problem.blocks.block_of[layers].tolist())
        ends.append(len(order))
    return replace(found, order=order, ends=ends)


def fill_up(found: FoundPartition, problem: CutProblem) -> FoundPartition:
    """Repeatedly split the slowest stage that has several blocks, until all slots are used or no such stage is left."""
    slots = problem.layout.slots[: len(problem.blocks)]
    work = cuts_of(problem.blocks, found.order).work.tolist()
    return replace(found, ends=filled_up([0, *found.ends], work, len(slots))[1:], slots=list(slots))


def filled_up(cuts: list[int], prefix: list[int], num_stages: int) -> list[int]:
    """Repeatedly split the most expensive stage, as evenly as possible, until there are ``num_stages`` stages.

    ``cuts`` and the result include the first and the last cut; ``prefix`` has the total cost before each cut.
    """
    waiting = [(prefix[a] - prefix[b], a, b) for a, b in pairwise(cuts) if b - a > 1]
    heapify(waiting)
    ends = set(cuts)
    while len(ends) <= num_stages:
        _, first, last = heappop(waiting)
        middle = _middle(prefix, first, last)
        ends.add(middle)
        for a, b in ((first, middle), (middle, last)):
            if b - a > 1:
                heappush(waiting, (prefix[a] - prefix[b], a, b))
    return sorted(ends)


def _middle(prefix: list[int], first: int, last: int) -> int:
    """Return the cut that divides a stage most evenly; on ties, the first such cut."""
    half = prefix[first] + prefix[last]
    above = bisect_left(range(first + 1, last), half, key=lambda cut: 2 * prefix[cut]) + first + 1
    below = max(first + 1, above - 1)
    if above == last or half - prefix[below] - prefix[first] <= prefix[above] - prefix[first]:
        while below > first + 1 and prefix[below - 1] == prefix[below]:
            below -= 1
        return below
    return above
