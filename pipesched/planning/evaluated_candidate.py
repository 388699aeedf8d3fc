"""Evaluated candidate: a candidate with its stages, what it needs and takes, and how it compares with the chosen."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipesched.partitioning.result import StageLayers
from pipesched.planning.alternatives import Alternative
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.program.checkpoint_options import Checkpoint, checkpoint_in_words, offloading
from pipesched.program.lowering import add_offloading, add_updates
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.simulator import simulate, step_time
from pipesched.simulation.trace import Trace
from pipesched.units import quote_bytes, quote_speed

__all__ = ["WORTH", "EvaluatedCandidate", "label_of", "simplest"]

WORTH = 0.005  # a saving below this share of a step is not worth a more complicated plan


@dataclass(frozen=True, kw_only=True)
class EvaluatedCandidate:
    """A candidate with its stages. What it needs and takes is computed where it is asked for."""

    candidate: Candidate
    #: The names of each stage's layers.
    stages: StageLayers
    costs: Costs
    #: The memory limit of each rank; None without limits.
    limit_bytes: tuple[int, ...] | None = None
    #: How many receives of each channel have their memory ahead of their turn.
    posted: int = 0

    @cached_property
    def runs(self) -> Program:
        """What runs: with what is recomputed, and copies to the host."""
        return add_offloading(self.candidate.runs, offloading(self.candidate.checkpoint, self.stages))

    @cached_property
    def step_s(self) -> float:
        """The simulated seconds of a step."""
        return step_time(self.runs, self.costs)

    @cached_property
    def trace(self) -> Trace:
        """The simulated step."""
        return simulate(self.runs, self.costs)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """What each rank needs at most."""
        program = add_updates(self.runs) if any(self.costs.update_transient_bytes) else self.runs
        return tuple(memory.total_bytes for memory in rank_memory(program, self.costs, posted=self.posted))

    @property
    def excess_bytes(self) -> tuple[int, ...]:
        """How much of that is beyond each rank's limit; () without limits."""
        if self.limit_bytes is None:
            return ()
        return tuple(max(0, peak - limit) for peak, limit in zip(self.peak_bytes, self.limit_bytes, strict=False))

    @property
    def order(self) -> tuple[Any, ...]:
        """The simplest first, then what needs less memory."""
        chunks, *others = self.candidate.order
        return (chunks, _weight(self.candidate.checkpoint), max(self.peak_bytes), *others)

    def alternative(self, label: str = "", note: str = "") -> Alternative:
        """As plain numbers."""
        largest = max(range(len(self.peak_bytes)), key=self.peak_bytes.__getitem__)
        return Alternative(
            label=label or label_of(self.candidate),
            schedule=self.candidate.schedule.name,
            num_ranks=self.candidate.num_ranks,
            chunks_per_rank=self.candidate.schedule.chunks_per_rank,
            num_microbatches=self.candidate.num_microbatches,
            checkpoint=checkpoint_in_words(self.candidate.checkpoint),
            step_s=float(self.step_s),
            bubble_ratio=float(self.trace.bubble_ratio),
            peak_bytes=self.peak_bytes[largest],
            limit_bytes=self.limit_bytes[largest] if self.limit_bytes else None,
            note=note,
        )

    def against(self, chosen: "EvaluatedCandidate", label: str) -> Alternative:
        """The same, with why another one was chosen."""
        share = self.step_s / chosen.step_s - 1
        if more := max(self.excess_bytes, default=0):
            note = f"needs {quote_bytes(more)} more than a rank may hold"
        elif share < -WORTH:
            note = f"{quote_speed(chosen.step_s / self.step_s)}, but not as asked"
        else:
            note = quote_speed(chosen.step_s / self.step_s) if share > WORTH else "as fast, and not simpler"
        return self.alternative(label, note)


def simplest(found: Iterable[tuple[EvaluatedCandidate, float]]) -> EvaluatedCandidate:
    """The simplest of those that are as fast as the fastest. found: each with the seconds of a step."""
    both = list(found)
    fastest_s = min(step_s for _, step_s in both)
    near = [(each, step_s) for each, step_s in both if step_s <= fastest_s * (1 + WORTH)]
    return min(near, key=lambda one: (*one[0].order, one[1]))[0]


def label_of(candidate: Candidate) -> str:
    """What a candidate is called beside others."""
    chunks = candidate.schedule.chunks_per_rank
    return candidate.schedule.name + (f", {chunks} chunks" if chunks > 1 else "")


def _weight(checkpoint: Checkpoint) -> int:
    """How much is recomputed, roughly; what also waits on the host comes last."""
    if isinstance(checkpoint, str):
        return LADDER.index(checkpoint)
    return len(LADDER) if "offload" in checkpoint.values() else 1
