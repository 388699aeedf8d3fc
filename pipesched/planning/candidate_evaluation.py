"""Candidate evaluation: cuts the layers for a candidate, and chooses the layers to recompute or offload.

`pipesched.planning.tuner` makes this choice for each candidate. Layers are first partitioned into stages without memory
limits. If a rank then exceeds its limit, the layers are partitioned again under limits, and the activations of each
layer are kept, recomputed or offloaded. `pipesched.partitioning.activation_options` lists the options of a layer, and
`pipesched.partitioning.knapsack` chooses the fastest combination that fits. If no combination fits, whole stages are
recomputed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise
from math import comb
from typing import Any

import networkx as nx
import numpy as np

from pipesched.errors import PartitionError
from pipesched.partitioning.partition import Partition, balance, partition
from pipesched.partitioning.result import StageLayers
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.planning.cost_correction import slowed
from pipesched.planning.effort import AT_LEAST, FOR_MEMORY, FOR_PARTITION, IN_ORDER_SEARCH, SearchEffort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.program.checkpoint_options import LayerCheckpoint, checkpoint_by_layer
from pipesched.program.liveness import peak_in_flight
from pipesched.program.program import Program
from pipesched.simulation.layer_costs import costs_of

__all__ = ["CandidateEvaluator"]

_TRIES = 6  # maximum number of partitions to try under a memory limit
_ALL_CUTS = 20_000  # balanced cuts are selected only if there are at most this many cuts; this takes about 0.1 s
_PER_BYTE = 1e-12  # seconds that represent a byte where the partitioner expects a time: one tick of the partitioner
_RECOMPUTE: tuple[LayerCheckpoint, ...] = ("recompute",)
_RECOMPUTE_OR_OFFLOAD: tuple[LayerCheckpoint, ...] = ("recompute", "offload")

#: A partition: each stage's layers, the layers with recomputed or offloaded activations, and the partitioner's
#: estimate of each rank's memory in bytes (empty if there is no estimate).
_Partitioned = tuple[StageLayers, Mapping[str, LayerCheckpoint], list[float]]


class CandidateEvaluator:
    """Makes every `EvaluatedCandidate` of one search: chooses stages, and the layers to recompute or offload.

    Args:
        search: the request.
        effort: the remaining effort, from which all work is subtracted.
        solved: partitions that searches of the same layers with other replicas have found, keyed by all that they
            depend on. Default: none.

    """

    def __init__(
        self, search: SearchRequest, effort: SearchEffort, solved: dict[Any, _Partitioned | None] | None = None
    ) -> None:
        self._search = search
        self._effort = effort
        self._partitions: dict[Any, _Partitioned | None] = {}
        self._solved = {} if solved is None else solved
        self._simple_cuts: dict[Any, list[StageLayers]] = {}

    def choices(self, candidate: Candidate) -> Iterator[EvaluatedCandidate]:
        """Assign layers to the candidate's stages, and choose the layers to recompute or offload.

        If the candidate fits into memory without recomputation, yields only this candidate. Otherwise, yields
        candidates that recompute or offload individual layers or, if none of these fits, candidates that recompute
        whole stages. If the request has a checkpoint setting, only that setting is tried.
        """
        asked = self._search.checkpoint
        plain = self.without_limits(candidate.recomputing(LADDER[0] if asked is None else asked))
        if plain is None or self._holds_too_many(plain.candidate):
            return
        if not any(self._excess_bytes(plain)):
            yield plain
            return
        modes = self._search.ladder[1:]
        ways = [plain.candidate] if asked is not None else [candidate.recomputing(mode) for mode in modes]
        by_layer = self._by_layer(candidate) if asked is None else []
        yield from by_layer or filter(None, map(self.within_limits, ways))

    def _by_layer(self, candidate: Candidate) -> list[EvaluatedCandidate]:
        """Return the versions of the candidate that fit, with individual layers recomputed or offloaded.

        One version only recomputes layers. If offloading is allowed, another version may also offload layers.
        """
        both = self.within_limits(candidate, _RECOMPUTE_OR_OFFLOAD) if self._search.may_offload else None
        if both is not None and not both.candidate.offloads:
            return [both]
        recomputed = self.within_limits(candidate, _RECOMPUTE)
        return [evaluated for evaluated in (both, recomputed) if evaluated is not None]

    def without_limits(self, candidate: Candidate) -> EvaluatedCandidate | None:
        """Partition the layers to minimise the bottleneck, ignoring limits; return None if no partition exists."""
        found = self._partitioned(candidate, None)
        return None if found is None else self.evaluated(candidate, found[0])

    def with_simple_cuts(self, candidate: Candidate) -> list[EvaluatedCandidate]:
        """Return a copy of the candidate for each simple cut that is allowed and within the limits.

        The first simple cut makes the slowest stage as fast as possible. Under memory limits, two more cuts are tried:
        the second cut puts equal numbers of layers into all stages, and the third cut minimises the size of the weights
        on the rank with the largest weights. Returns [] if the user has set all boundaries, or if the candidate has
        more stages than layers or exceeds a limit on micro-batches in flight.
        """
        pins = self._search.pins
        if pins.complete or candidate.num_stages > len(pins.layers) or self._holds_too_many(candidate):
            return []
        key = candidate.placement, candidate.num_microbatches
        if key not in self._simple_cuts:
            cuts = dict.fromkeys(map(tuple, self._cuts(candidate)))
            self._simple_cuts[key] = [pins.stages(starts) for starts in cuts if pins.allows(starts)]
        plain = candidate.recomputing(self._search.checkpoint or LADDER[0])
        every = [self.evaluated(plain, stages) for stages in self._simple_cuts[key]]
        return [found for found in every if not any(self._excess_bytes(found))]

    def _cuts(self, candidate: Candidate) -> Iterator[Sequence[int]]:
        """For each simple cut, yield the positions of the stages' first layers."""
        self._effort.spend(AT_LEAST)
        graph = self.graph(candidate.num_microbatches)
        layers = [costs_of(graph, name) for name in graph]
        yield balance([own.forward_s + own.backward_s for own in layers], candidate.num_stages)
        if self._search.memory_limit_bytes is None:
            return
        yield balance([1] * len(layers), candidate.num_stages)
        weights: nx.DiGraph[str] = nx.DiGraph()
        for name, node in graph.nodes(data=True):
            weights.add_node(name, forward_s=node["parameter_bytes"] * _PER_BYTE, backward_s=0)
        weights.add_edges_from(pairwise(graph))
        self._effort.spend(FOR_PARTITION * (len(layers) + candidate.num_stages))
        placement = candidate.placement if candidate.schedule.chunks_per_rank > 1 else None
        found = partition(weights, candidate.num_stages, placement=placement, exactly=True)
        yield [self._search.pins.places[stage[0]] for stage in found.stages]

    def balanced_cuts(self, candidate: Candidate, most: int) -> list[StageLayers]:
        """Return the allowed cuts of the layers into the candidate's stages whose busiest rank has the least work.

        If this work is the same for several cuts, those whose largest stage has the least work come first. Returns []
        if there are more than ``_ALL_CUTS`` cuts.

        Args:
            candidate: the candidate.
            most: the maximum number of cuts to return.

        """
        pins = self._search.pins
        layers = len(pins.layers)
        if pins.complete or comb(layers - 1, candidate.num_stages - 1) > _ALL_CUTS:
            return []
        every = [(0, *starts) for starts in combinations(range(1, layers), candidate.num_stages - 1)]
        graph = self.graph(candidate.num_microbatches)
        costs = [costs_of(graph, name) for name in pins.layers]
        before_s = np.cumsum([0.0, *(own.forward_s + own.backward_s for own in costs)])
        stage_s = np.diff(before_s[np.array([(*starts, layers) for starts in every])])
        rank_s = stage_s @ (np.array(candidate.placement)[:, None] == np.arange(candidate.num_ranks))
        ranked = (every[at] for at in np.lexsort((stage_s.max(axis=1), rank_s.max(axis=1).round(12))).tolist())
        return [pins.stages(starts) for starts in islice(filter(pins.allows, ranked), most)]

    def within_limits(
        self, candidate: Candidate, allowed: Collection[LayerCheckpoint] = ()
    ) -> EvaluatedCandidate | None:
        """Partition the layers to minimise the bottleneck within the limits; return None if no partition was found.

        The partitioner underestimates memory. If a rank exceeds its limit, the layers are partitioned again with that
        limit lowered by the excess. If the lowered limit permits no partition, the next limit to try is halfway between
        the lowered limit and the last limit that permitted a partition.

        Args:
            candidate: the candidate.
            allowed: the settings that can be chosen for a layer to save memory: "recompute", "offload" or both.

        """
        if self._holds_too_many(candidate):
            return None
        asked = [float(limit) for limit in (self._search.memory_limit_bytes or ())[: candidate.num_ranks]]
        enough: list[float] = []  # lowered limits that permit a partition, although it exceeds the real limits
        for _ in range(_TRIES):
            partitioned = self._partitioned(candidate, tuple(asked), allowed)
            if partitioned is None and not enough:
                return None
            if partitioned is None:
                asked = [(one + other) / 2 for one, other in zip(asked, enough, strict=True)]
                continue
            stages, keep, counted = partitioned
            found = self.evaluated(candidate.recomputing(keep) if keep else candidate, stages)
            excess = self._excess_bytes(found)
            if not any(excess):
                return found
            enough = asked
            asked = [
                max(1, min(limit, size) - more) if more else limit
                for limit, size, more in zip(asked, counted or asked, excess, strict=True)
            ]
        return None

    def exceeds(self, found: EvaluatedCandidate) -> bool:
        """Return whether a candidate exceeds a limit on its bytes or on its (stage, micro-batch) pairs in flight."""
        return self._holds_too_many(found.candidate) or any(self._excess_bytes(found))

    def most_in_flight(self, candidate: Candidate) -> tuple[int, ...] | None:
        """Return the maximum number of (stage, micro-batch) pairs that each rank of the candidate may hold.

        Returns None if there is no limit.
        """
        limits = self._search.max_in_flight
        return None if limits is None else limits[: candidate.num_ranks]

    def _holds_too_many(self, candidate: Candidate) -> bool:
        limits = self.most_in_flight(candidate)
        if limits is None:
            return False
        orders = candidate.program.orders
        return any(peak_in_flight(orders.rank(rank)) > limit for rank, limit in enumerate(limits))

    def _excess_bytes(self, found: EvaluatedCandidate) -> tuple[int, ...]:
        """Return the number of bytes by which each rank exceeds its limit; () if there are no limits.

        Also subtracts the work of this computation from the remaining effort.
        """
        if found.limit_bytes is not None:
            searches = found.candidate.schedule.searches and not found.candidate.is_written
            self._effort.spend(found.candidate.num_actions * (IN_ORDER_SEARCH if searches else FOR_MEMORY))
        return found.excess_bytes

    # ---- stages and their costs -------------------------------------------------------------------------------------

    def evaluated(self, candidate: Candidate, stages: StageLayers) -> EvaluatedCandidate:
        """Evaluate the candidate with these stages, under the limits of the request."""
        search = self._search
        costs = search.profile.costs(
            stages,
            self.rows(candidate.num_microbatches),
            keep=checkpoint_by_layer(candidate.checkpoint),
            ranks_are=search.ranks_are,
        )
        if search.links:
            costs = replace(costs, links=search.links)
        if search.speeds:
            costs = slowed(costs, [1 / search.speeds.get(rank, 1.0) for rank in candidate.placement])
        replicas = search.replica_costs
        if replicas is not None:
            costs = replicas.added(costs, candidate.placement, self._buckets(candidate, stages))
        return EvaluatedCandidate(
            candidate=candidate,
            stages=stages,
            costs=costs,
            limit_bytes=search.memory_limit_bytes,
            posted=search.posted,
            completion=search.completion,
            replication=None if replicas is None else replicas.replication,
            tensor=search.tensor,
            in_tree=search.in_tree,
        )

    def _buckets(self, candidate: Candidate, stages: StageLayers) -> list[list[int]]:
        """For each stage, return each layer's gradient size in bytes, last layer first, excluding frozen layers."""
        nodes = self.graph(candidate.num_microbatches).nodes
        sizes = {name: node.get("gradient_bytes", node["parameter_bytes"]) for name, node in nodes.items()}
        return [[sizes[name] for name in reversed(names) if sizes[name]] for names in stages]

    def graph(self, num_microbatches: int) -> "nx.DiGraph[str]":
        """Return the graph of layers, with their costs when the batch is split into this number of micro-batches."""
        return self._search.profile.graph(self.rows(num_microbatches))

    def partitioner(self, candidate: Candidate, program: Program) -> StagePartitioner:
        """Return the partitioner for a candidate, without memory limits."""
        return StagePartitioner(
            pins=self._search.pins,
            program=program,
            graph=lambda: self.graph(candidate.num_microbatches),
            checkpoint=candidate.checkpoint,
            links=self._search.links,
            speeds=self._search.speeds,
        )

    def rows(self, num_microbatches: int) -> int:
        """Return the number of rows of the largest micro-batch."""
        return -(-self._search.batch_size // num_microbatches)

    def _partitioned(
        self, candidate: Candidate, limits: tuple[float, ...] | None, allowed: Collection[LayerCheckpoint] = ()
    ) -> _Partitioned | None:
        """Return the partition of the layers for a candidate, or None if no partition exists. Results are cached."""
        key: tuple[Any, ...] = (candidate.placement, self.rows(candidate.num_microbatches))
        if limits is not None:  # schedules with the same numbers of micro-batches in flight share a partition
            held = tuple(self.partitioner(candidate, candidate.program).in_flight)
            again = candidate.checkpoint in LADDER[1:] or repr(candidate.checkpoint)
            key = (*key, limits, allowed, held, candidate.num_microbatches, again)
        if key not in self._partitions:
            self._effort.spend(AT_LEAST + FOR_PARTITION * (len(self._search.pins.layers) + candidate.num_stages))
            # Without limits the result depends on the placement, not on the micro-batches in flight.
            program = candidate.outline if limits is None else candidate.program
            partitioner = replace(
                self.partitioner(candidate, program),
                memory_limit_bytes=limits,
                allowed=allowed,
                host_bytes_per_s=self._search.profile.machine.host_bytes_per_s,
            )
            of_all = key, candidate.num_microbatches, partitioner.slowest_link, tuple(partitioner.speeds.items())
            if of_all not in self._solved:
                self._solved[of_all] = _solution(partitioner, candidate.num_ranks)
            self._partitions[key] = self._solved[of_all]
        return self._partitions[key]


def _solution(partitioner: StagePartitioner, num_ranks: int) -> _Partitioned | None:
    """Return the partition of the layers; None if no partition exists."""
    try:
        stages, found = partitioner.partition()
    except PartitionError:
        return None
    return stages, found.checkpoint if found else {}, _counted_bytes(found, num_ranks)


def _counted_bytes(found: Partition | None, num_ranks: int) -> list[float]:
    """Return the partitioner's estimate of each rank's memory in bytes; [] if there is no partition."""
    if found is None:
        return []
    both = list(zip(found.ranks, found.summaries, strict=True))
    return [sum(own.memory_bytes for other, own in both if other == rank) for rank in range(num_ranks)]
