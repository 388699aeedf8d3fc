"""Key figures: computes the three numbers in large type at the top of a report's HTML page."""

from pipesched.planning.alternatives import fastest, taken
from pipesched.planning.plan import Plan
from pipesched.planning.report.findings import step_times
from pipesched.simulation.comparison import Comparison
from pipesched.simulation.trace import Trace
from pipesched.units import quote_speed, quote_time
from pipesched.viz.tables import KeyFigure

__all__ = ["key_figures"]


def key_figures(plan: Plan, predicted: Trace | None, comparison: Comparison | None) -> list[KeyFigure]:
    """Return the speed relative to one device, the bubble, and the slowest stage; [] if layers were not measured.

    Args:
        plan: the plan to report.
        predicted: the plan's predicted step.
        comparison: the comparison of the predicted step with a measured step. None: no step has run.

    """
    if predicted is None:
        return []
    return [
        _against_one_device(plan, predicted, comparison),
        _bubble(predicted, comparison),
        _slowest(plan, predicted, comparison),
    ]


def _against_one_device(plan: Plan, predicted: Trace, comparison: Comparison | None) -> KeyFigure:
    """Return the speed compared with the one-device plan or, if there is none, with all compute on one rank.

    If layers are split, the speed is compared with all compute on one tensor group. Both times are measured in trial
    runs, or both are predicted.
    """
    label = f"compared to one {'device' if plan.tensor is None else 'tensor group'}"
    count = plan.replication.num_replicas if plan.replication else 1
    if plan.num_devices == 1:
        return KeyFigure(label, "the same", "the plan uses one device")
    own = taken(plan.alternatives)
    alone = fastest(plan.alternatives, "one device")
    if own is not None and alone is not None:
        own_s, alone_s, how = step_times(own, alone)
    else:
        own_s, alone_s, how = predicted.makespan_s, sum(predicted.busy_s) * count, "predicted, from all stages' compute"
    speed = quote_speed(alone_s / own_s) if own_s else "not known"
    note = f"{quote_time(own_s)} a step instead of {quote_time(alone_s)}, both {how}"
    if comparison is not None and comparison.step_s is not None:
        note += f"; the last step took {quote_time(comparison.step_s.measured)} (measured)"
    return KeyFigure(label, speed, note)


def _bubble(predicted: Trace, comparison: Comparison | None) -> KeyFigure:
    if comparison is None:
        return KeyFigure("bubble", f"{predicted.bubble_ratio:.1%}", "of the ranks' time is idle (predicted)")
    both = comparison.bubble_ratio
    return KeyFigure(
        "bubble", f"{both.measured:.1%}", f"of the ranks' time is idle (measured); predicted {both.predicted:.1%}"
    )


def _slowest(plan: Plan, predicted: Trace, comparison: Comparison | None) -> KeyFigure:
    """Return the stage with the longest compute time per step: measured if a step has run, otherwise predicted."""
    if comparison is None:
        how = "predicted"
        work: dict[int, float] = {}
        for span in (span for row in predicted.by_rank for span in row):
            work[span.action.stage] = work.get(span.action.stage, 0) + span.end_s - span.start_s
    else:
        how = "measured"
        work = {own.stage: own.work_s.measured for own in comparison.stages}
    if not work:
        return KeyFigure("slowest stage", "none", "nothing was computed")
    stage = max(work, key=lambda own: work[own])
    layers = plan.first_to_last(plan.program.weights[stage])
    mean = sum(work.values()) / len(work)
    above = f", {work[stage] / mean - 1:.1%} above the mean" if mean and len(work) > 1 else ""
    return KeyFigure("slowest stage", f"stage {stage}", f"{layers}: {quote_time(work[stage])} a step, {how}{above}")
