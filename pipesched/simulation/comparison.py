"""Comparison: compares predicted and measured times by stage and rank, and computes costs from measured traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from pipesched.errors import InputError
from pipesched.program.actions import Kind, Lane
from pipesched.simulation.costs import BY_BUCKET, Costs
from pipesched.simulation.trace import Trace
from pipesched.units import quote_time

__all__ = ["Comparison", "Pair", "StageComparison", "compared", "measured_costs", "quote_off"]


class Pair(NamedTuple):
    """A predicted and a measured value."""

    predicted: float
    measured: float

    @property
    def off(self) -> float | None:
        """The relative error: 0.03 if the measurement is 3 % above the prediction; None if the prediction is zero."""
        return self.measured / self.predicted - 1 if self.predicted else None


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """The predicted and measured times of one stage."""

    stage: int
    rank: int
    #: The median time of each kind of action.
    seconds: Mapping[Kind, Pair]
    #: The number of actions of each kind in a step.
    counts: Mapping[Kind, int]

    @property
    def work_s(self) -> Pair:
        """The stage's total time per step, in seconds: the sum over all actions of the median time of their kind."""
        return Pair(*(sum(count * self.seconds[kind][side] for kind, count in self.counts.items()) for side in (0, 1)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The predicted and measured times of one program."""

    #: The makespan; None if the traces have different numbers of actions, for example because a batch was shorter.
    step_s: Pair | None
    bubble_ratio: Pair
    #: The stages that are in both traces.
    stages: tuple[StageComparison, ...]
    #: The fraction of the makespan that each rank spends computing.
    busy: tuple[Pair, ...]

    @property
    def worst(self) -> StageComparison:
        """The stage whose predicted time has the largest relative error."""
        return max(self.stages, key=lambda own: abs(own.work_s.off or 0))

    def __str__(self) -> str:
        step = self.step_s
        worst = f"largest error on stage {self.worst.stage} ({quote_off(self.worst.work_s.off)})"
        if step is None:
            differ = "the predicted and the measured step have different numbers of actions"
            return f"{differ}; median times of actions: {worst}"
        times = f"predicted {quote_time(step.predicted)} per step, measured {quote_time(step.measured)}"
        return f"{times} ({quote_off(step.off)}), {worst}"


def compared(predicted: Trace, measured: Trace) -> Comparison:
    """Compare a predicted and a measured trace of one program, by stage and rank.

    Stages are compared by median times, because a single delayed action does not change a median. Raises InputError if
    the traces have no stage in common, or different numbers of ranks.
    """
    foreseen = _durations(predicted)
    seen = _durations(measured)
    both = [key for key in foreseen if key in seen]
    if not both or predicted.num_ranks != measured.num_ranks:
        raise InputError(
            f"a comparison requires two traces of the same program; the traces have {predicted.num_ranks} and "
            f"{measured.num_ranks} ranks, and {len(both)} (stage, kind of action) pairs in common; pass traces of "
            f"the same plan"
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
    """Compute costs from measured traces. Times are medians over each stage's actions; sizes come from ``profiled``.

    If a stage ran B but not I and W, the time of B is divided into I and W in the same ratio as in ``profiled``.
    Without ``profiled``, the whole time counts as I. If a stage ran I and W but not B, the time of B is the sum of the
    times of I and W. Kinds of action that did not run cost 0.

    Args:
        traces: the measured steps.
        num_stages: the number of stages.
        profiled: the costs that provide the sizes, and the ratio of the times of input and weight gradients. Default:
            none.

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
    found: dict[Kind, Any] = {kind: medians(kind) for kind in Kind if kind.row.lane is Lane.COMPUTE}
    found |= {Kind.B: whole, Kind.I: inputs, Kind.W: weights}
    lanes = [row for trace in traces for row in (*trace.collectives_by_rank, *trace.redundancy_by_rank)]
    for kind in {span.action.kind for row in lanes for span in row} - {Kind.MIRROR}:  # a MIRROR's time is its message's
        found[kind] = _started_times(traces, kind, num_stages)
    times: dict[str, Any] = {kind.row.costs[0]: own for kind, own in found.items() if kind.row.costs}
    others = {str(kind): own for kind, own in found.items() if not kind.row.costs}
    times["other_s"] = {**profiled.other_s, **others} if profiled else others
    if profiled is None:
        return Costs(**times)
    overheads = profiled.overheads and replace(profiled.overheads, crowding=())  # measured times include crowding
    return replace(profiled, **times, overheads=overheads)


def quote_off(share: float | None) -> str:
    """Return a relative error as text, such as ``+3.3%``; ``new`` if the predicted value is zero."""
    return "new" if share is None else f"{round(share, 3) + 0.0:+.1%}"  # + 0.0 converts -0.0 to 0.0


def _started_times(traces: Sequence[Trace], kind: Kind, num_stages: int) -> list[Any]:
    """Return the median time in seconds of each stage's collectives or copies of a kind; 0 for a stage without such.

    If the time of the kind depends on the bucket, return the median of each bucket instead, for each stage.
    """
    seen: list[dict[int, list[float]]] = [{} for _ in range(num_stages)]
    for span in chain.from_iterable(trace.spans for trace in traces):
        if span.action.kind is kind:
            seen[span.action.stage].setdefault(span.action.microbatch, []).append(span.end_s - span.start_s)
    if kind in BY_BUCKET:
        return [[median(times) for _, times in sorted(own.items())] for own in seen]
    return [median(chain.from_iterable(own.values())) if own else 0.0 for own in seen]


def _durations(*traces: Trace) -> dict[tuple[int, Kind], list[float]]:
    """Return the durations of the actions in all traces in seconds, keyed by (stage, kind)."""
    seen: dict[tuple[int, Kind], list[float]] = {}
    for row in chain.from_iterable(trace.by_rank for trace in traces):
        for span in row:
            seen.setdefault((span.action.stage, span.action.kind), []).append(span.end_s - span.start_s)
    return seen


def _lengths(durations: Mapping[tuple[int, Kind], list[float]]) -> dict[tuple[int, Kind], int]:
    return {key: len(values) for key, values in durations.items()}
