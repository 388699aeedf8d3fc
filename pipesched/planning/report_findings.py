"""Report findings: what a report says in sentences, the most important ones first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipesched.planning.alternatives import Alternative, fastest, taken
from pipesched.planning.plan import Plan
from pipesched.simulation.comparison import Comparison, measured_costs, quote_off
from pipesched.simulation.trace import Trace
from pipesched.units import quote_speed, quote_time

__all__ = ["findings", "step_times"]

_OTHERWISE = 0.001  # two predictions that differ by more are not the same
_BASELINES = {"equal split": "an equal split", "one device": "one device"}


def findings(
    plan: Plan,
    predicted: Trace | None,
    measured: Trace | None,
    comparison: Comparison | None,
    notes: Sequence[str],
) -> list[str]:
    """A sentence each. comparison: of the predicted and the measured step. notes: other sentences, said behind it."""
    return [
        *_step(predicted, comparison),
        *_causes(plan, measured, comparison),
        *_bubble(comparison),
        *notes,
        *_searched(plan, predicted),
        *_confirmed(plan),
        *_bound(predicted),
        *_gains(plan),
        *_bottleneck(plan),
        *map(str, plan.ties),
    ]


def _step(predicted: Trace | None, comparison: Comparison | None) -> Iterator[str]:
    """What a step takes."""
    if comparison is not None:
        yield str(comparison)
    elif predicted is not None:
        yield f"predicted {quote_time(predicted.makespan_s)} a step, bubble {predicted.bubble_ratio:.1%}"
    else:
        yield "what a step takes is not known: layers were not measured"


def _causes(plan: Plan, measured: Trace | None, comparison: Comparison | None) -> Iterator[str]:
    """What of the difference comes from stages that took other times: the plan, simulated with these."""
    if plan.costs is None or measured is None or comparison is None:
        return
    step = comparison.step_s
    if step is None or not step.predicted or len(comparison.stages) < plan.costs.num_stages:
        return
    with_measured = replace(plan, costs=measured_costs([measured], plan.costs.num_stages, plan.costs))
    before, after = (trace.makespan_s for trace in (plan.predicted(), with_measured.predicted()) if trace is not None)
    stages = (after - before) / step.predicted
    rest = (step.measured - step.predicted) / step.predicted - stages
    yield f"of that {quote_off(stages)} is what stages took, {quote_off(rest)} what lies between their actions"


def _bubble(comparison: Comparison | None) -> Iterator[str]:
    if comparison is not None:
        bubble = comparison.bubble_ratio
        yield f"bubble predicted {bubble.predicted:.1%}, measured {bubble.measured:.1%}"


def _searched(plan: Plan, predicted: Trace | None) -> Iterator[str]:
    """What the search expected, where what is shown as predicted is something else."""
    own = taken(plan.alternatives)
    if own is not None and predicted is not None:
        off = predicted.makespan_s / own.step_s - 1 if own.step_s else 0
        if abs(off) > _OTHERWISE:
            yield (
                f"the search had predicted {quote_time(own.step_s)} a step; what was weighed, and the cut, "
                f"are as it saw them"
            )


def _confirmed(plan: Plan) -> Iterator[str]:
    """What it took when it ran beside others, before it was chosen."""
    own = taken(plan.alternatives)
    if own is not None and own.measured_s is not None and own.first_s:
        others = sum(other.measured_s is not None for other in plan.alternatives) - 1
        off = quote_off(own.measured_s / own.first_s - 1)
        yield (
            f"confirmed: it ran beside {others} of the others and took {quote_time(own.measured_s)} a step, of "
            f"{quote_time(own.first_s)} as first predicted ({off}); the costs here are corrected by that"
        )


def _bound(predicted: Trace | None) -> Iterator[str]:
    """How far from the best that there could be."""
    if predicted is not None and predicted.bound_s is not None:
        yield (
            f"no schedule of these stages on these ranks takes less than {quote_time(predicted.bound_s)}: "
            f"the predicted step is {predicted.above_bound:.1%} above that"
        )


def _gains(plan: Plan) -> Iterator[str]:
    """Against doing nothing: as measured where both ran, else as the search predicted it."""
    own = taken(plan.alternatives)
    for label, name in _BASELINES.items():
        baseline = fastest(plan.alternatives, label)
        if own is None or baseline is None or baseline is own:
            continue
        own_s, other_s, how = step_times(own, baseline)
        if own_s:
            yield f"{_faster(other_s / own_s, name)} ({quote_time(other_s)}), as {how}"


def step_times(own: Alternative, other: Alternative) -> tuple[float, float, str]:
    """The step times of two plans in seconds, measured if both ran, else predicted; and which of the two, in words."""
    if own.measured_s and other.measured_s:
        return own.measured_s, other.measured_s, "measured"
    return own.step_s, other.step_s, "the search predicted"


def _faster(ratio: float, name: str) -> str:
    """A ratio of two times in words: ``1.38x faster than one device``."""
    words = quote_speed(ratio)
    return f"{words} {'as' if words.startswith('as') else 'than'} {name}"


def _bottleneck(plan: Plan) -> Iterator[str]:
    """The stage that holds all others up, and why there is no better partition."""
    if plan.partition is not None:
        cut = plan.partition.with_class_names(plan.layer_classes)
        verdict = "no cut is better" if cut.proved else f"the best cut is at most {cut.gap:.1%} better"
        yield f"bottleneck: {cut.bottleneck}, {quote_time(cut.bottleneck_s)} a micro-batch; {verdict}: {cut.reason}"
