"""Partitioner: layer costs -> boundaries, exactly.

The bottleneck of a chain is found by probe and exact bisection on whole numbers (Pinar and Aykanat 2004): a probe
fills stages greedily up to a bound; a failed one raises the lower end to the next bound at which something changes,
a successful one lowers the upper end to the bottleneck it realised.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import networkx as nx

from pipesched.errors import PartitionError, ScheduleError
from pipesched.links import check_times

__all__ = ["Partition", "balance", "partition"]

_TICKS_PER_S = 10**12  # whole numbers, so that sums are exact and ties are ties


@dataclass(frozen=True)
class Partition:
    """Layers by stage. bottleneck_s: the time of the slowest stage; lower_bound_s: what no partition can beat."""

    stages: list[list[Any]]
    bottleneck_s: float
    lower_bound_s: float


def partition(graph: "nx.DiGraph[Any]", num_stages: int) -> Partition:
    """Cut a chain of layers into at most ``num_stages`` non-empty stages with the smallest bottleneck.

    graph: nodes with the attributes ``forward_s`` and ``backward_s`` (seconds), edges from producer to consumer.
    Raises PartitionError where the graph is no chain, or a time is missing or no finite number.
    """
    order = list(nx.topological_sort(graph)) if nx.is_directed_acyclic_graph(graph) else []
    if graph.number_of_edges() != len(order) - 1 or any(not graph.has_edge(a, b) for a, b in pairwise(order)):
        raise PartitionError(
            f"the layers form a chain; this graph has {len(graph)} layers and {graph.number_of_edges()} edges; "
            f"cut a chain, such as the layers of an nn.Sequential"
        )
    columns = [_column(graph, order, name) for name in ("forward_s", "backward_s")]
    times = [forward + backward for forward, backward in zip(*columns, strict=True)]
    starts = balance(times, min(num_stages, len(order)))
    ends = [*starts[1:], len(order)]
    stages = [order[start:end] for start, end in zip(starts, ends, strict=True)]
    loads = [sum(times[start:end]) for start, end in zip(starts, ends, strict=True)]
    return Partition(stages, max(loads, default=0), max([sum(times) / num_stages, *times], default=0))


def _column(graph: "nx.DiGraph[Any]", order: list[Any], name: str) -> list[Any]:
    missing = [node for node in order if name not in graph.nodes[node]]
    if missing:
        raise PartitionError(
            f"a layer has the attributes forward_s and backward_s; {missing[0]!r} has no {name}; measure it"
        )
    column = [graph.nodes[node][name] for node in order]
    _check(column, f"{name} of layer")
    return column


def _check(times: Sequence[Any], what: str) -> None:
    try:
        check_times(times, what)
    except ScheduleError as error:
        raise PartitionError(str(error)) from None


def balance(times: Sequence[float], num_stages: int) -> list[int]:
    """Where each of ``num_stages`` non-empty stages begins, such that the slowest is as fast as can be.

    Raises PartitionError for more stages than layers, fewer than one, or bad times.
    """
    _check(times, "the time of layer")
    if not 1 <= num_stages <= max(1, len(times)):
        raise PartitionError(
            f"every stage holds at least one layer; {num_stages} stages, {len(times)} layers; "
            f"use 1 to {len(times)} stages: fewer devices, or fewer chunks a rank"
        )
    ticks = [round(time * _TICKS_PER_S) for time in times]
    prefix = [0, *accumulate(ticks)]
    low = max(-(-prefix[-1] // num_stages), max(ticks, default=0))
    starts, high = list(range(num_stages)), prefix[-1]
    while low <= high:
        middle = (low + high) // 2
        probed = _probe(prefix, middle, num_stages)
        if probed[-1] == len(ticks):
            starts = _starts(probed, prefix, num_stages)
            high = max(prefix[b] - prefix[a] for a, b in pairwise([0, *probed])) - 1
        else:
            low = min(prefix[end + 1] - prefix[start] for start, end in pairwise([0, *probed]) if end < len(ticks))
    return starts


def _probe(prefix: list[int], bound: int, num_stages: int) -> list[int]:
    """The ends of stages that are each filled as far as the bound allows."""
    ends: list[int] = []
    start = 0
    for _ in range(num_stages):
        start = bisect_right(prefix, prefix[start] + bound) - 1
        ends.append(start)
        if start == len(prefix) - 1:
            break
    return ends


def _starts(ends: list[int], prefix: list[int], num_stages: int) -> list[int]:
    """The begins of exactly ``num_stages`` stages: while there are too few, the slowest that can be is cut in two."""
    cuts = [0, *ends]
    while len(cuts) - 1 < num_stages:
        loads = [(prefix[b] - prefix[a], -a, b) for a, b in pairwise(cuts) if b - a > 1]
        _, negative, end = max(loads)
        begin = -negative
        middle = min(range(begin + 1, end), key=lambda cut: max(prefix[cut] - prefix[begin], prefix[end] - prefix[cut]))
        cuts = sorted([*cuts, middle])
    return cuts[:-1]
