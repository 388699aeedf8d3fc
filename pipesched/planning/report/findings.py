"""Report findings: writes the sentences of a report, the most important first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipesched.planning.alternatives import Alternative, fastest, taken
from pipesched.planning.plan import Plan
from pipesched.program.actions import Kind
from pipesched.simulation.bounds import program_bound
from pipesched.simulation.comparison import Comparison, measured_costs, quote_off
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_bytes, quote_speed, quote_time

__all__ = ["findings", "step_times"]

_OTHERWISE = 0.001  # two predictions are regarded as different if they differ by more than this fraction
_ROUNDING = 1e-9  # a step this close to its bound has reached it: sums of times are rounded
_BASELINES = {"equal split": "an equal split", "one device": "one device"}


def findings(
    plan: Plan,
    predicted: Trace | None,
    measured: Trace | None,
    comparison: Comparison | None,
    notes: Sequence[str],
) -> list[str]:
    """Return the sentences of a report, the most important first.

    Args:
        plan: the plan.
        predicted: the predicted step.
        measured: the measured step.
        comparison: the comparison of the predicted with the measured step.
        notes: sentences to insert after the step time and the bubble, before those of the plan and the measured step.

    """
    return [
        *_step(predicted, comparison),
        *_causes(plan, measured, comparison),
        *_bubble(comparison),
        *_communication(predicted),
        *_redundancy(plan, predicted),
        *notes,
        *plan.notes,
        *(measured.notes if measured is not None else ()),
        *_searched(plan, predicted),
        *_confirmed(plan),
        *_bound(plan, predicted),
        *_measured_bound(plan, measured, comparison),
        *plan.binding(),
        *plan.advice.why_not_more,
        *_gains(plan),
        *_bottleneck(plan),
        *map(str, plan.ties),
    ]


def _step(predicted: Trace | None, comparison: Comparison | None) -> Iterator[str]:
    """Yield a sentence with the step time."""
    if comparison is not None:
        yield str(comparison)
    elif predicted is not None:
        yield f"predicted {quote_time(predicted.makespan_s)} per step, bubble {predicted.bubble_ratio:.1%}"
    else:
        yield "the step time is unknown: layers were not measured"


def _causes(plan: Plan, measured: Trace | None, comparison: Comparison | None) -> Iterator[str]:
    """Yield a sentence on how much stage compute and the gaps between actions contribute to the prediction error.

    The contribution of stage compute is the change in the simulated step time when measured stage times replace the
    predicted ones.
    """
    if plan.costs is None or measured is None or comparison is None:
        return
    step = comparison.step_s
    if step is None or not step.predicted or len(comparison.stages) < plan.costs.num_stages:
        return
    with_measured = replace(plan, costs=measured_costs([measured], plan.costs.num_stages, plan.costs))
    before, after = (trace.makespan_s for trace in (plan.predicted(), with_measured.predicted()) if trace is not None)
    stages = (after - before) / step.predicted
    rest = (step.measured - step.predicted) / step.predicted - stages
    yield (
        f"of this difference, stage compute accounts for {quote_off(stages)} and gaps between actions for "
        f"{quote_off(rest)}"
    )


def _bubble(comparison: Comparison | None) -> Iterator[str]:
    if comparison is not None:
        bubble = comparison.bubble_ratio
        yield f"bubble: predicted {bubble.predicted:.1%}, measured {bubble.measured:.1%}"


def _communication(predicted: Trace | None) -> Iterator[str]:
    """Yield a sentence that says when replicas communicate: in bubbles, during compute or exposed.

    Yields nothing if there is only one replica.
    """
    if predicted is None or predicted.hidden_communication is None:
        return
    parts = [sum(part) for part in zip(*predicted.communication_times, strict=True)]
    in_bubbles, under_compute, exposed = (f"{part / sum(parts):.1%}" for part in parts)
    gathers = Kind.UNSHARD in predicted.kinds
    yield (
        f"predicted gradient reductions{' and weight gathers' if gathers else ''}: {in_bubbles} of their time is in "
        f"bubbles, "
        f"{under_compute} overlaps with compute, and "
        f"{exposed} {'makes ranks wait' if gathers else 'comes after the last backward'}"
    )


def _redundancy(plan: Plan, predicted: Trace | None) -> Iterator[str]:
    """Yield a sentence that says what the copies of stages cost, if the plan keeps any."""
    if predicted is None or plan.costs is None or not predicted.redundancy_by_rank:
        return
    without = simulate(replace(plan.completion, redundancy=False).complete(plan.program), plan.costs)
    ends = [span.end_s for row in predicted.redundancy_by_rank for span in row]
    ready = (max(ends) - predicted.start_s) / predicted.makespan_s if predicted.makespan_s else 0
    longer = predicted.makespan_s / without.makespan_s - 1 if without.makespan_s else 0
    size = quote_bytes(max(own.host_copies for own in plan.memory()))
    yield (
        f"predicted copies of stages, for when a rank is lost: they are up to date {ready:.1%} into the step, make it "
        f"{max(0, longer):.1%} longer, and take at most {size} of a rank's host"
    )


def _searched(plan: Plan, predicted: Trace | None) -> Iterator[str]:
    """Yield a sentence with the step time that the search predicted, if the report shows a different prediction."""
    own = taken(plan.alternatives)
    if own is not None and predicted is not None:
        off = predicted.makespan_s / own.step_s - 1 if own.step_s else 0
        if abs(off) > _OTHERWISE:
            yield (
                f"the search predicted {quote_time(own.step_s)} per step, and used this prediction to compare plans "
                f"and to choose the split"
            )


def _confirmed(plan: Plan) -> Iterator[str]:
    """Yield a sentence with the result of the plan's trial run, if there was one."""
    own = taken(plan.alternatives)
    if own is not None and own.measured_s is not None and own.first_s:
        # A baseline that ran under another label is listed twice, with the same times.
        num_tried = len({(other.measured_s, other.first_s) for other in plan.alternatives if other.measured_s})
        off = quote_off(own.measured_s / own.first_s - 1)
        yield (
            f"confirmed: in trial runs of {counted(num_tried, 'plan')} this plan took {quote_time(own.measured_s)} "
            f"per step, {off} relative to the first prediction of {quote_time(own.first_s)}; the costs below are "
            f"corrected accordingly"
        )


def _bound(plan: Plan, predicted: Trace | None) -> Iterator[str]:
    """Yield a sentence that compares the predicted step time with the lower bound for the predicted times."""
    if predicted is not None:
        yield from (f"with the predicted times, {sentence}" for sentence in plan.bound_in_words(predicted))


def _measured_bound(plan: Plan, measured: Trace | None, comparison: Comparison | None) -> Iterator[str]:
    """Yield a sentence that compares the measured step time with the lower bound for the measured times.

    The bound uses the median time of each kind of action. A step can be faster if its other actions are.
    """
    if measured is None or comparison is None or comparison.step_s is None:
        return
    program = plan.program
    bound_s = measured.bound_s
    if bound_s is None and measured.num_microbatches == program.num_microbatches:
        bound_s = program_bound(program, measured_costs([measured], program.num_stages, plan.costs))
    if not bound_s:
        return
    above = measured.makespan_s / bound_s - 1
    if above > -_ROUNDING:
        above = max(0.0, above)
        yield f"with the measured times, the bound is {quote_time(bound_s)}; the measured step is {above:.1%} above it"
    else:
        yield "with the measured times, no schedule of these stages on these ranks can be clearly faster"


def _gains(plan: Plan) -> Iterator[str]:
    """Yield a sentence with the speed-up over each baseline: measured if both plans ran, otherwise predicted."""
    own = taken(plan.alternatives)
    for label, name in _BASELINES.items():
        baseline = fastest(plan.alternatives, label)
        if own is None or baseline is None or baseline is own or not baseline.fits:
            continue
        own_s, other_s, how = step_times(own, baseline)
        if own_s and other_s:
            yield f"{_faster(other_s / own_s, name)} ({quote_time(other_s)}), as {how}"


def step_times(own: Alternative, other: Alternative) -> tuple[float, float, str]:
    """Return the step times of two plans in seconds, measured if both plans ran, else predicted.

    The third result is a text that says whether the times were measured or predicted.
    """
    if own.measured_s and other.measured_s:
        return own.measured_s, other.measured_s, "measured in trial runs"
    return own.step_s, other.step_s, "predicted by the search"


def _faster(ratio: float, name: str) -> str:
    """Return a ratio of two step times in words, such as ``1.38x faster than one device``."""
    words = quote_speed(ratio)
    return f"{words} {'as' if words.startswith('as') else 'than'} {name}"


def _bottleneck(plan: Plan) -> Iterator[str]:
    """Yield a sentence that names the slowest stage and states whether the split is optimal."""
    if plan.partition is not None:
        yield f"predicted {plan.partition.with_class_names(plan.layer_classes).verdict}"
