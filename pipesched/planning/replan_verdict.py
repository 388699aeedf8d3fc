"""Replan verdict: what a better plan would save, whether that is worth moving layers for, and what was decided.

With hysteresis, so that noise moves nothing: a saving counts above 3 % of a step and above twice the noise, and over
the steps that are left it outweighs what moving costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pipesched.errors import InputError
from pipesched.planning.plan import Plan
from pipesched.program.actions import Kind, Lane
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_bytes, quote_time

__all__ = ["Replanned", "certain", "check_steps_left", "layers_moved", "strayed", "verdict"]

_LEAST = 0.03  # of a step
_CERTAIN = 0.05  # of a stage's time, for one against another
_TIMES_NOISE = 2


@dataclass(frozen=True)
class Replanned:
    """What became of a plan between two steps.

    plan: that which runs now. kept: why the old one was kept; empty where another was applied. layers: those that have
    moved, or would: by name their ranks before and after. moved_bytes: of weights, gradients, buffers and states of
    optimizers that go to another device with them. before_s, after_s: the predicted step of the old plan, and of the
    other one; None where that was given, not searched. noise: how far the work of a rank strays between steps, as a
    share. cost_s: seconds that moving takes, measured where it was done and else estimated.
    """

    plan: Plan
    kept: str = ""
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    moved_bytes: int = 0
    before_s: float | None = None
    after_s: float | None = None
    noise: float = 0.0
    cost_s: float = 0.0

    @property
    def moved(self) -> bool:
        """Whether another plan runs now."""
        return not self.kept

    @property
    def saving_s(self) -> float:
        """Seconds of a step, as predicted."""
        return 0.0 if self.before_s is None or self.after_s is None else self.before_s - self.after_s

    def __str__(self) -> str:
        layers = f"{counted(len(self.layers), 'layer')}, {quote_bytes(self.moved_bytes)}"
        parts = [f"kept: {self.kept}" if self.kept else f"moved: {layers}"]
        if self.before_s and self.after_s is not None:
            share = -self.saving_s / self.before_s
            step = f"predicted {quote_time(self.before_s)} -> {quote_time(self.after_s)} a step"
            parts.append(f"{step} ({share:+.1%}, noise {self.noise:.1%})")
        if self.layers:
            steps = self.cost_s / self.saving_s if self.saving_s > 0 else 0.0
            saved = f", as much as {steps:,.0f} steps save" if steps >= 1 else ", less than a step saves" * (steps > 0)
            what = f"moving {layers} takes" if self.kept else "moving took"
            parts.append(f"{what} {quote_time(self.cost_s)}{saved}")
        return "; ".join(parts)


def check_steps_left(steps_left: object) -> None:
    """Raise InputError for what is no number of steps."""
    if steps_left is not None and (isinstance(steps_left, bool) or not isinstance(steps_left, int) or steps_left < 0):
        raise InputError(
            f"steps_left is how many steps are still to come, a whole number; got {steps_left!r}; leave it out where "
            f"that is not known"
        )


def layers_moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The layers whose rank changes, with both. before, after: the rank of each layer."""
    return {layer: (rank, after[layer]) for layer, rank in before.items() if after[layer] != rank}


def strayed(steps: Sequence[Trace]) -> float:
    """How far from the median the work of a rank is in half of the steps, as a share of it; of the rank where it is
    most. Steps of other numbers of micro-batches count: an action is compared with others of its kind.
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
    """From which share on one stage takes longer than another one for sure."""
    return max(_CERTAIN, _TIMES_NOISE * noise)


def verdict(before_s: float, after_s: float, *, noise: float, cost_s: float, steps_left: int | None) -> str:
    """Why a plan is not worth moving to; empty where it is. before_s, after_s: the predicted steps of the old plan and
    of the other one. steps_left: None where that is not known; then what moving costs does not count.
    """
    saving = before_s - after_s
    needed = max(_LEAST, _TIMES_NOISE * noise)
    if saving <= 0:
        return "no better plan was found"
    if saving <= before_s * needed:
        return f"a saving counts from {needed:.1%} of a step on"
    if steps_left is not None and saving * steps_left <= cost_s:
        return f"{steps_left} steps that are left save {quote_time(saving * steps_left)}, less than moving takes"
    return ""
