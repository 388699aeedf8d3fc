"""Evaluated candidates: candidates with their stages, predicted step time and predicted memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from pipesched.partitioning.result import StageLayers
from pipesched.planning.alternatives import Alternative
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.planning.plan import completion_of
from pipesched.program.checkpoint_options import Checkpoint, checkpoint_in_words
from pipesched.program.completion import UNCHANGED, Completion
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.replication import Replication
from pipesched.simulation.simulator import simulate, step_time
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_layout import LayoutKind
from pipesched.simulation.trace import Trace
from pipesched.units import quote_bytes, quote_speed

__all__ = ["WORTH", "EvaluatedCandidate", "label_of", "simplest"]

WORTH = 0.005  # a saving below this fraction of a step does not justify a more complicated plan


@dataclass(frozen=True, kw_only=True)
class EvaluatedCandidate:
    """A candidate with its stages. Times and memory are computed on first use."""

    candidate: Candidate
    #: The names of each stage's layers.
    stages: StageLayers
    costs: Costs
    #: The memory limit of each rank; None without limits.
    limit_bytes: tuple[int, ...] | None = None
    #: The number of receives per channel that are posted in advance, each with a buffer.
    posted: int = 0
    #: Whether a step updates the weights, and whether updates wait for the norm of all gradients. The other actions
    #: that a step adds follow from the checkpoint option, the costs and the replicas.
    completion: Completion = UNCHANGED
    #: The replicas that run the candidate. None: replicas are not considered.
    replication: Replication | None = None
    #: The tensor groups that run the candidate. None: layers are not split.
    tensor: TensorAxis | None = None
    #: Whether the gradients of micro-batches are summed in a binary tree.
    in_tree: bool = False

    @cached_property
    def runs(self) -> Program:
        """The program that runs in a step of this candidate, except messages between ranks."""
        own = completion_of(self.completion, self.stages, self.candidate.checkpoint, self.costs, self.replication)
        return own.complete(self.candidate.program)

    @cached_property
    def step_s(self) -> float:
        """The simulated step time in seconds."""
        return step_time(self.runs, self.costs)

    @cached_property
    def trace(self) -> Trace:
        """The simulated step."""
        return simulate(self.runs, self.costs)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak memory of each rank, in bytes."""
        replicas = None if self.replication is None else self.replication.buffers(self.costs)
        memories = rank_memory(self.runs, self.costs, posted=self.posted, replicas=replicas, in_tree=self.in_tree)
        return tuple(memory.total_bytes for memory in memories)

    @property
    def excess_bytes(self) -> tuple[int, ...]:
        """The number of bytes by which each rank exceeds its limit; () if there are no limits."""
        if self.limit_bytes is None:
            return ()
        return tuple(max(0, peak - limit) for peak, limit in zip(self.peak_bytes, self.limit_bytes, strict=False))

    @property
    def tensor_size(self) -> int:
        """The number of ranks that split each layer."""
        return 1 if self.tensor is None else self.tensor.size

    @property
    def order(self) -> tuple[Any, ...]:
        """A sort key that puts simpler plans first, and equally simple plans in ascending order of memory."""
        chunks, *others = self.candidate.order
        own = self.replication or Replication()
        return (
            self.tensor_size,
            0 if self.tensor is None else get_args(LayoutKind).index(self.tensor.layout.kind),
            chunks,
            own.zero,
            not own.gather_once,
            _weight(self.candidate.checkpoint),
            max(self.peak_bytes),
            *others,
        )

    @property
    def label(self) -> str:
        """The candidate's name in tables: the schedule and the number of chunks or, if there are replicas, the axes."""
        if self.replication is None:
            return label_of(self.candidate)
        return self.replication.describe(self.candidate.num_ranks, self.tensor)

    def alternative(self, label: str = "", note: str = "") -> Alternative:
        """Return a summary of the candidate."""
        largest = max(range(len(self.peak_bytes)), key=self.peak_bytes.__getitem__)
        return Alternative(
            label=label or self.label,
            schedule=self.candidate.schedule.name,
            num_ranks=self.candidate.num_ranks,
            chunks_per_rank=self.candidate.schedule.chunks_per_rank,
            num_microbatches=self.candidate.num_microbatches,
            checkpoint=checkpoint_in_words(self.candidate.checkpoint),
            step_s=float(self.step_s),
            bubble_ratio=float(self.trace.bubble_ratio),
            peak_bytes=self.peak_bytes[largest],
            limit_bytes=self.limit_bytes[largest] if self.limit_bytes else None,
            num_replicas=None if self.replication is None else self.replication.num_replicas,
            zero=None if self.replication is None else self.replication.zero,
            tensor_size=None if self.tensor is None else self.tensor.size,
            tensor_layout="" if self.tensor is None or self.tensor.is_flat else str(self.tensor.layout),
            note=note,
        )

    def against(self, chosen: "EvaluatedCandidate", label: str) -> Alternative:
        """Return a summary of the candidate, with a note that says why ``chosen`` was chosen instead."""
        share = self.step_s / chosen.step_s - 1
        speed = quote_speed(chosen.step_s / self.step_s)
        if more := max(self.excess_bytes, default=0):
            note = f"exceeds the memory limit by {quote_bytes(more)}"
        elif 0 < share <= WORTH and self.order < chosen.order:
            note = f"{share:.2%} slower"
        elif share < -WORTH:
            note = f"{speed}, but the request does not allow this plan"
        else:
            note = speed if share > WORTH else "equally fast, but not simpler"
        return self.alternative(label, note)


def simplest(found: Iterable[tuple[EvaluatedCandidate, float]]) -> EvaluatedCandidate:
    """Return the simplest candidate whose step time exceeds the shortest step time by at most the fraction ``WORTH``.

    Args:
        found: candidates, each with its step time in seconds.

    """
    both = list(found)
    fastest_s = min(step_s for _, step_s in both)
    near = [(each, step_s) for each, step_s in both if step_s <= fastest_s * (1 + WORTH)]
    return min(near, key=lambda one: (*one[0].order, one[1]))[0]


def label_of(candidate: Candidate) -> str:
    """Return the name of a candidate in tables: the schedule, and the number of chunks if there are several."""
    chunks = candidate.schedule.chunks_per_rank
    return candidate.schedule.name + (f", {chunks} chunks" if chunks > 1 else "")


def _weight(checkpoint: Checkpoint) -> int:
    """Return the sort key of a checkpoint setting: larger for more recomputation, and largest for offloading."""
    if isinstance(checkpoint, str):
        return LADDER.index(checkpoint)
    return len(LADDER) if "offload" in checkpoint.values() else 1
