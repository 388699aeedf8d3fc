"""Stage partitioner: assigns layers to the stages of a program, within the user's constraints.

The partitioner calls `pipesched.partitioning`, which does not use programs. The partitioner then adds the program's
ranks to the result.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import networkx as nx

from pipesched.errors import PartitionError
from pipesched.partitioning.partition import Partition, partition
from pipesched.partitioning.result import StageLayers
from pipesched.planning.pins import Pins
from pipesched.program.checkpoint_options import Checkpoint, LayerCheckpoint
from pipesched.program.liveness import peaks_of_stages
from pipesched.program.program import Program
from pipesched.simulation.links import Links
from pipesched.simulation.tied_weight_costs import parameter_bytes, stage_parameters, tied_groups, tied_traffic_bytes
from pipesched.units import counted, quote_speed, quote_time

__all__ = ["StagePartitioner"]

_COPIES = 2  # parameter bytes are counted twice: as weights and as gradients, but not as optimizer states
_MOST_TIES = 8  # maximum number of tied weights for which the search tries to put all users into one stage
_MOST_IDEALS = 5_000  # graphs with more order ideals are not searched for other layer orders


@dataclass(frozen=True, kw_only=True)
class StagePartitioner:
    """Partitions a model's layers into the stages of a program."""

    pins: Pins
    program: Program
    #: A function that returns the graph of the measured layers, like `pipesched.graph_of`. Called only when needed.
    graph: Callable[[], "nx.DiGraph[str]"]
    checkpoint: Checkpoint = "never"
    #: Links between ranks. If given, the partition takes communication between stages into account.
    links: Links | None = None
    #: Each rank's memory limit for weights, gradients and activations, in bytes. None: no limit.
    memory_limit_bytes: Sequence[float] | None = None
    #: Relative speeds of slow devices, keyed by rank. The speed of a rank without an entry is 1.
    speeds: Mapping[int, float] = field(default_factory=dict)
    #: The ways to save memory from which the search chooses for each layer. The resulting partition lists the choices.
    allowed: Collection[LayerCheckpoint] = ()
    #: Bandwidth between a rank and its host, for offloading.
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.links is not None and not isinstance(self.links, Links):
            raise PartitionError(
                f"links= must be a pipesched.Links; got {self.links!r}; pass the result of pipesched.probe_links"
            )

    def partition(self) -> tuple[StageLayers, Partition | None]:
        """Return the layers of each stage, and the partition with its costs.

        The partition is None if no measurements were needed.

        Raises:
            PartitionError: if there are more stages than layers, or if the boundaries do not fit the stages.

        """
        layers = list(self.pins.layers)
        num_stages = self.program.num_weights
        if num_stages > max(1, len(layers)):
            raise PartitionError(
                f"every stage needs at least one layer; there are {counted(num_stages, 'stage')} on "
                f"{counted(self.program.num_ranks, 'rank')}, but the model has {counted(len(layers), 'layer')}; use "
                f"fewer devices, or fewer chunks per rank"
            )
        found: Partition | None = None
        if self.pins.complete:
            starts = self.pins.starts_of_all()
            found = self._given([layers[start] for start in starts]) if self.allowed else None
        elif self.allowed or 1 < num_stages < len(layers) or self.pins.starts or self.pins.together:
            found = self._solved()
            starts = [self.pins.places[stage[0]] for stage in found.stages]
        else:
            starts = list(range(num_stages))
        if len(starts) != num_stages:
            raise PartitionError(
                f"boundaries must name the first layer of every stage except stage 0; got a list of "
                f"{counted(len(starts) - 1, 'layer')}, which makes {counted(len(starts), 'stage')}, but the program "
                f"has {counted(num_stages, 'stage')}; pass a list of {counted(num_stages - 1, 'layer')}, or map "
                f"layers to the stages that they begin"
            )
        self.pins.check_together(starts)
        return self.pins.stages(starts), found

    def evaluate(self, stages: Sequence[Sequence[str]]) -> Partition:
        """Return the partition into ``stages``, with a ``reason`` saying whether other boundaries would be faster."""
        graph = self.graph()
        row = _in_a_row(graph)
        found = self._partition(row, {names[0]: stage for stage, names in enumerate(stages) if stage})
        best = self._partition(row)
        found = replace(found, lower_bound_s=best.lower_bound_s)
        given = "the boundaries were given; " if self.pins.complete else ""
        return self._explained(graph, found, f"{given}{_against(found, best, 'other boundaries')}")

    def _given(self, firsts: Sequence[str]) -> Partition:
        """Return the partition with stages that begin at these layers."""
        graph = self.graph()
        found = self._partition(_in_a_row(graph), {name: stage for stage, name in enumerate(firsts) if stage})
        return self._explained(graph, found, "the boundaries were given")

    def _solved(self) -> Partition:
        """Return the best partition that meets the constraints, and explain why no other partition is better."""
        graph = self.graph()
        row = _in_a_row(graph)
        found = self._with_ties_together(graph, row)
        why = found.reason
        if self.pins.starts or self.pins.together:
            best = self._partition(row)
            found = replace(found, lower_bound_s=best.lower_bound_s)
            why = f"{why}; boundaries or layer groups were given; {_against(found, best, 'an unrestricted split')}"
        elif graph.number_of_edges() < row.number_of_edges() and not self._chunks:
            best = self._partition(graph)
            if best.proved and best.bottleneck_s < found.bottleneck_s:
                why = f"{why}; {_against(found, best, 'another order of the layers')}"
        return self._explained(graph, found, why)

    def _with_ties_together(self, graph: "nx.DiGraph[str]", row: "nx.DiGraph[str]") -> Partition:
        """Return the best partition of a chain of layers.

        All layers that use a tied weight are in the same stage, unless this makes the step slower.
        """
        starts = self.pins.starts
        together = tuple(tuple(group) for group in self.pins.together)
        found = self._partition(row, starts, together)
        for users in _tied(graph)[:_MOST_TIES]:
            try:
                other = self._partition(row, starts, (*together, users))
            except PartitionError:
                continue
            if self._cost(graph, other) <= self._cost(graph, found):
                found = other
                together = (*together, users)
        return found

    @cached_property
    def in_flight(self) -> list[int]:
        """The peak number of micro-batches in flight on each stage.

        In bidirectional schedules, each number is a sum over all stages with the same layers.
        """
        held = [0] * self.program.num_weights
        peaks = peaks_of_stages(self.program.columns, self.program.num_stages).tolist()
        for part, peak in zip(self.program.weights, peaks, strict=True):
            held[part] += peak
        return held

    # ---- calls to the partitioner -----------------------------------------------------------------------------------

    @property
    def _ranks(self) -> list[int]:
        return list(self.program.placement[: self.program.num_weights])

    @property
    def _chunks(self) -> bool:
        """Whether ranks have several stages of the same chain."""
        return len({*self._ranks}) < len(self._ranks) and self.program.num_weights == self.program.num_stages

    def _partition(
        self,
        graph: "nx.DiGraph[str]",
        starts: Mapping[str, int] | None = None,
        together: Sequence[Collection[str]] = (),
    ) -> Partition:
        named = sorted({*self._ranks})
        link = self.slowest_link
        return partition(
            graph,
            len(self._ranks),
            communication="none" if link is None else "overlap",
            bandwidth_bytes_per_s=None if link is None else link[1],
            latency_s=0 if link is None else link[0],
            memory_limit_bytes=self.memory_limit_bytes,
            in_flight=self.in_flight if self.checkpoint == "never" else [1] * len(self._ranks),
            weight_copies=_COPIES,
            speeds=self._speeds(named),
            starts=starts,
            together=together,
            exactly=bool(starts or together or link or self.memory_limit_bytes or self.speeds),
            placement=[named.index(rank) for rank in self._ranks] if self._chunks else None,
            checkpoint=self.allowed,
            offload_bytes_per_s=self.host_bytes_per_s,
            max_ideals=_MOST_IDEALS,
        )

    def _speeds(self, named: Sequence[int]) -> list[float] | None:
        """Return the speed of each rank if ranks have several chunks, else of each stage; None if no rank is slow."""
        ranks = named if self._chunks else self._ranks
        return [self.speeds.get(rank, 1.0) for rank in ranks] if self.speeds else None

    @property
    def slowest_link(self) -> tuple[float, float] | None:
        """Return the largest latency and the smallest bandwidth of the links between neighbouring stages.

        The units are seconds and bytes per second. Returns None if no link limits the bandwidth.
        """
        if self.links is None:
            return None
        pairs = {pair for pair in pairwise(self._ranks) if pair[0] != pair[1]}
        both = [self.links.link(*pair) for one, other in pairs for pair in ((one, other), (other, one))]
        slowest = max((link.byte_s for link in both), default=0)
        return (max(link.latency_s for link in both), 1 / slowest) if slowest else None

    def _cost(self, graph: "nx.DiGraph[str]", found: Partition) -> tuple[float, int]:
        """Return the sort key of a partition: the time per step, then the bytes sent for tied weights.

        The time per step is the bottleneck's time for all micro-batches plus the transfer time of tied weights.
        """
        rank_of = {layer: rank for names, rank in zip(found.stages, self._ranks, strict=True) for layer in names}
        moved = sum(
            tied_traffic_bytes(parameter_bytes(graph, names), [rank_of[user] for user in users])
            for users, names in tied_groups(graph).items()
        )
        link = self.slowest_link
        travel = 0 if link is None else moved / link[1]
        return found.bottleneck_s * self.program.num_microbatches + travel, moved

    # ---- explanation ------------------------------------------------------------------------------------------------

    def _explained(self, graph: "nx.DiGraph[str]", found: Partition, reason: str) -> Partition:
        """Return a copy of the partition with ``reason`` and corrected stage summaries.

        The corrected summaries have the program's rank numbers, count each parameter once per stage, and count only the
        activations that checkpointing keeps in memory.
        """
        summaries = []
        for names, rank, count, own in zip(found.stages, self._ranks, self.in_flight, found.summaries, strict=True):
            parameters = stage_parameters(graph, names)
            activations = sum(graph.nodes[layer].get("activation_bytes", 0) for layer in names)
            weights = parameter_bytes(graph, parameters)
            if self.allowed:
                activations = own.memory_bytes - _COPIES * weights
            elif self.checkpoint in ("always", "except_last"):
                activations += count * own.bytes_in
            else:
                activations *= count
            summaries.append(
                replace(
                    own,
                    rank=rank,
                    num_parameters=sum(graph.graph["parameters"][name][0] for name in parameters),
                    parameter_bytes=weights,
                    activation_bytes=activations,
                    memory_bytes=_COPIES * weights + activations,
                )
            )
        return replace(found, ranks=tuple(self._ranks), summaries=tuple(summaries), reason=reason)


def _against(found: Partition, best: Partition, choice: str) -> str:
    if found.bottleneck_s <= best.bottleneck_s:
        return f"{choice} would not be faster"
    speed = f" ({quote_speed(found.bottleneck_s / best.bottleneck_s)})" if best.bottleneck_s else ""
    return f"{choice} could reach {quote_time(best.bottleneck_s)}{speed}"


def _in_a_row(graph: "nx.DiGraph[str]") -> "nx.DiGraph[str]":
    """Return the graph as a chain in execution order. New edges between neighbours carry no tensors."""
    row = graph.copy()
    row.add_edges_from(
        (one, other, {"tensors": {}}) for one, other in pairwise(graph) if not graph.has_edge(one, other)
    )
    return row


def _tied(graph: "nx.DiGraph[str]") -> list[tuple[str, ...]]:
    """Return the groups of layers that use the same parameters, in descending order of parameter bytes."""
    groups = tied_groups(graph)
    return sorted(groups, key=lambda users: -parameter_bytes(graph, groups[users]))
