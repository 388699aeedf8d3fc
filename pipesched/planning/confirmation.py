"""Confirmation: runs the best plans for a few steps, corrects the layer costs, and chooses the fastest plan.

The search is repeated with the corrected costs. The caller supplies the function that runs plans. Usually, the function
runs the plans on devices. In tests, it simulates them with other costs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt
from statistics import fmean, median
from typing import Any

from pipesched.planning.alternatives import Alternative
from pipesched.planning.candidates import Candidate
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate, simplest
from pipesched.planning.plan import Plan
from pipesched.planning.profile_correction import corrected
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import Tuner
from pipesched.simulation.trace import Trace
from pipesched.units import quote_speed

__all__ = ["Run", "confirmed_plan", "settled"]

Progress = Callable[[float], None]

#: A function that runs several steps of each plan, alternating between plans. It returns the measured steps of each
#: plan, or [] for a plan that did not run. At least one plan must run; the first plan is the most important.
Run = Callable[[Sequence[Plan], Progress], Sequence[Sequence[Trace]]]

#: A function that completes a plan. It also gets the request with the corrected costs from which the plan was made.
Finish = Callable[[Plan, SearchRequest], Plan]

_LEAST = 0.01  # differences below this fraction of a step are ignored
_TIMES_NOISE = 2
_ERROR_OF_PREDICTION = 0.03  # the typical relative error of a predicted step time
_ERROR_OF_MEDIAN = 1.86  # standard error of a median = this factor x median deviation / sqrt(count)


@dataclass(frozen=True)
class _Measured:
    """The measured steps of a plan."""

    steps: Sequence[Trace]

    @property
    def step_s(self) -> float:
        """The median measured step time."""
        return median(step.makespan_s for step in self.steps)

    @property
    def deviation(self) -> float:
        """The median relative deviation of a step from ``step_s``."""
        return median(abs(step.makespan_s / self.step_s - 1) for step in self.steps)

    def noise(self, usual: float) -> float:
        """Return the relative standard error of ``step_s``.

        Args:
            usual: the mean deviation of all plans. It is used if this plan's own deviation is smaller, because a plan
                may have only two steps, which may be equal by chance.

        """
        return _ERROR_OF_MEDIAN * max(self.deviation, usual) / sqrt(len(self.steps))

    def is_slower(self, other: "_Measured", usual: float) -> bool:
        """Return whether this plan's measured steps are slower than the other plan's by more than noise."""
        return self.step_s > other.step_s * (1 + _needed(hypot(self.noise(usual), other.noise(usual))))


def _usual_deviation(ran: Iterable[_Measured]) -> float:
    return fmean(one.deviation for one in ran)


@dataclass(frozen=True)
class _Tried(_Measured):
    """A plan that has been run."""

    #: The plan, simulated with the current costs.
    found: EvaluatedCandidate
    #: The step time that was predicted before the plan ran.
    first_s: float

    def expected_s(self, usual: float) -> float:
        """Return the weighted geometric mean of the predicted and the measured step time.

        The weights are those of two independent estimates with the errors ``_ERROR_OF_PREDICTION`` and ``noise``.
        """
        weight = _ERROR_OF_PREDICTION**2 / (_ERROR_OF_PREDICTION**2 + self.noise(usual) ** 2)
        return exp((1 - weight) * log(self.found.step_s) + weight * log(self.step_s))

    def alternative(self, chosen: "_Tried", usual: float) -> Alternative:
        """Return a summary of the plan, with a note that says why ``chosen`` was chosen instead."""
        note = ""
        if self is not chosen:
            speed = quote_speed(chosen.step_s / self.step_s)
            note = f"measured {speed}" if self.is_slower(chosen, usual) else "measured equally fast, within noise"
        return replace(self.found.alternative(note=note), measured_s=self.step_s, first_s=self.first_s)


def settled(ran: Sequence[Sequence[Trace]]) -> bool:
    """Return whether further steps of these plans are unlikely to change which of them is the fastest.

    The result is True if every other plan is slower than the fastest plan by more than noise, or if the noise is too
    small to matter.

    Args:
        ran: the measured steps of each plan; [] for a plan that did not run.

    """
    each = [_Measured(steps) for steps in ran if steps]
    least = min(each, key=lambda one: one.step_s)
    usual = _usual_deviation(each)
    others = [one for one in each if one is not least]
    return all(
        one.is_slower(least, usual) or _needed(hypot(one.noise(usual), least.noise(usual))) <= _LEAST for one in others
    )


def _needed(noise: float) -> float:
    """Return the smallest relative difference between two step times that is not considered noise."""
    return max(_LEAST, _TIMES_NOISE * noise)


def confirmed_plan(
    search: SearchRequest,
    run: Run,
    count: int,
    progress: Progress = lambda _: None,
    finish: Finish = lambda plan, _: plan,
) -> Plan:
    """Search for plans, run the best plans, and return the fastest of them with corrected costs.

    If the times of several plans differ only by noise, the plan with the shortest expected step is chosen. The
    alternatives of the returned plan include the measured times. Raises the same errors as ``find_plan``.

    Args:
        search: the request.
        run: a function that runs plans and returns their measured steps.
        count: the maximum number of plans to run. Any two of them differ in ranks, micro-batches, chunks, backward
            splitting or checkpointing. If the search with corrected costs finds a better plan, this plan also runs.
        progress: called with the completed fraction of the work.
        finish: completes the plan before its measured alternatives are added. Default: the plan stays as it is.

    """
    progress = _forward(progress)
    tuner = Tuner(search, _part(progress, 0.0, 0.3))
    tried = _run(_best_of_families(tuner.search(), tuner.best())[:count], tuner, run, _part(progress, 0.3, 0.6))
    search = _corrected(search, tried)
    tuner, new, tried = _search_again(search, tried, _part(progress, 0.6, 0.7))
    fastest = _fastest(tried, _usual_deviation(tried))
    if new.step_s < fastest.found.step_s * (1 - WORTH) and not any(_alike(new, one.found) for one in tried):
        others = [one for one in tried if one is not fastest]
        rivals = _run([new, fastest.found], tuner, run, _part(progress, 0.7, 0.9))
        again = next((one.steps for one in rivals if one.found is fastest.found), fastest.steps)
        rivals = [replace(fastest, steps=again), *(one for one in rivals if one.found is new)]
        tried = [*rivals, *others]
        search = _corrected(search, tried)
        tuner, known, tried = _predicted_again(search, tried, _part(progress, 0.9, 1.0))
        tuner.explore(known=known)  # finds the alternatives of the plan
        fastest = _fastest(tried[: len(rivals)], _usual_deviation(tried))
    plan = finish(tuner.plan(fastest.found), search)
    progress(1)
    return replace(plan, alternatives=tuple(_weighed(plan, tried, fastest)))


def _corrected(search: SearchRequest, tried: Sequence[_Tried]) -> SearchRequest:
    """Return the request with layer costs corrected by the measured steps."""
    measured = [(one.found, one.steps) for one in sorted(tried, key=lambda one: one.step_s)]
    return replace(search, profile=corrected(search.profile, measured, search.batch_size))


def _search_again(
    search: SearchRequest, tried: Sequence[_Tried], progress: Progress
) -> tuple[Tuner, EvaluatedCandidate, list[_Tried]]:
    """Search with corrected costs, starting from the plans that ran.

    Returns the tuner, the best plan, and the plans that ran, with new predictions.
    """
    tuner, known, tried = _predicted_again(search, tried, progress)
    return tuner, tuner.search(known), tried


def _predicted_again(
    search: SearchRequest, tried: Sequence[_Tried], progress: Progress
) -> tuple[Tuner, list[EvaluatedCandidate], list[_Tried]]:
    """Use corrected costs to simulate the plans that ran.

    Returns the tuner, the simulated candidates, and the plans that ran, with new predictions.
    """
    tuner = Tuner(search, progress)
    known = [tuner.simulated(one.found.candidate, one.found.stages) for one in tried]
    return tuner, known, [replace(one, found=found) for one, found in zip(tried, known, strict=True)]


def _forward(progress: Progress) -> Progress:
    """Return a function that calls ``progress``, but only if the completed fraction has increased."""
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if share > told:
            told = share
            progress(share)

    return tell


def _part(progress: Progress, begin: float, end: float) -> Progress:
    return lambda share: progress(begin + share * (end - begin))


# ---- runs -----------------------------------------------------------------------------------------------------------


def _best_of_families(chosen: EvaluatedCandidate, best: Sequence[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """Return the chosen candidate, and the best candidate of every other family.

    A family is a group of candidates with the same ranks, micro-batches, chunks, backward splitting and checkpointing.
    Candidates of the same family have different orders of actions, placements or boundaries. The simulation predicts
    the effect of these differences well, but the prediction error differs from family to family.
    """
    families: dict[Any, EvaluatedCandidate] = {}
    for found in (chosen, *best):
        families.setdefault(_family(found.candidate), found)
    return list(families.values())


def _family(candidate: Candidate) -> tuple[Any, ...]:
    own = candidate.num_ranks, candidate.num_microbatches, candidate.schedule.chunks_per_rank, candidate.splits
    return (*own, repr(candidate.checkpoint))


def _run(found: Sequence[EvaluatedCandidate], tuner: Tuner, run: Run, progress: Progress) -> list[_Tried]:
    steps = run([tuner.plan(each) for each in found], progress)
    return [_Tried(own, each, each.step_s) for each, own in zip(found, steps, strict=True) if own]


def _alike(one: EvaluatedCandidate, other: EvaluatedCandidate) -> bool:
    """Return whether two candidates have the same stages and the same program."""
    return (one.stages, one.runs) == (other.stages, other.runs)


def _fastest(tried: Sequence[_Tried], usual: float) -> _Tried:
    """Return the fastest plan that ran. If several are equally fast within noise, choose among them with `simplest`."""
    least = min(tried, key=lambda one: one.step_s)
    near = [one for one in tried if not one.is_slower(least, usual)]
    chosen = simplest((one.found, one.expected_s(usual)) for one in near)
    return next(one for one in near if one.found is chosen)


def _weighed(plan: Plan, tried: Sequence[_Tried], fastest: _Tried) -> Iterator[Alternative]:
    """Yield the alternatives of the final plan: the plan itself, other plans that ran, and plans that did not run."""
    ran = {}
    usual = _usual_deviation(tried)
    for one in sorted(tried, key=lambda one: (one is not fastest, one.step_s)):
        own = one.alternative(fastest, usual)
        ran[_shape(own)] = own
        yield own
    least = min(own.step_s for own in ran.values())
    for other in plan.alternatives[1:]:
        same = ran.get(_shape(other))
        if same is None:
            yield _not_run(other, fastest.found.step_s, least)
        elif same.label != other.label:  # a baseline that also ran under another label
            yield replace(same, label=other.label, note=same.note or other.note)


def _shape(other: Alternative) -> tuple[Any, ...]:
    shape = other.num_ranks, other.chunks_per_rank, other.num_microbatches, other.checkpoint
    return (other.schedule, *shape, other.step_s, other.peak_bytes)


def _not_run(other: Alternative, chosen_s: float, least_s: float) -> Alternative:
    """Return the alternative, with a note if it was predicted to be faster than the chosen plan but did not run.

    An alternative predicted to be faster than every plan that ran keeps its note, which says why it is not allowed.

    Args:
        other: the alternative.
        chosen_s: predicted step time of the chosen plan.
        least_s: shortest predicted step time of the plans that ran.

    """
    if other.step_s / chosen_s - 1 >= -WORTH or other.step_s < least_s * (1 - WORTH):
        return other
    return replace(other, note=f"predicted {quote_speed(chosen_s / other.step_s)}, but it was not run")
