"""Recomputation choice: decides which layers are recomputed or offloaded, so that ranks keep their memory limits.

`pipesched.planning.tuner` asks for each candidate. Its layers are partitioned into stages, at first as if memory were
unlimited. Where a rank then needs more than its limit, they are partitioned again under limits, and it is chosen for
each layer whether its activations are held, recomputed or offloaded: `pipesched.partitioning.activation_options` lists
what may be done with them, `pipesched.partitioning.knapsack` takes the fastest that fits. Where no such choice fits,
whole stages are recomputed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import networkx as nx

from pipesched.errors import PartitionError
from pipesched.partitioning.partition import Partition
from pipesched.partitioning.result import StageLayers
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.planning.effort import AT_LEAST, FOR_MEMORY, FOR_PARTITION, IN_ORDER_SEARCH, Effort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.stage_partitioner import StagePartitioner
from pipesched.program.checkpoint_options import LayerCheckpoint, checkpoint_by_layer
from pipesched.program.program import Program

__all__ = ["RecomputationChooser"]

_TRIES = 6  # at partitions under a memory limit
_RECOMPUTE: tuple[LayerCheckpoint, ...] = ("recompute",)
_RECOMPUTE_OR_OFFLOAD: tuple[LayerCheckpoint, ...] = ("recompute", "offload")

#: The layers of the stages, what is done with layers whose activations are not held, and the bytes that the partitioner
#: has counted on each rank, where it has.
_Partitioned = tuple[StageLayers, Mapping[str, LayerCheckpoint], list[float]]


class RecomputationChooser:
    """Decides for the candidates of one search. effort: counts what that takes."""

    def __init__(self, search: SearchRequest, effort: Effort) -> None:
        self._search = search
        self._effort = effort
        self._partitions: dict[Any, _Partitioned | None] = {}

    def choices(self, candidate: Candidate) -> Iterator[EvaluatedCandidate]:
        """The candidate with its stages: where something has to be recomputed once for each way that keeps the limits.

        A search that asks for one way to checkpoint gets no other.
        """
        asked = self._search.checkpoint
        plain = self.without_limits(candidate.recomputing(LADDER[0] if asked is None else asked))
        if plain is None:
            return
        if not any(self._excess_bytes(plain)):
            yield plain
            return
        ways = [plain.candidate] if asked is not None else [candidate.recomputing(mode) for mode in LADDER[1:]]
        by_layer = self._by_layer(candidate) if asked is None else []
        yield from by_layer or filter(None, map(self.within_limits, ways))

    def _by_layer(self, candidate: Candidate) -> list[EvaluatedCandidate]:
        """With single layers recomputed, and where that is allowed with some offloaded."""
        both = self.within_limits(candidate, _RECOMPUTE_OR_OFFLOAD) if self._search.may_offload else None
        if both is not None and not both.candidate.offloads:
            return [both]
        recomputed = self.within_limits(candidate, _RECOMPUTE)
        return [each for each in (both, recomputed) if each is not None]

    def without_limits(self, candidate: Candidate) -> EvaluatedCandidate | None:
        """With the smallest bottleneck, whatever its ranks need; None where the layers have no such partition."""
        found = self._partitioned(candidate, None)
        return None if found is None else self.evaluated(candidate, found[0])

    def within_limits(
        self, candidate: Candidate, allowed: Collection[LayerCheckpoint] = ()
    ) -> EvaluatedCandidate | None:
        """With the smallest bottleneck that keeps the limits; None where none is found.

        The partitioner counts less memory than ranks need. Where a rank needs more than its limit, it is asked again
        for so much less than it has counted; where there is no partition then, for half as much less.
        allowed: what may be done with the activations of single layers.
        """
        asked = [float(limit) for limit in (self._search.memory_limit_bytes or ())[: candidate.num_ranks]]
        enough: list[float] = []  # for a partition, though not for all that it needs
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

    def _excess_bytes(self, found: EvaluatedCandidate) -> tuple[int, ...]:
        """How much each rank needs beyond its limit; nothing without limits."""
        if found.limit_bytes is not None:
            searches = found.candidate.schedule.searches and not found.candidate.is_written
            self._effort.spend(found.candidate.num_actions * (IN_ORDER_SEARCH if searches else FOR_MEMORY))
        return found.excess_bytes

    # ---- stages and what they cost ----------------------------------------------------------------------------------

    def evaluated(self, candidate: Candidate, stages: StageLayers) -> EvaluatedCandidate:
        """The candidate with stages of these layers."""
        search = self._search
        costs = search.profile.costs(
            stages,
            self._rows(candidate.num_microbatches),
            keep=checkpoint_by_layer(candidate.checkpoint),
            ranks_are=search.ranks_are,
        )
        return EvaluatedCandidate(
            candidate=candidate,
            stages=stages,
            costs=replace(costs, links=search.links) if search.links else costs,
            limit_bytes=search.memory_limit_bytes,
            posted=search.posted,
        )

    def graph(self, num_microbatches: int) -> "nx.DiGraph[str]":
        """The measured layers, with micro-batches of a batch that is cut into so many."""
        return self._search.profile.graph(self._rows(num_microbatches))

    def partitioner(self, candidate: Candidate, program: Program) -> StagePartitioner:
        """What partitions the layers for a candidate, without limits."""
        return StagePartitioner(
            pins=self._search.pins,
            program=program,
            graph=lambda: self.graph(candidate.num_microbatches),
            checkpoint=candidate.checkpoint,
            links=self._search.links,
        )

    def _rows(self, num_microbatches: int) -> int:
        return -(-self._search.batch_size // num_microbatches)

    def _partitioned(
        self, candidate: Candidate, limits: tuple[float, ...] | None, allowed: Collection[LayerCheckpoint] = ()
    ) -> _Partitioned | None:
        """What the partitioner answers; None where there is no partition."""
        key: tuple[Any, ...] = (candidate.placement, self._rows(candidate.num_microbatches))
        if limits is not None:  # schedules that hold as many micro-batches are alike
            held = tuple(self.partitioner(candidate, candidate.program).in_flight)
            again = candidate.checkpoint in LADDER[1:] or repr(candidate.checkpoint)
            key = (*key, limits, allowed, held, candidate.num_microbatches, again)
        if key not in self._partitions:
            self._effort.spend(AT_LEAST + FOR_PARTITION * (len(self._search.pins.layers) + candidate.num_stages))
            # Without limits only the placement counts, and not how many micro-batches are held.
            program = candidate.outline if limits is None else candidate.program
            partitioner = replace(
                self.partitioner(candidate, program),
                memory_limit_bytes=limits,
                allowed=allowed,
                host_bytes_per_s=self._search.profile.machine.host_bytes_per_s,
            )
            try:
                stages, found = partitioner.partition()
            except PartitionError:
                self._partitions[key] = None
            else:
                keep = found.checkpoint if found else {}
                self._partitions[key] = stages, keep, _counted_bytes(found, candidate.num_ranks)
        return self._partitions[key]


def _counted_bytes(found: Partition | None, num_ranks: int) -> list[float]:
    """The bytes that the partitioner has counted on each rank; nothing where it has not."""
    if found is None:
        return []
    both = list(zip(found.ranks, found.summaries, strict=True))
    return [sum(own.memory_bytes for other, own in both if other == rank) for rank in range(num_ranks)]
