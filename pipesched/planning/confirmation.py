"""Confirmation: the best plans of a search run for a few steps, what these took corrects the costs, and the search goes
over what is known then; of those that ran the fastest is taken.

Where the plans run is left to whoever asks: a model on its devices, or in tests a simulation with other costs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from statistics import median
from typing import Any

import networkx as nx

from pipesched.planning.alternatives import Alternative
from pipesched.planning.candidates import Candidate
from pipesched.planning.cost_correction import Known, StageTimes
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate, simplest
from pipesched.planning.plan import Plan
from pipesched.planning.replan_verdict import certain, strayed
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import Tuner
from pipesched.program.actions import Kind
from pipesched.simulation.comparison import Pair, StageComparison, compared
from pipesched.simulation.layer_costs import TIMES, LayerCosts, costs_of
from pipesched.simulation.profile import Profile
from pipesched.simulation.trace import Trace
from pipesched.units import quote_speed

__all__ = ["Run", "confirmed_plan", "corrected"]

Progress = Callable[[float], None]

#: Runs plans in turn, some steps of each: the measured steps of each one; of at least one there are some.
Run = Callable[[Sequence[Plan], Progress], Sequence[Sequence[Trace]]]

_LEAST = 0.01  # of a step: less is no difference
_TIMES_NOISE = 2
_ERROR_OF_MEDIAN = 1.86  # times what half of many numbers stray less than, over the root of how many there are
_SWEEPS = 3  # over all plans that ran: what one has taught changes what another one tells


@dataclass(frozen=True)
class _Tried:
    """A plan that ran. found: as it is simulated; first_s: the step that was predicted before it ran."""

    found: EvaluatedCandidate
    steps: Sequence[Trace]
    first_s: float

    @property
    def step_s(self) -> float:
        """A measured step."""
        return median(step.makespan_s for step in self.steps)

    @property
    def noise(self) -> float:
        """The standard error of that, as a share of it."""
        strays = median(abs(step.makespan_s - self.step_s) for step in self.steps)
        return _ERROR_OF_MEDIAN * strays / sqrt(len(self.steps)) / self.step_s

    @property
    def expected_s(self) -> float:
        """The step to expect: as predicted, unless what was measured contradicts that."""
        off = abs(self.step_s / self.found.step_s - 1)
        return self.found.step_s if off <= _needed(self.noise) else self.step_s

    def is_slower(self, other: "_Tried") -> bool:
        """Whether it is, beyond noise."""
        return self.step_s > other.step_s * (1 + _needed(hypot(self.noise, other.noise)))

    def alternative(self, chosen: "_Tried") -> Alternative:
        """As plain numbers, with why another one was chosen."""
        note = ""
        if self is not chosen:
            speed = quote_speed(chosen.step_s / self.step_s)
            note = f"measured {speed}" if self.is_slower(chosen) else "measured as fast, within noise"
        return replace(self.found.alternative(note=note), measured_s=self.step_s, first_s=self.first_s)


def _needed(noise: float) -> float:
    """From which share on a difference counts."""
    return max(_LEAST, _TIMES_NOISE * noise)


def confirmed_plan(search: SearchRequest, run: Run, count: int, progress: Progress = lambda _: None) -> Plan:
    """The plan that is fastest where it runs. count: how many of the best plans run, no two of one sort. One more runs
    where the search finds a better one with corrected costs.

    Of those that differ by no more than noise the one with the shortest predicted step is taken, as far as what was
    measured does not contradict the prediction. The plan has the corrected costs, and its alternatives say what was
    measured of those that ran. Raises as `find_plan`.
    """
    progress = _forward(progress)
    tuner = Tuner(search, _part(progress, 0.0, 0.3))
    tried = _run(_best_of_sorts(tuner.search(), tuner.best())[:count], tuner, run, _part(progress, 0.3, 0.6))
    search = _corrected(search, tried)
    tuner, new, tried = _search_again(search, tried, _part(progress, 0.6, 0.7))
    fastest = _fastest(tried)
    if new.step_s < fastest.found.step_s * (1 - WORTH) and not any(_alike(new, one.found) for one in tried):
        others = [one for one in tried if one is not fastest]
        rivals = _run([fastest.found, new], tuner, run, _part(progress, 0.7, 0.9))  # in turn
        rivals = [replace(one, first_s=fastest.first_s) if one.found is fastest.found else one for one in rivals]
        tried = [*rivals, *others]
        tuner, _, tried = _search_again(_corrected(search, tried), tried, _part(progress, 0.9, 1.0))
        fastest = _fastest(tried[: len(rivals)])
    plan = tuner.plan(fastest.found)
    progress(1)
    return replace(plan, alternatives=tuple(_weighed(plan, tried, fastest)))


def _corrected(search: SearchRequest, tried: Sequence[_Tried]) -> SearchRequest:
    """The same, where layers cost what the plans took that ran."""
    told = [(one.found, one.steps) for one in sorted(tried, key=lambda one: one.step_s)]
    return replace(search, profile=corrected(search.profile, told, search.batch_size))


def _search_again(
    search: SearchRequest, tried: Sequence[_Tried], progress: Progress
) -> tuple[Tuner, EvaluatedCandidate, list[_Tried]]:
    """Another search that goes on from those that ran, what it finds, and those as it predicts them."""
    tuner = Tuner(search, progress)
    known = [tuner.simulated(one.found.candidate, one.found.stages) for one in tried]
    new = tuner.search(known)
    return tuner, new, [replace(one, found=found) for one, found in zip(tried, known, strict=True)]


def _forward(progress: Progress) -> Progress:
    """Tells what is more than before."""
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if share > told:
            told = share
            progress(share)

    return tell


def _part(progress: Progress, begin: float, end: float) -> Progress:
    return lambda share: progress(begin + share * (end - begin))


# ---- what runs ------------------------------------------------------------------------------------------------------


def _best_of_sorts(chosen: EvaluatedCandidate, best: Sequence[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """The chosen one, and the best of each other sort. Plans of one sort do the same work in another order, which a
    simulation knows; sorts differ in what it may be wrong about.
    """
    sorts: dict[Any, EvaluatedCandidate] = {}
    for found in (chosen, *best):
        sorts.setdefault(_sort(found.candidate), found)
    return list(sorts.values())


def _sort(candidate: Candidate) -> tuple[Any, ...]:
    own = candidate.num_ranks, candidate.num_microbatches, candidate.schedule.chunks_per_rank, candidate.splits
    return (*own, repr(candidate.checkpoint))


def _run(found: Sequence[EvaluatedCandidate], tuner: Tuner, run: Run, progress: Progress) -> list[_Tried]:
    steps = run([tuner.plan(each) for each in found], progress)
    return [_Tried(each, own, each.step_s) for each, own in zip(found, steps, strict=True) if own]


def _alike(one: EvaluatedCandidate, other: EvaluatedCandidate) -> bool:
    """Whether they are one plan."""
    return (one.stages, one.candidate.runs) == (other.stages, other.candidate.runs)


def _fastest(tried: Sequence[_Tried]) -> _Tried:
    """The fastest one where it is so beyond noise, else of those that are as fast the one that a search would take."""
    least = min(tried, key=lambda one: one.step_s)
    near = [one for one in tried if not one.is_slower(least)]
    chosen = simplest((one.found, one.expected_s) for one in near)
    return next(one for one in near if one.found is chosen)


def _weighed(plan: Plan, tried: Sequence[_Tried], fastest: _Tried) -> Iterator[Alternative]:
    """The plan, what ran beside it, and the others of the search."""
    ran = {}
    for one in sorted(tried, key=lambda one: (one is not fastest, one.step_s)):
        own = one.alternative(fastest)
        ran[_shape(own)] = own
        yield own
    least = min(own.step_s for own in ran.values())
    for other in plan.alternatives[1:]:
        same = ran.get(_shape(other))
        if same is None:
            yield _not_run(other, fastest.found.step_s, least)
        elif same.label != other.label:  # a baseline
            yield replace(same, label=other.label, note=same.note or other.note)


def _shape(other: Alternative) -> tuple[Any, ...]:
    shape = other.num_ranks, other.chunks_per_rank, other.num_microbatches, other.checkpoint
    return (other.schedule, *shape, other.step_s, other.peak_bytes)


def _not_run(other: Alternative, chosen_s: float, least_s: float) -> Alternative:
    """With why it was not taken, where it was predicted to be faster than what was. least_s: of those that ran."""
    share = other.step_s / chosen_s - 1
    if share >= -WORTH or other.step_s < least_s * (1 - WORTH):
        return other
    return replace(other, note=f"predicted {quote_speed(chosen_s / other.step_s)}, but did not run")


# ---- what that tells of layers --------------------------------------------------------------------------------------


def corrected(
    profile: Profile, ran: Sequence[tuple[EvaluatedCandidate, Sequence[Trace]]], batch_size: int, sweeps: int = _SWEEPS
) -> Profile:
    """The profile with layers that cost, in micro-batches of all sizes, what plans took that ran. ran: the best first;
    layers cost what its stages took, as far as the others do not tell them apart.

    A stage's time says how many times as long as predicted it took, not which of its layers did: see
    `pipesched.planning.cost_correction`. Plans of other cuts tell that, one after the other.
    """
    factors = {name: dict.fromkeys(TIMES, 1.0) for name in profile.layers}
    for found, steps in [*reversed(ran)] * sweeps:
        graph = profile.graph(-(-batch_size // found.candidate.num_microbatches))
        first = {name: costs_of(graph, name) for name in graph}
        known = Known({name: _times(costs, factors[name]) for name, costs in first.items()}, first)
        new = known.corrected(_stage_times(found, steps, first), certain(strayed(steps))).layers
        factors = {name: _ratios(new[name], costs) for name, costs in first.items()}
    return replace(profile, graphs={rows: _scaled(graph, factors) for rows, graph in profile.graphs.items()})


def _stage_times(
    found: EvaluatedCandidate, steps: Sequence[Trace], layers: Mapping[str, LayerCosts]
) -> list[StageTimes]:
    """What a micro-batch took on each stage: what its layers take, as many times as it took longer than predicted."""
    stages: dict[int, list[StageComparison]] = {}
    for step in steps:
        for own in compared(found.trace, step).stages:
            stages.setdefault(own.stage, []).append(own)
    times = []
    for stage, names in enumerate(found.stages):
        slower = _slower(stages.get(stage, []))
        whole = {time: slower[time] * sum(getattr(layers[name], time) for name in names) for time in TIMES}
        times.append(StageTimes(names, None, **whole))
    return times


def _slower(steps: Sequence[StageComparison]) -> dict[str, float]:
    """How many times as long as predicted a stage took, in the middle of its steps, by the name of each time."""
    return {time: _ratio([own.seconds for own in steps], *kinds) for time, kinds in _KINDS.items()}


def _ratio(steps: Sequence[Mapping[Kind, Pair]], kinds: Sequence[Kind], others: Sequence[Kind]) -> float:
    """Measured over predicted, of actions of these kinds; where a step has none, of the others. 1 where it has none of
    these either, or they were predicted to take no time.
    """
    ratios = []
    for seconds in steps:
        pairs = [seconds[kind] for kind in kinds if kind in seconds] or [
            seconds[kind] for kind in others if kind in seconds
        ]
        predicted = sum(pair.predicted for pair in pairs)
        ratios.append(sum(pair.measured for pair in pairs) / predicted if predicted else 1.0)
    return median(ratios) if ratios else 1.0


#: By the name of a layer's time: the kinds of actions that tell it, and those that do where a step has none of them.
_KINDS: dict[str, tuple[Sequence[Kind], Sequence[Kind]]] = {
    "forward_s": ((Kind.F,), ()),
    "backward_s": ((Kind.B,), (Kind.I, Kind.W)),
    "input_grad_s": ((Kind.I,), (Kind.B,)),
    "weight_grad_s": ((Kind.W,), (Kind.B,)),
}


def _times(costs: LayerCosts, factors: Mapping[str, float]) -> LayerCosts:
    times: dict[str, Any] = {time: getattr(costs, time) * factors[time] for time in TIMES}
    return replace(costs, **times)


def _ratios(new: LayerCosts, first: LayerCosts) -> dict[str, float]:
    return {time: getattr(new, time) / getattr(first, time) if getattr(first, time) else 1.0 for time in TIMES}


def _scaled(graph: "nx.DiGraph[str]", factors: Mapping[str, Mapping[str, float]]) -> "nx.DiGraph[str]":
    """The layers of a profile with other times; what they wait, and are hindered, changes as forward and
    backward do.
    """
    scaled = graph.copy()
    for name, node in scaled.nodes(data=True):
        first = costs_of(graph, name)
        new = _times(first, factors[name])
        took_s = first.forward_s + first.backward_s
        node.update({time: getattr(new, time) for time in TIMES})
        for what in ("waiting_s", "crowded_s"):
            if getattr(first, what) and took_s:
                node[what] = getattr(first, what) * (new.forward_s + new.backward_s) / took_s
    return scaled
