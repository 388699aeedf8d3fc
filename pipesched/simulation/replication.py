"""Replication: the costs of training with several replicas of a pipeline, each on its own rows of the batch.

The gradients of each layer form a bucket, which the replicas sum in a ring. With ``zero=``, the replicas divide the
optimizer's work and states among themselves, and gather the updated weights after each update. With
``zero=3`` they also divide the weights, and an UNSHARD gathers the weights of a stage before they are used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from pipesched.checks import check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields
from pipesched.simulation.costs import Costs
from pipesched.simulation.links import Links, slowest_of
from pipesched.simulation.replica_memory import CopyMemory, ModelStates, ReplicaMemory, held_states
from pipesched.simulation.tensor_axis import TensorAxis

__all__ = ["ZERO_LEVELS", "Buckets", "ReplicaCosts", "Replication"]

#: The values of ``zero=``.
ZERO_LEVELS = (0, 1, 2, 3)

#: Replicas hold whole rows, and parts start at multiples of 64 elements, so one part can be longer than the others.
_ROUNDING_BYTES = 64 * 4

#: For each stage, the size of each bucket of gradients in bytes.
Buckets = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Replication:
    """The number and arrangement of a pipeline's replicas, and the states that they divide.

    Attributes:
        num_replicas: the number of replicas.
        zero: the states that the replicas divide. 0: none; 1: optimizer states; 2: also summed gradients; 3: also
            weights. Default: 0.
        gather_once: with ``zero=3``, whether a step gathers the weights of a stage only once. If False, it gathers them
            again after other stages of the rank have run. Default: True.
        consecutive: whether consecutive ranks run the "stages" of one pipeline or the "replicas" of one stage. Each
            host has consecutive ranks. Default: "stages".

    Raises:
        ScheduleError: for invalid values.

    """

    num_replicas: int = 1
    zero: int = 0
    gather_once: bool = True
    consecutive: Literal["stages", "replicas"] = "stages"

    def __post_init__(self) -> None:
        if not is_count(self.num_replicas):
            raise ScheduleError(
                f"num_replicas must be a whole number, at least 1; got {shown(self.num_replicas)}; pass 1 or more"
            )
        if not is_count(self.zero, 0) or self.zero not in ZERO_LEVELS:
            raise ScheduleError(f"zero must be 0, 1, 2 or 3; got {shown(self.zero)}; pass one of them")
        check_type(self.gather_once, bool, "gather_once must be True or False", "pass one of them")
        if self.consecutive not in ("stages", "replicas"):
            raise ScheduleError(
                f"consecutive must be 'stages' or 'replicas'; got {shown(self.consecutive)}; pass one of them"
            )

    def mesh(self, num_ranks: int, tensor: TensorAxis | None = None) -> dict[str, int]:
        """Return the sizes of the mesh's dimensions, in the order of ``init_device_mesh``.

        Args:
            num_ranks: the number of ranks of one pipeline; with tensor groups, the number of its groups.
            tensor: the tensor groups. Default: None (layers are not split).

        """
        sizes = {"dp": self.num_replicas, "pp": num_ranks}
        outer = sizes if self.consecutive == "stages" else dict(reversed(sizes.items()))
        return outer if tensor is None else outer | {"tp": tensor.size}

    def rows(self, num_ranks: int) -> list[range]:
        """Return the ranks of each replica, in pipeline order. ``num_ranks`` is the number of ranks of one pipeline."""
        count = self.num_replicas
        if self.consecutive == "stages":
            return [range(replica * num_ranks, (replica + 1) * num_ranks) for replica in range(count)]
        return [range(replica, num_ranks * count, count) for replica in range(count)]

    def sent_bytes(self, size: int) -> tuple[int, int]:
        """Return the bytes that a rank sends to sum gradients of ``size`` bytes, and to gather the weights once.

        In a ring of n ranks, each rank sends (n-1)/n of the bytes for a reduce-scatter, and as many for an all-gather.
        """
        part = size * (self.num_replicas - 1) // self.num_replicas
        return (part if self.zero >= 2 else 2 * part), (part if self.zero else 0)

    def describe(self, num_ranks: int, tensor: TensorAxis | None = None) -> str:
        """Return the mesh's dimensions and ``zero`` as text, such as ``dp 8 x pp 4, zero 2``.

        The arguments are those of ``mesh``.
        """
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh(num_ranks).items())
        sizes += "" if tensor is None else f" x {tensor}"
        often = "" if self.gather_once or self.zero < 3 else ", weights gathered for each use"
        return f"{sizes}, zero {self.zero}{often}" if self.zero else sizes

    def held(self, whole: ModelStates) -> ModelStates:
        """Return the peak sizes of the model states that a replica holds. ``whole`` is a stage's undivided states."""
        part = ModelStates(*(-(-size // self.num_replicas) for size in whole))
        return held_states(whole, part, zero=self.zero)

    def buffers(self, costs: Costs) -> list[ReplicaMemory]:
        """Return upper bounds on the memory that each stage needs to sum gradients and to exchange or gather weights.

        The bounds assume that either all weights are divided or none, and that each bucket is copied while the stage's
        last backward still holds all its activations.
        """
        return [self._buffers(sizes) for sizes in costs.reduce_bytes]

    def _buffers(self, sizes: Sequence[int]) -> ReplicaMemory:
        """Return the memory of a stage with buckets of these sizes."""
        count = self.num_replicas
        parts = [-(-size // count) + _ROUNDING_BYTES for size in sizes]
        exchanged = (count + 1) * max(parts, default=0)
        if self.zero < 2:
            return replace(ReplicaMemory.of_buffers(sizes), spread=exchanged if self.zero else 0)
        buckets = [
            CopyMemory(count * part, (count + 1) * part, part, kept=part, released=size)
            for size, part in zip(sizes, parts, strict=True)
        ]
        if self.zero == 2:
            return ReplicaMemory(buckets=tuple(buckets), spread=exchanged)
        gather = CopyMemory(sum(parts), exchanged, sum(parts))
        return ReplicaMemory(buckets=tuple(buckets), gather=gather, cut=max(parts, default=0))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. ``gather_once`` is left out unless replicas divide the weights."""
        values = asdict(self)
        if self.zero < 3:
            del values["gather_once"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Replication":
        """Make a replication from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(cls, values, "a replication must have")


class ReplicaCosts:
    """Adds the costs of replicas to the costs of a pipeline's stages.

    Args:
        replication: the replicas.
        num_ranks: the number of ranks of one pipeline.
        links: the links between all ranks of all replicas. Default: None, communication takes no time.
        rows: the ranks of each replica, in pipeline order. Default: ``replication.rows(num_ranks)``.

    """

    def __init__(
        self,
        replication: Replication,
        num_ranks: int,
        links: Links | None = None,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.replication = replication
        self._links = links
        self._rows = replication.rows(num_ranks) if rows is None else rows
        self._all_reduce_s = cache(lambda size, rank: self._on_ring("all_reduce_s", size, rank))
        self._half_s = cache(lambda size, rank: self._on_ring("all_gather_s", size, rank))

    def gathering(self, *, once: bool) -> "ReplicaCosts":
        """Return a copy for steps that gather divided weights only once or, if ``once`` is False, before every use."""
        return ReplicaCosts(replace(self.replication, gather_once=once), len(self._rows[0]), self._links, self._rows)

    def pipeline_links(self) -> Links | None:
        """Return the links between the ranks of one pipeline: for each pair, the slowest link of any replica."""
        if self._links is None:
            return None
        return slowest_of(self._links, self._rows)

    def added(self, costs: Costs, placement: Sequence[int], buckets: Buckets) -> Costs:
        """Return the costs of the stages, including the costs that replicas cause.

        Args:
            costs: the costs of the stages without replicas.
            placement: the rank of each stage.
            buckets: for each stage, the size of each bucket of gradients in bytes.

        """
        own = self.replication
        count = own.num_replicas
        part = count if own.zero else 1
        sizes = [list(stage) if count > 1 else [] for stage in buckets]
        sum_s = self._half_s if own.zero >= 2 else self._all_reduce_s
        times = [[sum_s(size, rank) for size in stage] for rank, stage in zip(placement, sizes, strict=True)]
        gather_s = tuple(
            self._half_s(sum(stage), rank) if own.zero else 0 for rank, stage in zip(placement, sizes, strict=True)
        )
        others = [sum(stage) - -(-sum(stage) // count) if own.zero == 3 else 0 for stage in sizes]
        others = list(map(min, others, costs.weight_bytes))
        columns = zip(costs.weight_bytes, costs.gradient_bytes, costs.optimizer_bytes, strict=True)
        return replace(
            costs,
            reduce_s=tuple(map(tuple, times)),
            reduce_bytes=tuple(map(tuple, sizes)),
            gather_s=() if own.zero == 3 else gather_s,
            unshard_s=gather_s if own.zero == 3 else (),
            weight_bytes=tuple(size - other for size, other in zip(costs.weight_bytes, others, strict=True)),
            gathered_bytes=tuple(others),
            update_s=tuple(seconds / part for seconds in costs.update_s),
            optimizer_bytes=tuple(own.held(ModelStates(*stage)).optimizer for stage in columns),
            update_transient_bytes=tuple(-(-size // part) for size in costs.update_transient_bytes),
        )

    def _on_ring(self, collective: str, size: int, rank: int) -> float:
        if self._links is None:
            return 0.0
        seconds: float = getattr(self._links, collective)(size, [row[rank] for row in self._rows])
        return seconds
