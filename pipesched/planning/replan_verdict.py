"""Replan verdict: decides whether a better plan saves enough time to justify moving layers.

Thresholds prevent moves that are caused by noise. The saving per step must exceed 3 % of the step time and twice the
noise. The total saving in the remaining steps must exceed the cost of moving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pipesched.errors import InputError
from pipesched.planning.plan import Plan
from pipesched.program.actions import Kind, Lane
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_bytes, quote_time

__all__ = ["Replanned", "certain", "check_num_replicas", "check_steps_left", "layers_moved", "strayed", "verdict"]

_LEAST = 0.03  # savings below this fraction of a step are ignored
_CERTAIN = 0.05  # differences between two stages below this fraction of a stage's time are ignored
_TIMES_NOISE = 2


@dataclass(frozen=True)
class Replanned:
    """The result of replanning between two steps."""

    #: The plan that runs after replanning.
    plan: Plan
    #: Why the old plan was kept; empty if the new plan was applied.
    kept: str = ""
    #: The layers that have moved, or would move: name -> (rank before, rank after).
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: The size in bytes of the weights, gradients, buffers and optimizer states that change devices.
    moved_bytes: int = 0
    #: Predicted step time of the old plan. None: the caller gave the new plan, so there was no search.
    before_s: float | None = None
    #: Predicted step time of the new plan. None: the caller gave the new plan, so there was no search.
    after_s: float | None = None
    #: Relative deviation of a rank's work from step to step, for the rank where the deviation is largest.
    noise: float = 0.0
    #: The time in seconds that moving layers takes: measured if layers were moved, otherwise estimated.
    cost_s: float = 0.0

    @property
    def moved(self) -> bool:
        """Whether the new plan was applied."""
        return not self.kept

    @property
    def saving_s(self) -> float:
        """The time that the new plan is predicted to save per step, in seconds."""
        return 0.0 if self.before_s is None or self.after_s is None else self.before_s - self.after_s

    def __str__(self) -> str:
        layers = f"{counted(len(self.layers), 'layer')}, {quote_bytes(self.moved_bytes)}"
        parts = [f"kept: {self.kept}" if self.kept else f"moved: {layers}"]
        if self.before_s and self.after_s is not None:
            share = -self.saving_s / self.before_s
            step = f"predicted {quote_time(self.before_s)} -> {quote_time(self.after_s)} per step"
            parts.append(f"{step} ({share:+.1%}, noise {self.noise:.1%})")
        if self.layers:
            steps = self.cost_s / self.saving_s if self.saving_s > 0 else 0.0
            saved = f", regained after {steps:,.0f} steps" if steps >= 1 else ", regained within one step" * (steps > 0)
            moving = f"moving {layers} would take" if self.kept else "moving took"
            parts.append(f"{moving} {quote_time(self.cost_s)}{saved}")
        return "; ".join(parts)


def check_steps_left(steps_left: object) -> None:
    """Raise InputError if ``steps_left`` is neither a whole number of steps nor None."""
    if steps_left is not None and (isinstance(steps_left, bool) or not isinstance(steps_left, int) or steps_left < 0):
        raise InputError(
            f"steps_left must be the number of remaining steps, a whole number; got {steps_left!r}; leave steps_left= "
            f"out if the number is unknown"
        )


def check_num_replicas(plan: Plan | None, num_replicas: object) -> None:
    """Raise InputError if a number of replicas was passed without a plan, because the search keeps their number."""
    if plan is None and num_replicas is not None:
        raise InputError(
            f"num_replicas= needs a plan, because the search for a better plan keeps the number of replicas; replan() "
            f"got num_replicas={num_replicas!r} without a plan; pass the plan of one replica, too"
        )


def layers_moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the layers that change ranks: name -> (rank before, rank after).

    Args:
        before: the rank of each layer in the old plan.
        after: the rank of each layer in the new plan.

    """
    return {layer: (rank, after[layer]) for layer, rank in before.items() if after[layer] != rank}


def strayed(steps: Sequence[Trace]) -> float:
    """Return the largest variation of any rank's work from step to step.

    The variation of a rank's work is its median relative deviation. Each action is compared with actions of the same
    stage and kind, so steps can have different numbers of micro-batches.
    """
    seconds: dict[tuple[int, Kind], list[float]] = {}
    work: list[dict[int, list[tuple[tuple[int, Kind], float]]]] = []
    for step in steps:
        work.append({})
        for span in step.spans:
            if span.lane is Lane.COMPUTE:
                kind = (span.action.stage, span.action.kind)
                own = span.end_s - span.start_s
                seconds.setdefault(kind, []).append(own)
                work[-1].setdefault(span.rank, []).append((kind, own))
    usual = {kind: median(times) for kind, times in seconds.items()}
    shares: dict[int, list[float]] = {}
    for ranks in work:
        for rank, actions in ranks.items():
            expected = sum(usual[kind] for kind, _ in actions)
            shares.setdefault(rank, []).append(sum(own for _, own in actions) / expected if expected else 1.0)
    return max((median(abs(one - median(own)) for one in own) for own in shares.values()), default=0.0)


def certain(noise: float) -> float:
    """Return the smallest relative difference between two stage times that is not considered noise."""
    return max(_CERTAIN, _TIMES_NOISE * noise)


def verdict(before_s: float, after_s: float, *, noise: float, cost_s: float, steps_left: int | None) -> str:
    """Return the reason not to switch to another plan; "" if switching pays off.

    Args:
        before_s: predicted step time of the old plan.
        after_s: predicted step time of the new plan.
        noise: relative deviation of a rank's work from step to step.
        cost_s: the time that moving layers takes, in seconds.
        steps_left: the number of remaining steps. None: unknown; the cost of moving is then ignored.

    """
    saving = before_s - after_s
    needed = max(_LEAST, _TIMES_NOISE * noise)
    if saving <= 0:
        return "no better plan was found"
    if saving <= before_s * needed:
        return f"the saving is below {needed:.1%} of a step"
    if steps_left is not None and saving * steps_left <= cost_s:
        return (
            f"the saving over the remaining {counted(steps_left, 'step')} is {quote_time(saving * steps_left)}, less "
            f"than the time needed to move layers"
        )
    return ""
