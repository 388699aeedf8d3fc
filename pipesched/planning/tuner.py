"""Tuner: finds the plan with the shortest simulated step for given layer costs, ranks, batch size and memory limits.

Candidates wait in a queue, sorted by a lower bound on their step time. At first the bound considers only the work of
the layers. The layers of the first candidate in the queue are assigned to stages, and
`pipesched.planning.candidate_evaluation` decides which layers to recompute or offload to stay within memory limits.
The candidate is queued again with the bound of these stages (`pipesched.simulation.bounds`), and simulated when it is
first in the queue again. The search ends when no bound is below the best step time. If no candidate fits into memory,
the candidates that need the least memory are tried with extra effort (`pipesched.planning.lean_candidates`). If none of
these fits, the plan with the smallest peak memory is determined (`pipesched.planning.least_memory`). At the end, stage
boundaries of the best candidates are moved while this shortens the simulated step
(`pipesched.planning.refinement.boundary_refinement`), and a search looks for faster orders of actions
(`pipesched.planning.refinement.order_search`).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from math import inf
from typing import Any

import networkx as nx

from pipesched import schedules
from pipesched.errors import MemoryLimitError
from pipesched.partitioning.result import StageLayers
from pipesched.planning.alternatives import Alternative
from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.planning.effort import AT_LEAST, FOR_MEMORY, IN_ORDER_SEARCH, SearchEffort
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate, label_of, simplest
from pipesched.planning.lean_candidates import LeanCandidates
from pipesched.planning.least_memory import FittingPlans, leanest, memory_limit_error, stage_count_error
from pipesched.planning.narrow_1f1b import is_windowed, window_of
from pipesched.planning.plan import Plan, Tie
from pipesched.planning.refinement.boundary_refinement import refined
from pipesched.planning.refinement.order_search import ORDER_GAIN, OrderSearch, as_searched, is_searched
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.step_shares import StepShares, step_shares
from pipesched.program.actions import Kind
from pipesched.program.placement import Placement
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import costs_of
from pipesched.simulation.relaxation.chain_costs import chain_costs
from pipesched.simulation.tied_weight_costs import parameter_bytes, tied_groups, tied_traffic_bytes
from pipesched.units import quote_time

__all__ = ["Tuner", "find_plan", "find_plan_of_replicas", "too_small"]

# The boundaries of candidates within this factor of the fastest step are refined, each with half the remaining effort.
_NEAR = 1.3
_A_MOVE = 2_000  # effort of summing the stage costs after a boundary has moved, in actions
_TO_REFINE = 0.4  # the fraction of the effort that is reserved for refining boundaries
_KNOWN = 0.6  # the fraction of the progress reported for known schedules; the rest is for searched orders
_FOR_ORDERS = 3  # the effort of the order search, relative to the effort of the request
_PLACEMENTS = 2  # maximum number of placements for which orders are searched although no known program fits
_SHOWN = 8  # number of alternatives to list besides the baselines
_BASELINES = ("1f1b", "gpipe")


def find_plan(search: SearchRequest, progress: Callable[[float], None] = lambda _: None) -> Plan:
    """Find the best plan for a request.

    Args:
        search: the request.
        progress: called with the completed fraction of the search.

    Raises:
        PartitionError: if the layers cannot be partitioned as requested.
        MemoryLimitError: if no candidate fits into memory.

    """
    tuner = Tuner(search, progress)
    plan = tuner.plan(tuner.search())
    progress(1)
    return plan


def find_plan_of_replicas(search: SearchRequest) -> Plan:
    """Find the best plan for a request with replicas.

    If the weights are split across replicas, first searches for a plan that gathers the weights only once per step. If
    no such plan fits into memory, searches for a plan that gathers the weights for each use.

    Raises the same errors as ``find_plan``.
    """
    replicas = search.replica_costs
    try:
        return find_plan(search)
    except MemoryLimitError:
        if replicas is None or replicas.replication.zero < 3:
            raise
        return find_plan(replace(search, replica_costs=replicas.gathering(once=False)))


def too_small(plan: Plan, search: SearchRequest) -> str:
    """Return a warning if the plan uses one device because more devices would not be faster; otherwise "".

    Returns "" if the request leaves room for one device only.
    """
    most = min(search.num_ranks, search.num_stages or inf, search.pins.most_stages)
    if plan.replication is not None or most == 1 or not plan.alternatives:
        return ""
    chosen, *others = plan.alternatives
    several = min((_expected_s(other) for other in others if other.num_ranks > 1 and other.fits), default=inf)
    if chosen.num_ranks > 1 or not _expected_s(chosen) <= several < inf:
        return ""
    return (
        f"the model is too small to gain from a pipeline: one device takes {quote_time(_expected_s(chosen))} per "
        f"step, and the best plan for several devices takes {quote_time(several)}"
    )


def _expected_s(alternative: Alternative) -> float:
    return alternative.step_s if alternative.measured_s is None else alternative.measured_s


class Tuner:
    """One search for a plan: the candidates evaluated so far, and the remaining effort.

    Args:
        search: the request.
        progress: called with the completed fraction of the search.
        solved: partitions that several searches share, as for `CandidateEvaluator`.

    """

    def __init__(
        self,
        search: SearchRequest,
        progress: Callable[[float], None] = lambda _: None,
        solved: dict[Any, Any] | None = None,
    ) -> None:
        self._search = search
        self._rival_s = inf
        self._in_need = False
        self._simple_s = inf
        self._effort = SearchEffort(search.effort, lambda share: progress(share * _KNOWN))
        self._order_effort = SearchEffort(
            _FOR_ORDERS * search.effort, lambda share: progress(_KNOWN + share * (1 - _KNOWN))
        )
        self._evaluator = CandidateEvaluator(search, self._effort, solved)
        self._lean = LeanCandidates(search, self._evaluator, self._effort)
        self._found: list[EvaluatedCandidate] = []
        self._work: dict[int, tuple[float, float, float]] = {}
        #: Whether the effort sufficed for all candidates that can be faster than the best.
        self.complete = True

    def search(self, known: Sequence[EvaluatedCandidate] = ()) -> EvaluatedCandidate:
        """Find the simplest of the candidates that are about as fast as the fastest.

        Raises the same errors as ``find_plan``.

        Args:
            known: evaluated candidates to start from.

        """
        if not self.explore(known=known):
            self._found.append(self._leanest())
        return self.refine()

    def explore(self, rival_s: float = inf, known: Sequence[EvaluatedCandidate] = ()) -> bool:
        """Evaluate the most promising candidates. Returns whether any candidate was found.

        Args:
            rival_s: the step time of the best plan of another search; candidates that cannot be faster are skipped.
            known: evaluated candidates to start from.

        """
        self._found += known
        self._rival_s = rival_s
        rest = self._best_first(until=_TO_REFINE * self._search.effort)
        self._in_need = not self._found and rival_s == inf
        if self._in_need:
            self._thrifty_first(rest)
            self._squeeze()
        return bool(self._found)

    def refine(self) -> EvaluatedCandidate:
        """Move the boundaries of the best candidates, search for faster orders, and return the candidate to use."""
        self._move_boundaries()
        self._found = [as_searched(each) if is_windowed(each.candidate.schedule) else each for each in self._found]
        if self._search.searches_orders:
            orders = OrderSearch(self._evaluator, self._order_effort, lambda found: _bound_s(found, split=True))
            self._found += orders.improve(self._found, self._moved, self._unrecomputed())
            self.complete = self.complete and self._order_effort.left > 0
            if self._search.schedule is not None:  # the user chose `searched`: also consider the best known order
                self._found.append(as_searched(self.best()[0]))
        return self._chosen()

    def _chosen(self) -> EvaluatedCandidate:
        """Return the candidate to use.

        If an order that the search found is clearly faster than all known schedules, return it. Otherwise return the
        simplest candidate with a known schedule that is about as fast as the fastest such candidate. If it uses
        several ranks, it is also at least as fast as every candidate with a simple cut.
        """
        searched = list(filter(is_searched, self._found))
        known = [found for found in self._found if not is_searched(found)]
        if self._search.schedule is not None or not known:
            return simplest((found, found.step_s) for found in searched or known)
        fastest_s = min(found.step_s for found in known)
        most_s = max(fastest_s, self._simple_s)
        chosen = simplest(
            (found, found.step_s) for found in known if found.step_s <= most_s or found.candidate.num_ranks == 1
        )
        gain = ORDER_GAIN if chosen.candidate.num_ranks == self._search.num_ranks else WORTH
        faster = [(found, found.step_s) for found in searched if found.step_s < fastest_s * (1 - gain)]
        return simplest(faster) if faster else chosen

    def _move_boundaries(self) -> None:
        """Move the boundaries of the best candidates."""
        to_refine = _TO_REFINE * self._search.effort
        fastest = self.best()[0].step_s
        for found in [found for found in self.best() if found.step_s <= _NEAR * fastest]:
            share = (to_refine if self._in_need else self._effort.left) / 2
            self._found.append(self._refined(found, until=self._effort.left - share))

    def _unrecomputed(self) -> list[EvaluatedCandidate]:
        """Return candidates without recomputation whose stages may have an order within the limits.

        These candidates use all ranks, and as many micro-batches as the fastest candidate. Placements for which a
        candidate without recomputation already fits are left out. For each remaining placement, one candidate has the
        fastest cut, which exceeds the limits. If a cut exists for which 1F1B with fewer micro-batches in flight is
        within the limits, a second candidate has this cut. The placements with the lowest bounds come first.
        """
        mode = self._search.checkpoint or LADDER[0]
        fit = {found.candidate.placement for found in self._found if found.candidate.checkpoint == mode}
        count = self.best()[0].candidate.num_microbatches
        windows: dict[Placement, list[Candidate]] = {}
        for candidate in filter(self._lean.may_fit, self._lean.candidates()):
            same = (candidate.num_ranks, candidate.num_microbatches) == (self._search.num_ranks, count)
            if same and is_windowed(candidate.schedule) and candidate.placement not in fit:
                windows.setdefault(candidate.placement, []).append(candidate.recomputing(mode))
        fastest = [(self._evaluator.without_limits(each[-1]), each) for each in windows.values()]
        large = [(found, each) for found, each in fastest if found is not None and self._evaluator.exceeds(found)]
        chosen = []
        for found, each in sorted(large, key=lambda pair: _bound_s(pair[0], split=True))[:_PLACEMENTS]:
            chosen.append(found)
            chosen += islice(filter(None, map(self._evaluator.within_limits, reversed(each))), 1)
        return chosen

    def _leanest(self) -> EvaluatedCandidate:
        """Find the plan that needs the least memory. Raises MemoryLimitError if this plan exceeds the limits.

        Raises PartitionError if there is no plan even without limits.
        """
        search = self._search
        if search.memory_limit_bytes is None or not self._can_be_partitioned():
            raise stage_count_error(search)
        fitting = FittingPlans({repr(search.checkpoint): self._lean.thrifty}, self._effort)
        found = replace(leanest(search, fitting), limit_bytes=search.memory_limit_bytes)
        if any(found.excess_bytes):
            raise memory_limit_error(search, max(found.peak_bytes), fitting)
        return self._simulated(found)

    def _can_be_partitioned(self) -> bool:
        """Return whether a plan exists without memory limits."""
        search = replace(self._search, memory_limit_bytes=None)
        return FittingPlans({}, SearchEffort(search.effort)).lean(search).any_that_fits() is not None

    # ---- candidates, the most promising first -----------------------------------------------------------------------

    def _best_first(self, until: float) -> list[Candidate]:
        """Evaluate candidates in order of their bounds until the remaining effort has dropped to ``until``.

        Returns the candidates that were not tried.
        """
        every = list(filter(self._lean.may_fit, self._lean.candidates()))
        for candidate in sorted(filter(self._is_usual, every), key=lambda each: each.num_ranks):
            if not self._is_beaten(self._least_s(candidate), candidate):
                self._found += [self._simulated(found) for found in self._evaluator.choices(candidate)]
        self._try_simple_cuts([each for each in every if not is_windowed(each.schedule)])
        others = [each for each in every if not self._is_usual(each)]
        number = count()
        line: list[Any] = [(self._least_s(each), each.order, next(number), each, None) for each in others]
        heapq.heapify(line)
        rest = {id(each): each for each in others}
        fits = bool(self._found)
        while line and (self._effort.left > until / 2 or (fits and not self._found)):
            bound, _, _, candidate, found = heapq.heappop(line)
            if self._is_beaten(bound, candidate):
                continue
            if found is not None:
                self._found.append(self._simulated(found))
                continue
            if self._effort.left <= until and fits:
                self.complete = False
                continue  # candidates that already have stages are still simulated
            if candidate.schedule.searches and IN_ORDER_SEARCH * candidate.num_actions > self._effort.left / 4:
                self.complete = False
                continue
            del rest[id(candidate)]
            for own in self._evaluator.choices(candidate):
                fits = True
                heapq.heappush(line, (_bound_s(own), own.candidate.order, next(number), own.candidate, own))
        self.complete = self.complete and not line
        return list(rest.values())

    def _try_simple_cuts(self, every: Sequence[Candidate]) -> None:
        """Evaluate the candidates that use all ranks, with simple cuts, in ascending order of their lower bounds."""
        until = self._search.effort / 2
        line = []
        for candidate in every:
            if candidate.num_ranks == self._search.num_ranks and self._effort.left > until:
                for found in self._evaluator.with_simple_cuts(candidate):
                    self._effort.spend(_A_MOVE)
                    line.append((_bound_s(found), candidate.order, found))
        for bound_s, _, found in sorted(line, key=lambda each: each[:2]):
            best_s = min((own.step_s for own in self._found), default=inf)
            if bound_s < min(self._simple_s, best_s * (1 + WORTH)) and self._effort.left > until:
                self._simple_s = min(self._simple_s, self._simulated(found).step_s)
                if found.step_s < best_s:
                    self._found.append(found)

    def _thrifty_first(self, rest: Sequence[Candidate]) -> None:
        """Try candidates until one fits, starting with the candidates that are likely to need the least memory.

        The attempts can exceed the effort of the search. Otherwise a small effort could cause an error for a feasible
        limit.
        """
        until = self._effort.left - self._lean.effort_in_need
        for candidate in self._lean.by_thrift(rest, self._lean.thrifty):
            left = self._effort.left - until
            if self._found or left <= 0:
                return
            if not candidate.schedule.searches or IN_ORDER_SEARCH * candidate.num_actions < left / 4:
                self._found += [self._simulated(found) for found in self._evaluator.choices(candidate)]

    def _squeeze(self) -> None:
        """Move boundaries of candidates that hold only one micro-batch per rank at a time, until a candidate fits.

        Each checkpoint setting is tried. The partitioner can miss cuts that only just fit, because it only estimates
        the memory.
        """
        modes = self._search.ladder if self._search.checkpoint is None else (self._search.checkpoint,)
        every = filter(self._lean.may_fit, self._lean.candidates())
        alone = [each for each in every if window_of(each.schedule) == 1 and each.num_ranks == self._search.num_ranks]
        until = self._effort.left - self._lean.effort_in_need
        for candidate in sorted(alone, key=lambda each: (-each.num_microbatches, each.num_stages)):
            for found in filter(None, map(self._evaluator.without_limits, map(candidate.recomputing, modes))):
                if self._found or self._effort.left <= until:
                    return
                squeezed = self._squeezed(found, until)
                if not any(squeezed.excess_bytes):
                    self._found.append(self._simulated(squeezed))

    def _squeezed(self, found: EvaluatedCandidate, until: float) -> EvaluatedCandidate:
        """Move the candidate's boundaries while this lowers the excess bytes, and return the best candidate."""
        best = found

        def excess(stages: StageLayers) -> float:
            nonlocal best
            moved = self._evaluator.evaluated(found.candidate, stages)
            self._effort.spend(_A_MOVE + FOR_MEMORY * found.candidate.num_actions)
            best = min(best, moved, key=lambda own: sum(own.excess_bytes))
            return sum(moved.excess_bytes)

        self._moved(found, excess, lambda: any(best.excess_bytes) and self._effort.left > until)
        return best

    def _is_usual(self, candidate: Candidate) -> bool:
        """Return whether a candidate is a standard choice that is evaluated first: one rank, or 1F1B on all ranks."""
        own = candidate.schedule.name == _BASELINES[0] and candidate.num_ranks == self._search.num_ranks
        return own or candidate.num_ranks == 1

    def _least_s(self, candidate: Candidate) -> float:
        """Return a lower bound in seconds on the step time of every partition.

        The bound is the larger of two times: the time of the slowest layer for all micro-batches, and the time of the
        busiest rank if the work is divided in the best possible way. Usually the best way is an even division among all
        ranks. There are two exceptions:

        - A schedule may limit a rank to w micro-batches (see `window_of`). The first rank holds each micro-batch until
          all work on it is done. So at any time, at most w micro-batches are in progress, and at most w ranks work.
        - With one stage per rank and B instead of I and W, a rank first waits while all earlier ranks work on one
          micro-batch. The wait counts as part of the rank's time. The busiest rank then has the least time if the work
          of each rank per micro-batch is 1 - 1/count times that of the previous rank, where count is the number of
          micro-batches.
        """
        count = candidate.num_microbatches
        if count not in self._work:
            self._work[count] = _work(self._evaluator.graph(count))
        work_s, whole_s, heaviest_s = self._work[count]
        if window := window_of(candidate.schedule):
            return count * max(whole_s / min(window, candidate.num_ranks), heaviest_s)
        if candidate.splits or candidate.schedule.chunks_per_rank > 1:
            return count * max(work_s / candidate.num_ranks, heaviest_s)
        shares = 1 - (1 - 1 / count) ** candidate.num_ranks
        return max(whole_s / shares, count * heaviest_s)

    def _is_beaten(self, bound_s: float, candidate: Candidate) -> bool:
        if bound_s >= self._rival_s * (1 - WORTH):
            return True
        if not self._found:
            return False
        best = min(self._found, key=_speed)
        simpler = candidate.order < best.candidate.order
        return bound_s >= best.step_s * (1 + WORTH if simpler else 1 - WORTH)

    def simulated(self, candidate: Candidate, stages: StageLayers) -> EvaluatedCandidate:
        """Evaluate the candidate with these stages."""
        return self._simulated(self._evaluator.evaluated(candidate, stages))

    def _simulated(self, found: EvaluatedCandidate) -> EvaluatedCandidate:
        """Subtract the effort of simulating a candidate from the remaining effort, and return the candidate."""
        per_action = IN_ORDER_SEARCH if found.candidate.schedule.searches else 2  # creating and simulating the program
        self._effort.spend(AT_LEAST + len(found.runs.columns) * per_action)
        return found

    def _refined(self, found: EvaluatedCandidate, until: float) -> EvaluatedCandidate:
        """Move the candidate's boundaries while this shortens the step and the remaining effort exceeds ``until``."""
        candidate = found.candidate
        best_s = inf

        def step_s(stages: StageLayers) -> float:
            nonlocal best_s
            moved = self._evaluator.evaluated(candidate, stages)
            self._effort.spend(len(moved.runs.columns) + _A_MOVE)
            if moved.step_s < best_s and not any(moved.excess_bytes):
                best_s = moved.step_s
                return best_s
            return inf

        stages = self._moved(found, step_s, lambda: self._effort.left > until)
        return found if stages == found.stages else self.simulated(candidate, stages)

    def _moved(
        self, found: EvaluatedCandidate, step_s: Callable[[StageLayers], float], goes_on: Callable[[], bool]
    ) -> StageLayers:
        """Move the candidate's boundaries while this shortens the step, within the constraints of the request."""
        candidate = found.candidate
        pins = self._search.pins
        if pins.complete or candidate.num_stages in (1, len(pins.layers)):
            return found.stages
        graph = self._evaluator.graph(candidate.num_microbatches)
        home = {layer: stage for stage, names in enumerate(found.stages) for layer in names}
        ties = [users for users in tied_groups(graph) if len({home[layer] for layer in users}) == 1]
        pins = replace(pins, together=(*pins.together, *ties))
        seconds = [costs_of(graph, name).forward_s + costs_of(graph, name).backward_s for name in pins.layers]
        return refined(found.stages, pins, seconds, step_s, goes_on=goes_on)

    # ---- results ----------------------------------------------------------------------------------------------------

    def best(self) -> list[EvaluatedCandidate]:
        """Return all evaluated candidates, the fastest first."""
        return sorted(self._found, key=_speed)

    def bound_s(self) -> float:
        """Return a lower bound on the step time of every evaluated candidate, for any order of its actions."""
        return min(_bound_s(found, split=True) for found in self._found)

    @property
    def spent(self) -> float:
        """The effort that this search has spent."""
        return self._search.effort - self._effort.left

    def plan(self, chosen: EvaluatedCandidate) -> Plan:
        """Return the plan for an evaluated candidate, with its alternatives."""
        candidate = chosen.candidate
        return Plan(
            stages=chosen.stages,
            schedule=candidate.schedule.name,
            program=candidate.program,
            checkpoint=candidate.checkpoint,
            costs=chosen.costs,
            options={k: v for k, v in candidate.schedule.options.items() if isinstance(v, int | float | str)},
            partition=self._evaluator.partitioner(candidate, candidate.program).evaluate(chosen.stages),
            ties=self._ties(chosen),
            alternatives=tuple(self._alternatives(chosen)),
            layer_classes=self._evaluator.graph(candidate.num_microbatches).graph.get("classes", {}),
            replication=chosen.replication,
            tensor=chosen.tensor,
            completion=chosen.completion,
            posted=self._search.posted,
            notes=self._search.profile.notes,
            shares=self._shares(chosen),
            microbatch_rows=self._evaluator.rows(candidate.num_microbatches),
        )

    def _shares(self, chosen: EvaluatedCandidate) -> StepShares:
        """Return what the step of a candidate is spent on."""
        plain = chosen
        if chosen.candidate.checkpoint != LADDER[0]:
            plain = self._evaluator.evaluated(chosen.candidate.recomputing(LADDER[0]), chosen.stages)
        return step_shares(chosen.runs, chosen.costs, (plain.runs, plain.costs))

    def _ties(self, chosen: EvaluatedCandidate) -> tuple[Tie, ...]:
        graph = self._evaluator.graph(chosen.candidate.num_microbatches)
        home = {layer: stage for stage, layers in enumerate(chosen.stages) for layer in layers}
        ties = []
        for users, names in tied_groups(graph).items():
            own = tuple(home[user] for user in users)
            moved = tied_traffic_bytes(
                parameter_bytes(graph, names), [chosen.candidate.placement[stage] for stage in own]
            )
            ties.append(Tie(tuple(names), own, moved))
        return tuple(ties)

    def _alternatives(self, chosen: EvaluatedCandidate) -> Iterator[Alternative]:
        """Yield the plan itself, the best candidate of each other schedule, and the baselines."""
        name = label_of(chosen.candidate)
        yield chosen.alternative(name)
        seen = {name}
        for found in self.best():
            label = label_of(found.candidate)
            if label not in seen and len(seen) <= _SHOWN:
                yield found.against(chosen, label)
            seen.add(label)
        for label, found in self._baselines(chosen.candidate.num_microbatches):
            yield found.against(chosen, label)

    def _baselines(self, num_microbatches: int) -> Iterator[tuple[str, EvaluatedCandidate]]:
        """Yield the baselines: one device alone, and equal numbers of layers per rank with each standard schedule."""
        pins = self._search.pins
        num_layers = len(pins.layers)
        num_ranks = min(self._search.num_ranks, num_layers)
        for label, schedule, ranks in (
            ("one device", _BASELINES[0], 1),
            *(("equal split", schedule, num_ranks) for schedule in _BASELINES),
        ):
            candidate = Candidate(
                schedule=schedules.get(schedule),
                num_ranks=ranks,
                num_microbatches=num_microbatches,
                splits=False,
                checkpoint=self._search.checkpoint or LADDER[0],
            )
            yield label, self.simulated(candidate, pins.stages([rank * num_layers // ranks for rank in range(ranks)]))


def _work(graph: "nx.DiGraph[str]") -> tuple[float, float, float]:
    """Return three durations for one micro-batch, in seconds.

    A layer's best time is the time of its F plus the shorter of B and I + W. The durations are the sum of all best
    times, the sum of all times of F and B, and the longest best time.
    """
    layers = [costs_of(graph, name) for name in graph]
    each = [own.forward_s + min(own.backward_s, own.input_grad_s + own.weight_grad_s) for own in layers]
    return sum(each), sum(own.forward_s + own.backward_s for own in layers), max(each)


def _speed(found: EvaluatedCandidate) -> tuple[Any, ...]:
    """Return a sort key that puts the fastest candidate first and, on ties, the simplest."""
    return found.step_s, found.candidate.order


def _bound_s(found: EvaluatedCandidate, *, split: bool = False) -> float:
    """Return a lower bound on the step time of the candidate's stages in any order.

    If ``split`` is True, the bound also holds for orders with I and W in place of B.
    """
    candidate = found.candidate
    bound_s = lower_bound(
        chain_costs(found.costs, candidate.placement),
        candidate.num_microbatches,
        placement=candidate.placement,
        split=split or candidate.splits,
        effort=0,
    )
    return bound_s + _end_s(found.costs, updates=found.completion.updates)


def _end_s(costs: Costs, *, updates: bool) -> float:
    """Return a lower bound on the time from the last gradient of a step to the end of the step.

    The last gradient completes a bucket of a stage. The bucket is then summed across replicas and, if ``updates`` is
    True, the weights of the stage are updated.
    """
    sums = [times[-1] if times else 0 for times in costs.reduce_s]
    return min(map(sum, zip(sums, costs.times(Kind.UPDATE), strict=True)) if updates else sums)
