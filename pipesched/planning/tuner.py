"""Tuner: a profile, ranks, a batch and limits -> the plan whose simulated step is shortest, and what it was weighed
against.

Best first: a candidate waits in line at a time that it cannot beat, at first that of its work alone, then, cut into
stages, the bound of these stages (`pipesched.simulation.bounds`); whoever comes to the front again is simulated. The
search ends where no bound is below the best step. Where nothing fits in memory, those that need the least are asked
next, whatever the effort (`pipesched.planning.memory_fit`), and last what needs the least of all
(`pipesched.planning.infeasibility`). Then the cuts of those that are near the best are moved wherever that shortens the
simulated step. How much is searched is counted in actions and not in seconds, so that a profile always gives the same
plan.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from typing import Any

import networkx as nx

from pipesched import schedules
from pipesched.planning.alternatives import Alternative
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.planning.cut_refinement import refined
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate, Stages, label_of, runs_of, simplest
from pipesched.planning.infeasibility import Fits, infeasible, leanest, no_cut
from pipesched.planning.memory_fit import A_SEARCH, AT_LEAST, MemoryFitter
from pipesched.planning.plan import Plan, Tie
from pipesched.planning.search_request import Search
from pipesched.program.placement import Placement
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import costs_of
from pipesched.simulation.links import Links
from pipesched.simulation.simulator import step_time
from pipesched.simulation.tied_weight_costs import parameter_bytes, tied_bytes, tied_groups
from pipesched.units import quote_time

__all__ = ["Tuner", "find_plan", "too_small"]

_NEAR = 1.3  # times the fastest step: up to there cuts are moved, the best first, each for half of what is left
_A_MOVE = 500  # actions that could be simulated while the costs of a moved cut are summed
_FOR_CUTS = 0.4  # of the effort, to move cuts
_SHOWN = 8  # alternatives beside the baselines


def find_plan(search: Search, progress: Callable[[float], None] = lambda _: None) -> Plan:
    """The best plan. progress: is told the share of the search that is done, at most.

    Raises PartitionError where no candidate has a cut, MemoryLimitError where none fits.
    """
    tuner = Tuner(search, progress)
    plan = tuner.plan(tuner.search())
    progress(1)
    return plan


def too_small(plan: Plan, num_ranks: int) -> str:
    """What is to be said of a plan for one device, where several do not gain anything; nothing of others."""
    chosen, *others = plan.alternatives
    several = [_expected_s(other) for other in others if other.num_ranks > 1 and other.fits]
    if num_ranks == 1 or chosen.num_ranks > 1 or not several:
        return ""
    one, best = quote_time(_expected_s(chosen)), quote_time(min(several))
    return f"too small to gain from a pipeline: one device takes {one}, the best plan of several {best}"


def _expected_s(one: Alternative) -> float:
    return one.step_s if one.measured_s is None else one.measured_s


class Tuner(MemoryFitter):
    """One search: what has been found, and how much may still be simulated."""

    def __init__(self, search: Search, progress: Callable[[float], None] = lambda _: None) -> None:
        super().__init__(search, progress)
        self._found: list[EvaluatedCandidate] = []
        self._work: dict[int, tuple[float, float, float]] = {}

    def search(self, known: Sequence[EvaluatedCandidate] = ()) -> EvaluatedCandidate:
        """The one to take: the simplest of those that are as fast as the fastest. known: some that there are already.

        Raises as ``find_plan``.
        """
        self._found += known
        for_cuts = _FOR_CUTS * self._search.effort
        rest = self._best_first(until=for_cuts)
        if in_need := not self._found:
            self._thrifty_first(rest)
        if not self._found:
            self._found.append(self._leanest())
        fastest = self.best()[0].step_s
        for found in [found for found in self.best() if found.step_s <= _NEAR * fastest]:
            share = (for_cuts if in_need else self._left) / 2
            self._found.append(self._refined(found, until=self._left - share))
        return simplest(self._found)

    def _leanest(self) -> EvaluatedCandidate:
        """What needs the least memory. Raises as ``find_plan`` where that is more than there is."""
        search = self._search
        if search.memory_limit_bytes is None or not MemoryFitter(replace(search, memory_limit_bytes=None)).any_plan():
            raise no_cut(search)
        fits = Fits({repr(search.checkpoint): self.thrifty}, self._spend)
        found = leanest(search, fits)
        if any(replace(found, limit_bytes=search.memory_limit_bytes).excess_bytes):
            raise infeasible(search, max(found.peak_bytes), fits)
        return self.simulated(found.candidate, found.stages, found.costs)

    # ---- candidates, the most promising first -----------------------------------------------------------------------

    def _best_first(self, until: float) -> list[Candidate]:
        """As far as that is; returns those that were not looked at."""
        number = count()
        every = list(filter(self._may_hold, self.candidates()))
        known = sorted(filter(self._is_known, every), key=lambda each: each.num_ranks)
        for candidate in known:
            if not self._is_beaten(self._least_s(candidate), candidate):
                self._found += [self.simulated(*cut) for cut in self._fitting(candidate)]
        others = [each for each in every if each not in known]
        line: list[Any] = [(self._least_s(each), each.order, next(number), each, None) for each in others]
        heapq.heapify(line)
        rest, fits = {id(each): each for each in others}, bool(self._found)
        while line and (self._left > until / 2 or (fits and not self._found)):
            bound, _, _, candidate, cut = heapq.heappop(line)
            if self._is_beaten(bound, candidate):
                continue
            if cut is not None:
                self._found.append(self.simulated(candidate, *cut))
                continue
            if self._left <= until and fits:
                continue  # what has been cut is still simulated
            if candidate.schedule.searches and A_SEARCH * candidate.num_actions > self._left / 4:
                continue
            del rest[id(candidate)]
            for own, stages, costs in self._fitting(candidate):
                fits = True
                least = lower_bound(
                    _quickest(costs, own.placement), own.num_microbatches, placement=own.placement, split=own.splits
                )
                heapq.heappush(line, (least, own.order, next(number), own, (stages, costs)))
        return list(rest.values())

    def _thrifty_first(self, rest: Sequence[Candidate]) -> None:
        """Until one fits: a small effort does not make a limit one that nobody can meet."""
        until = self._left - self.in_need
        for candidate in self.by_thrift(rest, self.thrifty):
            if self._found or self._left <= until:
                return
            if not candidate.schedule.searches or A_SEARCH * candidate.num_actions < (self._left - until) / 4:
                self._found += [self.simulated(*cut) for cut in self._fitting(candidate)]

    def _is_known(self, candidate: Candidate) -> bool:
        """Whether it is what everybody has: one rank alone, or 1F1B on all of them. Others must be faster."""
        own = candidate.schedule.name == _BASELINES[0] and candidate.num_ranks == self._search.num_ranks
        return own or candidate.num_ranks == 1

    def _least_s(self, candidate: Candidate) -> float:
        """What no cut of the layers makes faster: the work in even shares, or the heaviest layer. Of one stage a rank
        with whole backwards a rank has its share of each micro-batch, after and before what earlier ranks do of one:
        the shares that make the longest of these sums shortest fall by one part in as many as there are micro-batches.
        """
        count = candidate.num_microbatches
        if count not in self._work:
            self._work[count] = _work(self._graph(count))
        work_s, whole_s, heaviest_s = self._work[count]
        if candidate.splits or candidate.schedule.chunks_per_rank > 1:
            return count * max(work_s / candidate.num_ranks, heaviest_s)
        shares = 1 - (1 - 1 / count) ** candidate.num_ranks
        return max(whole_s / shares, count * heaviest_s)

    def _is_beaten(self, bound_s: float, candidate: Candidate) -> bool:
        if not self._found:
            return False
        best = min(self._found, key=lambda found: (found.step_s, found.candidate.order))
        simpler = candidate.order < best.candidate.order
        return bound_s >= best.step_s * (1 + WORTH if simpler else 1 - WORTH)

    def simulated(self, candidate: Candidate, stages: Stages, costs: Costs | None = None) -> EvaluatedCandidate:
        """A candidate cut into these stages. costs: of these, where they are known already."""
        costs = costs or self._costs(candidate, stages)
        runs = runs_of(candidate, stages)
        actions = len(runs.columns)
        self._spend(AT_LEAST + actions * (A_SEARCH if candidate.schedule.searches else 2))  # made, and gone through
        limits = self._search.memory_limit_bytes
        return EvaluatedCandidate(candidate, stages, costs, step_time(runs, costs), limits, self._search.posted)

    def _refined(self, found: EvaluatedCandidate, until: float) -> EvaluatedCandidate:
        """The same with its cuts moved."""
        candidate, pins = found.candidate, self._search.pins
        if pins.complete or candidate.num_stages in (1, len(pins.layers)):
            return found
        graph = self._graph(candidate.num_microbatches)
        home = {layer: stage for stage, names in enumerate(found.stages) for layer in names}
        ties = [users for users in tied_groups(graph) if len({home[layer] for layer in users}) == 1]
        pins = replace(pins, together=(*pins.together, *ties))

        def step_s(stages: Stages) -> float:
            moved = replace(found, stages=stages, costs=self._costs(candidate, stages))
            self._spend(len(moved.runs.columns) + _A_MOVE)
            return inf if any(moved.excess_bytes) else step_time(moved.runs, moved.costs)

        seconds = [costs_of(graph, name).forward_s + costs_of(graph, name).backward_s for name in pins.layers]
        stages = refined(found.stages, pins, seconds, step_s, goes_on=lambda: self._left > until)
        return self.simulated(candidate, stages)

    # ---- the answer -------------------------------------------------------------------------------------------------

    def best(self) -> list[EvaluatedCandidate]:
        """All that were found, the fastest first."""
        return sorted(self._found, key=lambda found: (found.step_s, found.candidate.order))

    def plan(self, chosen: EvaluatedCandidate) -> Plan:
        """The plan of one that was simulated, with what it was weighed against."""
        candidate = chosen.candidate
        options = {k: v for k, v in candidate.schedule.options.items() if isinstance(v, int | float | str)}
        return Plan(
            chosen.stages,
            candidate.schedule.name,
            candidate.program,
            candidate.checkpoint,
            chosen.costs,
            options,
            self._cutter(candidate, candidate.program).of(chosen.stages, *self._why()),
            self._ties(chosen),
            tuple(self._alternatives(chosen)),
        )

    def _why(self) -> tuple[str, ...]:
        """Why the layers are cut so; nothing where that was given."""
        reason = "the search chose the cuts by simulated steps, not by this alone"
        return () if self._search.pins.complete else (reason,)

    def _ties(self, chosen: EvaluatedCandidate) -> tuple[Tie, ...]:
        graph, placement = self._graph(chosen.candidate.num_microbatches), chosen.candidate.placement
        home = {layer: stage for stage, layers in enumerate(chosen.stages) for layer in layers}
        ties = []
        for users, names in tied_groups(graph).items():
            own = tuple(home[user] for user in users)
            moved = tied_bytes(parameter_bytes(graph, names), [placement[stage] for stage in own])
            ties.append(Tie(tuple(names), own, moved))
        return tuple(ties)

    def _alternatives(self, chosen: EvaluatedCandidate) -> Iterator[Alternative]:
        """The plan itself, the best of each other schedule, and the baselines."""
        yield chosen.alternative()
        seen = {label_of(chosen.candidate)}
        for found in self.best():
            label = label_of(found.candidate)
            if label not in seen and len(seen) <= _SHOWN:
                yield found.against(chosen, label)
            seen.add(label)
        for label, found in self._baselines(chosen.candidate.num_microbatches):
            yield found.against(chosen, label)

    def _baselines(self, num_microbatches: int) -> Iterator[tuple[str, EvaluatedCandidate]]:
        """One device alone, and as many layers on each of the ranks, by the two schedules that everybody has."""
        search, pins = self._search, self._search.pins
        layers = len(pins.layers)
        count = min(search.num_ranks, layers)
        mode = search.checkpoint or LADDER[0]
        alone = Candidate(schedules.get("1f1b"), 1, num_microbatches, splits=False, checkpoint=mode)
        for label, candidate in (
            ("one device", alone),
            *(("equal split", replace(alone, schedule=schedules.get(name), num_ranks=count)) for name in _BASELINES),
        ):
            stages = pins.stages([rank * layers // candidate.num_ranks for rank in range(candidate.num_ranks)])
            yield label, self.simulated(candidate, stages)


_BASELINES = ("1f1b", "gpipe")


def _work(graph: "nx.DiGraph[str]") -> tuple[float, float, float]:
    """Of one micro-batch: all layers' seconds at least, with whole backwards, and the heaviest layer's."""
    layers = [costs_of(graph, name) for name in graph]
    each = [own.forward_s + min(own.backward_s, own.input_grad_s + own.weight_grad_s) for own in layers]
    return sum(each), sum(own.forward_s + own.backward_s for own in layers), max(each)


def _quickest(costs: Costs, placement: Placement) -> Costs:
    """The costs as bounds know them, which have no links and overheads: what each action and message takes at least."""
    overheads = costs.overheads
    links = costs.links or (Links(overheads.link) if overheads else None)
    ways = {way for way in pairwise(placement) if way[0] != way[1]}
    latency_s = min((links.link(*way).latency_s for way in ways), default=0) if links else 0
    action_s = overheads.action_s if overheads else 0
    times: dict[str, Any] = {name: tuple(time_s + action_s for time_s in getattr(costs, name)) for name in _ACTIONS}
    return replace(costs, transfer_s=costs.transfer_s + latency_s, **times)


_ACTIONS = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
