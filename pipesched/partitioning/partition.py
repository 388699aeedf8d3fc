"""`partition`: divides a graph of measured layers into stages with the smallest bottleneck.

The smallest bottleneck is found by exact bisection on integers (Pinar and Aykanat 2004). Each step calls a probe, which
looks for a partition whose bottleneck is within a bound. A failed probe raises the lower end of the bisection to the
next bound at which the result can change. A successful probe lowers the upper end to the bottleneck of the partition
that it found. The package docstring of `pipesched.partitioning` lists the probes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np

from pipesched.checks import as_list
from pipesched.errors import PartitionError
from pipesched.partitioning.bisection import smallest
from pipesched.partitioning.blocks import Cuts
from pipesched.partitioning.chain import ChainSearch
from pipesched.partitioning.explanation import explained
from pipesched.partitioning.interleaving import solved
from pipesched.partitioning.layer_arrays import numbers, ticks_per_s
from pipesched.partitioning.no_partition import no_partition_error
from pipesched.partitioning.problem import Communication
from pipesched.partitioning.request import InFlight, Request
from pipesched.partitioning.result import Partition
from pipesched.partitioning.search import fill_up, filled_up
from pipesched.partitioning.slots import RankCapacity, TransferCost, fixed_order
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.units import counted

__all__ = ["Partition", "balance", "partition"]


def partition(
    graph: "nx.DiGraph[Any]",
    num_stages: int,
    *,
    communication: Communication = "none",
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float = 0,
    memory_limit_bytes: float | str | Sequence[float | str] | None = None,
    in_flight: InFlight | None = None,
    weight_copies: float = 4,
    speeds: Sequence[float] | None = None,
    any_order: bool = False,
    starts: Mapping[Any, int] | None = None,
    together: Iterable[Collection[Any]] = (),
    exactly: bool = False,
    placement: Sequence[int] | None = None,
    checkpoint: Collection[LayerCheckpoint] = (),
    offload_bytes_per_s: float | None = None,
    max_ideals: int = 300_000,
) -> Partition:
    """Divide a graph of layers into pipeline stages, so that the slowest stage is as fast as possible.

        graph = pipesched.graph_of(model, sample)            # or a networkx.DiGraph of your own
        found = pipesched.partition(graph, 4, memory_limit_bytes=16 * 2**30)
        print(found)                                         # the stages, and why no other partition is faster
        found.stages                                         # [["embed", "block.0"], ["block.1"], ...]

    Layers have the node attributes ``forward_s`` and ``backward_s`` (seconds) and, where the arguments below use them,
    ``output_bytes``, ``parameter_bytes``, ``num_parameters`` and ``activation_bytes`` (for each micro-batch in flight;
    default: ``output_bytes``). With ``checkpoint``, the memory of a stage also includes the attributes
    ``forward_transient_bytes`` and ``backward_transient_bytes``. An edge with an attribute ``tensors``, a dict
    {name: bytes}, carries only these tensors. Any other edge carries its producer's whole output.

    The result is optimal for a chain, and for a graph with at most ``max_ideals`` order ideals. An order ideal is a set
    of layers that contains all producers of its layers. For other graphs, several linear orders are searched, and
    `Partition.gap` is an upper bound on how far the bottleneck is above the optimum. Memory limits on a large graph can
    also leave a gap. Identical arguments give identical partitions. The search is exact bisection on integers (Pinar
    and Aykanat 2004).

    Args:
        graph: the layers, a networkx.DiGraph with an edge from each layer to its consumers.
        num_stages: the largest number of stages. No stage is empty.
        communication: "none"; "overlap": transfers run while ranks compute, and a link can be the bottleneck
            (PipeDream, Narayanan et al. 2019); or "serial": stages wait for their transfers. Default: "none".
        bandwidth_bytes_per_s: the bandwidth of the link between stages, required unless communication is "none". A
            tensor that skips stages crosses every cut on its way.
        latency_s: the latency of the link, in seconds. Default: 0.
        memory_limit_bytes: the memory of each rank, in bytes or as text such as "16GB" (10**9 bytes) or "16GiB" (2**30
            bytes): one limit for all ranks, or one for each rank. Default: None (no limit).
        in_flight: the number of micro-batches in flight on each stage: a list with a number for each stage, or a
            function of (stage, num_stages) that returns the number. Default: 1.
        weight_copies: the size of parameters, gradients and optimizer state, as a multiple of the parameters' size.
            Default: 4, for weights, gradients and the two moments of Adam.
        speeds: the speed of each rank relative to the rank on which the layers were measured, in stage order.
            Default: all 1.
        any_order: whether the search can put stages on ranks in any order. Default: False (ranks keep their order).
        starts: {layer: stage} for layers that must begin a stage. Such a layer is in this stage, and all layers on
            which it depends are in earlier stages. Default: none.
        together: groups of layers that must share a stage. Default: none.
        exactly: whether to use exactly ``num_stages`` stages. Default: False.
        placement: the rank of each stage, for ranks with several stages (see `pipesched.program.placement`). The
            busiest rank is then the bottleneck. The search minimises the time of this rank by descent, which can leave
            a gap. Default: one stage per rank.
        checkpoint: the ways to save activation memory where memory is short: "recompute", "offload" or both. The
            search chooses one of these ways, or none, for each layer. Layers stay in graph order. Default: () (all
            activations stay on the device).
        offload_bytes_per_s: the bandwidth to the host and back, required for "offload".
        max_ideals: the largest number of order ideals to search exactly. Default: 300,000.

    Returns:
        The partition: the layers of each stage, with the time and memory of the stages.

    Raises:
        PartitionError: if an argument is invalid or no partition exists. The message suggests a remedy.

    """
    rule = "together= must be a list of groups of layers that share a stage"
    remedy = "pass a list such as [(first, second)]"
    request = Request(
        graph=graph,
        num_stages=num_stages,
        communication=communication,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        latency_s=latency_s,
        memory_limit_bytes=memory_limit_bytes,
        in_flight=in_flight,
        weight_copies=weight_copies,
        speeds=speeds,
        any_order=any_order,
        starts={} if starts is None else starts,
        together=tuple(tuple(as_list(group, rule, remedy)) for group in as_list(together, rule, remedy)),
        exactly=exactly,
        placement=placement,
        checkpoint=checkpoint,
        offload_bytes_per_s=offload_bytes_per_s,
    )
    problem = request.problem()
    solution = solved(problem, max_ideals)
    if solution.found is None:
        raise no_partition_error(request, exact=solution.exact)
    found = replace(solution.found, slots=problem.layout.on_ranks(solution.found.slots))
    found = fill_up(found, problem) if problem.fills_up else found
    return explained(problem, found, solution)


def balance(times: Sequence[float], num_stages: int) -> list[int]:
    """Divide a chain of layers into non-empty stages, so that the slowest stage is as fast as possible.

    Args:
        times: the time of each layer, in seconds.
        num_stages: the number of stages.

    Returns:
        The index of the first layer of each stage.

    Raises:
        PartitionError: if there are more stages than layers, if there are no stages, or if a time is invalid.

    """
    seconds = numbers(times, "the time of layer")
    if not 1 <= num_stages <= max(1, len(times)):
        raise PartitionError(
            f"every stage must hold at least one layer; there are {counted(num_stages, 'stage')} and "
            f"{counted(len(times), 'layer')}; use at most {counted(len(times), 'stage')}: fewer devices, or fewer "
            f"chunks per rank"
        )
    if not len(seconds):
        return [0]
    ticks = np.rint(seconds * ticks_per_s(float(seconds.sum()))).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(ticks)])
    nothing = np.zeros(1, np.int64)
    layout = fixed_order([RankCapacity()] * num_stages, [1] * num_stages, exactly=False, pinned=0)
    spans = [(0, len(ticks))] * (num_stages + 1)
    cuts = Cuts(work=work, sent_bytes=nothing, state_bytes=nothing, activation_bytes=nothing)
    chain = ChainSearch([], cuts, TransferCost(nothing, blocking=False), layout, spans)
    largest = int(ticks.max(initial=0))
    low = max(-(-int(work[-1]) // num_stages), largest)
    found, _ = smallest(low, low + largest, chain.probe)
    return filled_up([0, *found.ends], work.tolist(), num_stages)[:-1] if found else [0]
