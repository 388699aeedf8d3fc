"""Advice: what binds a plan, why a search did not choose more of something, and what to try next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from pipesched.json_files import read_fields
from pipesched.planning.alternatives import Alternative
from pipesched.planning.step_shares import StepShares
from pipesched.program.actions import Kind
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.units import counted, quote_bytes, quote_time

__all__ = [
    "NO_ADVICE",
    "Advice",
    "Cause",
    "NextStep",
    "binding",
    "cause_of",
    "more_in_words",
    "no_more_in_words",
    "places_of",
]

#: What binds a step.
Cause = Literal["compute", "messages", "replicas", "memory", "micro-batches", "balance", "ranks", "choices"]

_NOTABLE = 0.08  # a loss below this share of the step binds nothing: then the plan is bound by its compute
_MISSED = 0.0005  # an alternative that is faster than the plan by this fraction is one that the search has missed
_ROUNDING = 1e-6  # relative difference below which the work of two ranks is equal
_NAMES = {
    "compute": "bound by compute",
    "messages": "bound by messages between stages",
    "replicas": "bound by the sums and gathers of the replicas",
    "memory": "bound by memory",
    "micro-batches": "bound by too few micro-batches",
    "balance": "bound by unequal stages",
    "ranks": "too many ranks",
}


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """A change of a request for a plan, and the step time that the simulator expects after planning again."""

    #: The cause that the change removes, or makes smaller.
    cause: Cause
    #: The changed arguments, as text.
    change: str
    #: The expected step time in seconds.
    step_s: float
    #: The expected time for each row, relative to that of the plan: 0.8 saves 20 %.
    ratio: float
    #: The saving as text.
    effect: str
    #: The changed arguments of `pipesched.tune_profile`. Not saved.
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def saving(self) -> float:
        """The share of the time for each row that the change saves; negative if it costs time."""
        return 1 - self.ratio

    def __str__(self) -> str:
        return f"next: {self.change}: {self.effect}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Answers to the questions why a plan is as it is and what to try next, found by searching again."""

    #: For ranks, chunks and micro-batches, a sentence that says why the plan does not have more.
    why_not_more: tuple[str, ...] = ()
    #: What to try next, the best first.
    next_steps: tuple[NextStep, ...] = ()

    @property
    def in_words(self) -> "Advice":
        """A copy without the arguments of the next steps, which can be sent to other processes."""
        return replace(self, next_steps=tuple(replace(step, arguments={}) for step in self.next_steps))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON, without the arguments of the next steps."""
        names = ("cause", "change", "step_s", "ratio", "effect")
        steps = [{name: getattr(step, name) for name in names} for step in self.next_steps]
        return {"why_not_more": list(self.why_not_more), "next_steps": steps}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Advice":
        """Make advice from the dict that ``to_dict`` returned. Raises ScheduleError for wrong fields."""

        def steps(rows: Any) -> tuple[NextStep, ...]:
            return tuple(read_fields(NextStep, row, "a next step must have") for row in rows)

        return read_fields(cls, values, "the advice of a plan must have", next_steps=steps)


#: The advice of a plan that no search has made.
NO_ADVICE = Advice()


def cause_of(shares: StepShares, advice: Advice) -> Cause:
    """Return what binds a step: the largest loss, or compute if all losses are small."""
    if any(step.cause == "ranks" and step.saving > -_NOTABLE for step in advice.next_steps):
        return "ranks"
    unlimited = max((step.saving for step in advice.next_steps if step.cause == "memory"), default=0.0)
    losses: dict[Cause, float] = {
        "memory": max(shares.recomputation, unlimited),
        "messages": shares.messages,
        "replicas": shares.collectives,
        "micro-batches": shares.waiting,
        "balance": shares.imbalance,
    }
    worst = max(losses, key=lambda cause: losses[cause])
    return worst if losses[worst] >= _NOTABLE else "compute"


def binding(shares: StepShares, advice: Advice, places: Mapping[Cause, str]) -> Sequence[str]:
    """Return sentences that say what binds a step, and what all of its time is spent on.

    Args:
        shares: the shares of the step.
        advice: what the search found out.
        places: for a cause, words that say where it is, such as the slowest stage.

    """
    cause = cause_of(shares, advice)
    fewer: dict[Cause, str] = {
        step.cause: f"{step.change} is as fast" for step in advice.next_steps if step.cause == "ranks"
    }
    parts = {
        "compute (mean of the ranks)": shares.compute,
        "waiting for ranks with more work": shares.imbalance,
        "waiting while the pipeline fills and drains": shares.waiting,
        "messages": shares.messages,
        "recomputation": shares.recomputation,
        "sums and gathers of replicas": shares.collectives,
    }
    listed = sorted((part for part in parts.items() if part[1] >= 0.0005), key=lambda part: -part[1])
    where = {**places, **fewer}.get(cause, "")
    return [
        f"{_NAMES[cause]}{f': {where}' if where else ''}",
        f"of the predicted step: {', '.join(f'{share:.1%} {name}' for name, share in listed)}",
    ]


def places_of(program: Program, costs: Costs, shares: StepShares, own: Alternative | None) -> dict[Cause, str]:
    """Return, for each cause, where or how it binds a step."""
    busiest = _most_work(program, costs, shares.busiest)
    waits = f"{counted(program.num_microbatches, 'micro-batch')} for {counted(program.num_ranks, 'rank')}"
    places: dict[Cause, str] = {"compute": busiest, "balance": busiest, "micro-batches": waits}
    if own is not None and own.limit_bytes is not None:
        places["memory"] = f"the limit is {quote_bytes(own.limit_bytes, 4)} per rank"
    passing = [
        (_message_s(costs, *ranks, costs.output_bytes[stage]), stage, ranks)
        for stage, ranks in enumerate(pairwise(program.placement))
        if ranks[0] != ranks[1]
    ]
    if passing:
        seconds, stage, ranks = max(passing)
        places["messages"] = (
            f"the slowest, {quote_bytes(costs.output_bytes[stage])} from rank {ranks[0]} to rank {ranks[1]} after "
            f"stage {stage}, takes {quote_time(seconds)}"
        )
    return places


def _most_work(program: Program, costs: Costs, busiest: int) -> str:
    """Return words for the ranks that have as much work as the busiest one: with equal layers, these can be several."""
    work_s = [0.0] * program.num_ranks
    for rank, *times in zip(program.placement, costs.times(Kind.F), costs.times(Kind.B), strict=True):
        work_s[rank] += sum(times)
    ranks = [rank for rank, own_s in enumerate(work_s) if own_s >= work_s[busiest] * (1 - _ROUNDING)]
    if len(ranks) == program.num_ranks > 1:
        return f"all {len(ranks)} ranks have the same work"
    stages = [stage for stage, rank in enumerate(program.placement) if rank in ranks]
    places = f"rank{'s' * (len(ranks) > 1)} {_in_words(ranks)} (stage{'s' * (len(stages) > 1)} {_in_words(stages)})"
    return f"{places} {'have' if len(ranks) > 1 else 'has'} the most work"


def _in_words(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``1 to 6``, or ``0, 4``."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _message_s(costs: Costs, sender: int, receiver: int, size: int) -> float:
    """Return the time of a message from one rank to another, without the time of the ranks."""
    return costs.transfer_s + (costs.links.link(sender, receiver).time_s(size) if costs.links is not None else 0.0)


def more_in_words(what: str, count: int, step_s: float, own_s: float, remedy: str) -> str:
    """Return the sentence that says why a plan does not have more of something: the step of the nearest alternative.

    Args:
        what: a rank, a chunk or a micro-batch.
        count: the number in the nearest alternative.
        step_s: the simulated step of this alternative.
        own_s: the simulated step of the plan.
        remedy: the argument that leads to the alternative, in case that it is faster than the plan.

    """
    more = step_s / own_s - 1 if own_s else 0.0
    reason = f"the best plan with {counted(count, what)} takes {quote_time(step_s)} ({more:+.1%})"
    missed = f"; this search did not find it: pass {remedy}" if more <= -_MISSED else ""
    return no_more_in_words(what, reason + missed)


def no_more_in_words(what: str, reason: str) -> str:
    """Return the sentence that says why a plan does not have more ranks, chunks or micro-batches."""
    return f"why not more {counted(2, what).removeprefix('2 ')}: {reason}"
