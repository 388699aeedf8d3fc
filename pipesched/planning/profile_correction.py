"""Profile correction: corrects a profile's layer times so that they reproduce the measured stage times of plans.

Stage times contain noise: a rank can be slower in one plan's steps than in another's. Differences between stages are
therefore corrected only as far as the variation from step to step cannot explain them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import fmean, median, variance
from typing import Any

import networkx as nx

from pipesched.partitioning.result import StageLayers
from pipesched.planning.cost_correction import Known, MeasuredStage
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.replan_verdict import certain, strayed
from pipesched.program.actions import Kind
from pipesched.simulation.comparison import Pair, StageComparison, compared
from pipesched.simulation.layer_costs import TIMES, LayerCosts, costs_of
from pipesched.simulation.profile import Profile
from pipesched.simulation.trace import Trace

__all__ = ["corrected"]

#: The predicted and measured times of the stages in one step.
Stages = tuple[StageComparison, ...]

_SWEEPS = 3  # passes over all plans that ran; a correction with one plan changes the correction with the next


def corrected(
    profile: Profile, ran: Sequence[tuple[EvaluatedCandidate, Sequence[Trace]]], batch_size: int, sweeps: int = _SWEEPS
) -> Profile:
    """Correct a profile's layer times, for all micro-batch sizes, so that they reproduce the measured stage times.

    A stage's time does not show which of its layers are slower than profiled (see
    `pipesched.planning.cost_correction`), but the stage times of plans with different boundaries do. The layer times
    are therefore corrected with one plan after another, ending with the best plan. If noise can explain the differences
    between stages, they are corrected only in part (see `_certainty`); a slowdown of all stages is always corrected.

    Args:
        profile: the measured layers.
        ran: the plans that ran, best first, each with its measured steps.
        batch_size: the number of rows in a batch.
        sweeps: the number of passes over the plans.

    """
    factors = {name: dict.fromkeys(TIMES, 1.0) for name in profile.layers}
    comparisons = [[compared(found.trace, step).stages for step in steps] for found, steps in ran]
    for (found, steps), compared_steps in [*reversed([*zip(ran, comparisons, strict=True)])] * sweeps:
        graph = profile.graph(-(-batch_size // found.candidate.num_microbatches))
        first = {name: costs_of(graph, name) for name in graph}
        known = Known({name: _times(costs, factors[name]) for name, costs in first.items()}, first)
        new = known.corrected(_stage_times(found.stages, compared_steps, first), certain(strayed(steps))).layers
        factors = {name: _ratios(new[name], costs) for name, costs in first.items()}
    factors = _damped(factors, _certainty(comparisons), _common_factor(profile, factors))
    return replace(profile, graphs={rows: _scaled(graph, factors) for rows, graph in profile.graphs.items()})


def _certainty(plans: Sequence[Sequence[Stages]]) -> float:
    """Return the fraction of the differences between stages that noise cannot explain: 1 if steps have no noise.

    A difference is a stage's logarithmic ratio of measured to predicted time, minus the mean ratio of the same step.
    The variance of these differences between stages contains the variance of their means over the steps, which is
    estimated from the variation between the steps of one plan (the method of moments, DerSimonian and Laird 1986).

    Args:
        plans: for each plan that ran, the comparison of each step with the prediction.

    """
    between = []
    within = []
    for steps in plans:
        for differences in zip(*map(_differences, steps), strict=True):
            between.append(fmean(differences) ** 2)
            if len(differences) > 1:
                within.append(variance(differences) / len(differences))
    found_variance = fmean(between) if between else 0.0
    return max(0.0, 1 - fmean(within) / found_variance) if within and found_variance else 1.0


def _differences(stages: Stages) -> list[float]:
    """Return the logarithmic ratio of measured to predicted time of each stage, minus the mean of these ratios."""
    works = [own.work_s for own in stages]
    ratios = [log(work.measured / work.predicted) if min(work) > 0 else 0.0 for work in works]
    return [ratio - fmean(ratios) for ratio in ratios]


def _common_factor(profile: Profile, factors: Mapping[str, Mapping[str, float]]) -> float:
    """Return the factor by which the forward and the backward of all layers together change."""
    graph = profile.graph(min(profile.graphs))
    first = {name: costs_of(graph, name) for name in graph}
    new = {name: _times(costs, factors[name]) for name, costs in first.items()}
    before_s, after_s = (sum(costs.forward_s + costs.backward_s for costs in each.values()) for each in (first, new))
    return after_s / before_s if before_s else 1.0


def _damped(factors: Mapping[str, Mapping[str, float]], certainty: float, common: float) -> dict[str, dict[str, float]]:
    """Return weighted geometric means of the layers' factors, with the weight ``certainty``, and the common factor."""
    return {
        name: {time: factor**certainty * common ** (1 - certainty) for time, factor in own.items()}
        for name, own in factors.items()
    }


def _stage_times(cut: StageLayers, steps: Sequence[Stages], layers: Mapping[str, LayerCosts]) -> list[MeasuredStage]:
    """Return the times of each stage per micro-batch, corrected by the measured steps.

    Each time is the sum of the times in ``layers``, multiplied by the stage's ratio of measured to predicted time.
    """
    stages: dict[int, list[StageComparison]] = {}
    for step in steps:
        for own in step:
            stages.setdefault(own.stage, []).append(own)
    times = []
    for stage, names in enumerate(cut):
        slower = _slower(stages.get(stage, []))
        whole = {time: slower[time] * sum(getattr(layers[name], time) for name in names) for time in TIMES}
        times.append(MeasuredStage(names, None, **whole))
    return times


def _slower(steps: Sequence[StageComparison]) -> dict[str, float]:
    """Return the ratios of measured to predicted time on one stage, keyed by the names in ``TIMES``.

    Each ratio is the median over the steps.
    """
    return {time: _ratio([own.seconds for own in steps], *kinds) for time, kinds in _KINDS.items()}


def _ratio(steps: Sequence[Mapping[Kind, Pair]], kinds: Sequence[Kind], others: Sequence[Kind]) -> float:
    """Return the median over all steps of measured time / predicted time, for the actions of ``kinds``.

    If a step has no such actions, its actions of ``others`` are used. If it has neither, or if the predicted time is 0,
    the step's ratio is 1.
    """
    ratios = []
    for seconds in steps:
        pairs = [seconds[kind] for kind in kinds if kind in seconds] or [
            seconds[kind] for kind in others if kind in seconds
        ]
        predicted = sum(pair.predicted for pair in pairs)
        ratios.append(sum(pair.measured for pair in pairs) / predicted if predicted else 1.0)
    return median(ratios) if ratios else 1.0


#: For each of ``TIMES``: the kinds of actions that measure it, and the kinds to use in steps without such actions.
_KINDS = {
    time: ((kind,), tuple(map(Kind, kind.row.instead))) for time in TIMES for kind in Kind if time in kind.row.costs
}


def _times(costs: LayerCosts, factors: Mapping[str, float]) -> LayerCosts:
    times: dict[str, Any] = {time: getattr(costs, time) * factors[time] for time in TIMES}
    return replace(costs, **times)


def _ratios(new: LayerCosts, first: LayerCosts) -> dict[str, float]:
    return {time: getattr(new, time) / getattr(first, time) if getattr(first, time) else 1.0 for time in TIMES}


def _scaled(graph: "nx.DiGraph[str]", factors: Mapping[str, Mapping[str, float]]) -> "nx.DiGraph[str]":
    """Scale the layer times of a graph. Scale ``waiting_s`` and ``crowded_s`` like the sum of forward and backward."""
    scaled = graph.copy()
    for name, node in scaled.nodes(data=True):
        first = costs_of(graph, name)
        new = _times(first, factors[name])
        took_s = first.forward_s + first.backward_s
        node.update({time: getattr(new, time) for time in TIMES})
        for part in ("waiting_s", "crowded_s"):
            if getattr(first, part) and took_s:
                node[part] = getattr(first, part) * (new.forward_s + new.backward_s) / took_s
    return scaled
