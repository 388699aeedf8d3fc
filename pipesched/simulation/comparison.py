"""Comparison: a predicted step beside a measured one, figure by figure: how far off it was, and where; and costs as
they were measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from pipesched.errors import InputError
from pipesched.program.actions import Kind
from pipesched.simulation.costs import Costs
from pipesched.simulation.trace import Trace
from pipesched.units import quote_time

__all__ = ["Comparison", "Pair", "StageComparison", "compared", "measured_costs", "quote_off"]


class Pair(NamedTuple):
    """One figure as it was predicted, and as it was measured."""

    predicted: float
    measured: float

    @property
    def off(self) -> float | None:
        """How far the measured one is above the predicted one, as a share of it: 0.03 is 3 %. None where that is 0."""
        return self.measured / self.predicted - 1 if self.predicted else None


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """One stage."""

    stage: int
    rank: int
    #: The median of its actions of each kind.
    seconds: Mapping[Kind, Pair]
    #: How many actions of each kind a step has.
    counts: Mapping[Kind, int]

    @property
    def work_s(self) -> Pair:
        """All its actions in a step, if each took the median."""
        return Pair(*(sum(count * self.seconds[kind][side] for kind, count in self.counts.items()) for side in (0, 1)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two traces of one program."""

    #: The makespan; None if one has run more actions than the other, as of a shorter batch.
    step_s: Pair | None
    bubble_ratio: Pair
    #: Those that both have run.
    stages: tuple[StageComparison, ...]
    #: How long each rank computes, as a share of the makespan.
    busy: tuple[Pair, ...]

    @property
    def worst(self) -> StageComparison:
        """The stage whose work was farthest off."""
        return max(self.stages, key=lambda own: abs(own.work_s.off or 0))

    def __str__(self) -> str:
        """One line: both times, and the stage that was farthest off."""
        step = self.step_s
        worst = f"worst stage {self.worst.stage} ({quote_off(self.worst.work_s.off)})"
        if step is None:
            return f"predicted and measured are of different numbers of actions; {worst}, action by action"
        times = f"predicted {quote_time(step.predicted)}, measured {quote_time(step.measured)}"
        return f"{times} ({quote_off(step.off)}), {worst}"


def compared(predicted: Trace, measured: Trace) -> Comparison:
    """Compare two traces of the same program, stage by stage and rank by rank.

    Medians count, so that an action that something else has held up says nothing of its stage. Raises InputError where
    the traces have no stage in common, or not as many ranks.
    """
    foreseen = _durations(predicted)
    seen = _durations(measured)
    both = [key for key in foreseen if key in seen]
    if not both or predicted.num_ranks != measured.num_ranks:
        raise InputError(
            f"a comparison is of two traces of one program; one is of {predicted.num_ranks} ranks, the other of "
            f"{measured.num_ranks}, and {len(both)} kinds of actions of a stage are in both; pass those of one plan"
        )
    rank_of = {span.action.stage: rank for rank, row in enumerate(predicted.by_rank) for span in row}
    stages = []
    for stage in sorted({stage for stage, _ in both}):
        kinds = [kind for kind in Kind if (stage, kind) in both]
        seconds = {kind: Pair(median(foreseen[stage, kind]), median(seen[stage, kind])) for kind in kinds}
        counts = {kind: len(foreseen[stage, kind]) for kind in kinds}
        stages.append(StageComparison(stage=stage, rank=rank_of[stage], seconds=seconds, counts=counts))
    same = _lengths(foreseen) == _lengths(seen)
    return Comparison(
        step_s=Pair(predicted.makespan_s, measured.makespan_s) if same else None,
        bubble_ratio=Pair(predicted.bubble_ratio, measured.bubble_ratio),
        stages=tuple(stages),
        busy=tuple(map(Pair, predicted.busy_ratios, measured.busy_ratios)),
    )


def measured_costs(traces: Sequence[Trace], num_stages: int, profiled: Costs | None = None) -> Costs:
    """The medians of what each stage's actions took; sizes come from the profile.

    A backward that only ran whole is split in the ratio of the profile, without one it is all input gradients; one that
    only ran split takes both parts together. Other kinds that did not run cost nothing.
    """
    seen = _durations(*traces)

    def medians(kind: Kind) -> list[float]:
        return [median(seen.get((stage, kind), [0.0])) for stage in range(num_stages)]

    whole = medians(Kind.B)
    inputs = medians(Kind.I)
    weights = medians(Kind.W)
    for stage in range(num_stages):
        if (stage, Kind.B) not in seen:
            whole[stage] = inputs[stage] + weights[stage]
        elif (stage, Kind.I) not in seen:
            parts = (profiled.input_grad_s[stage], profiled.weight_grad_s[stage]) if profiled else (1, 0)
            inputs[stage] = whole[stage] * parts[0] / sum(parts) if any(parts) else whole[stage]
            weights[stage] = whole[stage] - inputs[stage]
    times: dict[str, Any] = {
        "forward_s": medians(Kind.F),
        "input_grad_s": inputs,
        "weight_grad_s": weights,
        "backward_s": whole,
        "recompute_s": medians(Kind.R),
        "update_s": medians(Kind.UPDATE),
    }
    if profiled is None:
        return Costs(**times)
    own = profiled.overheads and replace(profiled.overheads, crowding=())  # of measured times it is a part
    return replace(profiled, **times, overheads=own)


def quote_off(share: float | None) -> str:
    """A difference as it is written: ``+3.3%``; ``new`` where nothing was predicted."""
    return "new" if share is None else f"{round(share, 3) + 0.0:+.1%}"  # 0, not -0


def _durations(*traces: Trace) -> dict[tuple[int, Kind], list[float]]:
    """How long each stage's actions of each kind took."""
    seen: dict[tuple[int, Kind], list[float]] = {}
    for row in chain.from_iterable(trace.by_rank for trace in traces):
        for span in row:
            seen.setdefault((span.action.stage, span.action.kind), []).append(span.end_s - span.start_s)
    return seen


def _lengths(durations: Mapping[tuple[int, Kind], list[float]]) -> dict[tuple[int, Kind], int]:
    return {key: len(values) for key, values in durations.items()}
