"""Partition: layer costs -> stages, exactly.

The smallest bottleneck is found by probe and exact bisection on whole numbers (Pinar and Aykanat 2004): a failed probe
raises the lower end to the next bound at which something changes, a successful one lowers the upper end to the
bottleneck that it realised. What a probe is depends on the graph: see `pipesched.partitioning`.
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
from pipesched.partitioning.chain import Chain
from pipesched.partitioning.explanation import explained
from pipesched.partitioning.infeasibility import infeasible
from pipesched.partitioning.interleaving import solved
from pipesched.partitioning.layer_arrays import numbers, ticks_per_s
from pipesched.partitioning.problem import Communication
from pipesched.partitioning.request import InFlight, Request
from pipesched.partitioning.result import Partition
from pipesched.partitioning.search import fill_up, filled_up
from pipesched.partitioning.slots import Rank, Toll, fixed_order
from pipesched.program.checkpoint_options import LayerCheckpoint

__all__ = ["Partition", "balance", "partition"]


def partition(
    graph: "nx.DiGraph[Any]",
    num_stages: int,
    *,
    communication: Communication = "none",
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float = 0,
    memory_limit_bytes: float | Sequence[float] | None = None,
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
    """Cut a graph of layers into at most ``num_stages`` non-empty stages with the smallest bottleneck.

    graph: nodes with ``forward_s`` and ``backward_s`` (seconds), and where they count ``output_bytes``,
    ``parameter_bytes``, ``num_parameters`` and ``activation_bytes`` (held for each micro-batch in flight; the output
    unless given); edges from producer to consumer. What an edge carries is the producer's output, unless it has
    ``tensors``: the bytes of each by a name; one that several consumers of a layer name is one.
    communication: "none"; "overlap": a cut's link carries its tensors there and their gradients back while ranks
    compute, and the bottleneck is the slowest of all stages and links (PipeDream, Narayanan et al. 2019); "serial": a
    stage also waits while what crosses its two cuts is sent. A cut costs latency_s and the bytes that cross it over
    bandwidth_bytes_per_s, each way; a tensor that skips stages crosses every cut on its way.
    memory_limit_bytes: of each rank, for weight_copies x parameters (4: weights, gradients, two moments of Adam) and
    the activations of in_flight micro-batches: one number a stage, or a function of (stage, num_stages); 1 unless
    given. speeds: of the ranks, relative to the one that was measured, in stage order; any_order: ranks may be used in
    whichever order is best. starts: layer -> the stage that it begins, all it needs being in earlier ones. together:
    groups of layers that share a stage. exactly: no stage is empty.
    placement: the rank of each stage, where ranks have several (`pipesched.program.placement`); then the bottleneck is
    the busiest rank, speeds and limits are one a rank, a cut inside a rank costs nothing, and the answer, found by
    descent, need not be the best: ``Partition.gap`` is its distance to the bound.
    checkpoint: what may be done with activations where memory is short, for each layer by itself and chosen with the
    cuts: "recompute" (the backward first runs the forward again, from the layer's input) and "offload" (to the host
    and back, each way at ``offload_bytes_per_s``, one beside forwards and the other beside backwards, which wait where
    they are shorter). Layers are then cut in their own order, and what
    they need only while they run, ``forward_transient_bytes`` and ``backward_transient_bytes``, counts, the largest of
    a stage. ``Partition.checkpoint`` says what was chosen; layers that it does not name hold theirs.
    A chain is cut exactly, and so is a graph of up to max_ideals order ideals. For others several linear orders are
    tried, and ``Partition.gap`` says how far the best may be away. Memory limits on a large graph may leave a gap too.
    Equal inputs give equal partitions. Raises PartitionError where there is none, with what would make one possible.
    """
    rule = "together has groups of layers that share a stage"
    remedy = "pass such as [(first, second)]"
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
        raise infeasible(request, exact=solution.exact)
    found = replace(solution.found, slots=problem.line_up.on_ranks(solution.found.slots))
    found = fill_up(found, problem) if problem.fills_up else found
    return explained(problem, found, solution)


def balance(times: Sequence[float], num_stages: int) -> list[int]:
    """Where each of ``num_stages`` non-empty stages begins, such that the slowest is as fast as can be.

    times: of the layers of a chain, in seconds. Raises PartitionError for more stages than layers, fewer than one, or
    bad times.
    """
    seconds = numbers(times, "the time of layer")
    if not 1 <= num_stages <= max(1, len(times)):
        raise PartitionError(
            f"every stage holds at least one layer; {num_stages} stages, {len(times)} layers; "
            f"use 1 to {len(times)} stages: fewer devices, or fewer chunks a rank"
        )
    if not len(seconds):
        return [0]
    ticks = np.rint(seconds * ticks_per_s(float(seconds.sum()))).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(ticks)])
    nothing = np.zeros(1, np.int64)
    line_up = fixed_order([Rank()] * num_stages, [1] * num_stages, exactly=False, pinned=0)
    spans = [(0, len(ticks))] * (num_stages + 1)
    cuts = Cuts(work=work, sent_bytes=nothing, state_bytes=nothing, activation_bytes=nothing)
    chain = Chain([], cuts, Toll(nothing, blocking=False), line_up, spans)
    largest = int(ticks.max(initial=0))
    low = max(-(-int(work[-1]) // num_stages), largest)
    found, _ = smallest(low, low + largest, chain.probe)
    return filled_up([0, *found.ends], work.tolist(), num_stages)[:-1] if found else [0]
