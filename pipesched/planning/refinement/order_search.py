"""Order search: finds faster orders of actions for the best candidates, within the memory limits.

For each placement, the schedule `searched` starts from the programs of the candidates with that placement. The schedule
considers stage times, the times of messages over idle links, and the memory that micro-batches need. Candidates with
the new orders are then evaluated like all other candidates, including all overheads and the total memory of each rank.
Only orders that are faster and within the limits are kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from pipesched import schedules
from pipesched.errors import MemoryLimitError
from pipesched.partitioning.result import StageLayers
from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import LADDER, Candidate
from pipesched.planning.effort import SearchEffort
from pipesched.planning.evaluated_candidate import WORTH, EvaluatedCandidate, simplest
from pipesched.planning.plan import searched_before
from pipesched.program.actions import Kind
from pipesched.program.generators.searched_orders import num_changes, num_lists, num_steps
from pipesched.program.liveness import peak_in_flight
from pipesched.program.program import Program
from pipesched.program.search.problem import num_evaluated
from pipesched.simulation.costs import Costs
from pipesched.simulation.relaxation.chain_costs import with_overheads
from pipesched.simulation.simulator import simulate

__all__ = ["ORDER_GAIN", "OrderSearch", "as_searched", "is_searched"]

ORDER_GAIN = 0.001  # a searched order with a saving below this fraction of a step does not replace a known schedule

#: A function (candidate, step_s, goes_on) that moves the candidate's boundaries and returns the best stages.
#: ``step_s(stages)`` returns the step time of stages, and ``goes_on()`` returns False if the search must stop.
Mover = Callable[[EvaluatedCandidate, Callable[[StageLayers], float], Callable[[], bool]], StageLayers]

_NAME = "searched"
_NEAR = 1.4  # orders are searched only for cuts whose step is within this factor of the fastest step
_PAIRS = 4  # maximum number of placements for which orders are searched
_CUTS = 200  # maximum number of cuts of a placement for which bounds are computed, to search for orders
_DIGITS = 4  # cuts are sorted by their bounds, rounded to this number of digits, and then by their largest stage
_TO_BOUND = 0.1  # the fraction of the effort for these bounds
_MOVED = 2  # maximum number of candidates with a searched order whose boundaries are moved
_TRIES = 3  # maximum number of searches, each with a lower limit, until the total memory of each rank is within limits
_STARTS = 8  # maximum number of programs to start from
_PER_PAIR = 0.2  # the fraction of the effort for the orders of one cut
_PER_OTHER = 0.08  # the same fraction for cuts for which all known programs exceed the limits
_PER_MOVE = 0.02  # the fraction of the effort for the orders of a cut with a moved boundary
_TO_LEAN = 0.1  # the fraction of the effort kept for orders that hold fewer micro-batches
_PER_LEAN = 0.05  # the fraction of the effort for one such order
_A_MOVE = 2_000  # the effort to compute the costs and the bound of a cut, in actions
_SHARES = (1 / 3, 1 / 6, 1 / 24, 1 / 60, 1 / 240, 1 / 960, 0)  # efforts of `searched`, relative to its default
_LEAST_SHARE = _SHARES[-2]  # the smallest of these shares at which `searched` changes list schedules
_A_STEP = 0.15  # the effort of one annealing step per action of the program, in actions
_A_LIST = 15  # the effort of one list schedule per action of the program, in actions


def is_searched(found: EvaluatedCandidate) -> bool:
    """Return whether the order search found the candidate's order."""
    return found.candidate.schedule.name == _NAME


def as_searched(found: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return a copy with the schedule `searched` and the same order, as if the order search had found this order."""
    candidate = found.candidate
    program = replace(candidate.program, name=_NAME)
    return replace(found, candidate=_with(candidate, program, found.costs))


class OrderSearch:
    """Searches for faster orders for the best candidates of a search.

    Args:
        evaluator: evaluates candidates.
        effort: the remaining effort, from which all work is subtracted.
        bound_s: a function that returns a lower bound on the step time of a candidate, for any order of its stages.

    """

    def __init__(
        self, evaluator: CandidateEvaluator, effort: SearchEffort, bound_s: Callable[[EvaluatedCandidate], float]
    ) -> None:
        self._evaluator = evaluator
        self._effort = effort
        self._all = effort.left
        self._bound_s = bound_s

    def improve(
        self, found: Sequence[EvaluatedCandidate], move: Mover, others: Sequence[EvaluatedCandidate] = ()
    ) -> list[EvaluatedCandidate]:
        """Return candidates within the limits, with the orders that the search finds.

        Args:
            found: the evaluated candidates of the search, at least one.
            move: a function that moves boundaries.
            others: candidates that may exceed the limits, but whose stages may have an order within the limits.
                Default: none.

        """
        best_s = min(each.step_s for each in found)
        made: list[EvaluatedCandidate] = []
        pairs = [(known, _PER_PAIR) for known in _groups(found, best_s)] + [([each], _PER_OTHER) for each in others]
        searched = set()
        for known, share in pairs:
            if self._bound_s(known[0]) < best_s:
                made += self._made(known, self._all * share)
            if _key(known[0]) not in searched:
                made += self._of_balanced_cuts(known[0], min((best_s, *(each.step_s for each in made))))
            searched.add(_key(known[0]))
        made.sort(key=_speed)
        can_lean = bool(made) and self._share(made[0].candidate, self._all * _PER_LEAN) is not None
        kept = self._all * _TO_LEAN if can_lean else 0
        for number, each in enumerate(made[:_MOVED]):
            share = (self._effort.left - kept) / (_MOVED - number)
            made += self._moved(each, move, until=self._effort.left - share)
        most_s = best_s * (1 - ORDER_GAIN)
        faster = [(each, each.step_s) for each in made if each.step_s < most_s]
        if can_lean and faster:  # of equally good candidates, the first is chosen: the one with the fewest in flight
            made = [*reversed(list(self._leaner(simplest(faster), most_s))), *made]
        return made

    def _leaner(self, found: EvaluatedCandidate, most_s: float) -> Iterator[EvaluatedCandidate]:
        """Yield candidates with the same stages whose orders are about as fast, but hold fewer micro-batches.

        Bisects the maximum number of (stage, micro-batch) pairs that a rank may hold.

        Args:
            found: the candidate to start from.
            most_s: all yielded candidates have a shorter step than this number of seconds.

        """
        candidate = found.candidate
        peaks = list(map(peak_in_flight, candidate.program.orders))
        too_few, enough = candidate.schedule.chunks_per_rank - 1, max(peaks)
        until = self._effort.left - self._all * _TO_LEAN
        while enough - too_few > 1 and self._effort.left > until:
            most = (too_few + enough) // 2
            made = list(self._made([found], self._all * _PER_LEAN, [min(peak, most) for peak in peaks]))
            if made and made[0].step_s < min(found.step_s * (1 + WORTH), most_s):
                yield made[0]
                enough = most
            else:
                too_few = most

    def _of_balanced_cuts(self, found: EvaluatedCandidate, best_s: float) -> Iterator[EvaluatedCandidate]:
        """Search for orders for well-balanced cuts. Yield each candidate that is faster than the best so far.

        The cuts with the lowest bounds come first.
        """
        most = min(_CUTS, int(self._all * _TO_BOUND / _A_MOVE))
        every = self._evaluator.balanced_cuts(found.candidate, most)
        cuts = [self._evaluator.evaluated(found.candidate, cut) for cut in every]
        self._effort.spend(_A_MOVE * len(cuts))
        bounds = [self._bound_s(cut) for cut in cuts]
        effort = max(self._all * _PER_MOVE, _cost(found.candidate, _LEAST_SHARE))
        best = None
        for at in sorted(range(len(cuts)), key=lambda at: round(bounds[at] / best_s, _DIGITS)):
            if bounds[at] >= best_s or self._effort.left < self._all / 2:
                break
            for made in self._made([cuts[at]], effort):
                if made.step_s < best_s:
                    best_s = made.step_s
                    best = made
                    yield made
        if best is not None:
            yield from self._made([best], self._all * _PER_PAIR)

    def _made(
        self, known: Sequence[EvaluatedCandidate], effort: float, most: Sequence[int] | None = None
    ) -> Iterator[EvaluatedCandidate]:
        """Yield the candidate with the order that the search finds; nothing if no order is within the limits.

        Args:
            known: candidates with the same placement, the fastest first. The search uses the costs of the first
                candidate, and starts from the programs of all candidates.
            effort: the effort of the search, in actions.
            most: the maximum number of (stage, micro-batch) pairs that each rank may hold. Default: the limits of the
                request.

        """
        first = known[0]
        candidate = first.candidate
        share = self._share(candidate, effort)
        if share is None:
            return
        costs = _times(first)
        room = _room(first, costs)
        for _ in range(_TRIES):
            schedule = schedules.get(_NAME).with_options(
                placement=candidate.placement,
                costs=costs,
                max_in_flight=self._evaluator.most_in_flight(candidate) if most is None else most,
                memory_limit_bytes=room,
                effort=share,
                starts=tuple(each.candidate.program for each in known[:_STARTS]),
            )
            self._effort.spend(_cost(candidate, share))
            try:
                program = schedule.program(candidate.num_ranks, candidate.num_microbatches)
            except MemoryLimitError:
                return
            made = replace(first, candidate=_with(candidate, program, first.costs))
            if not any(made.excess_bytes):
                yield made
                return
            room = [own - excess for own, excess in zip(room or (), made.excess_bytes, strict=False)]

    def _moved(self, found: EvaluatedCandidate, move: Mover, until: float) -> Iterator[EvaluatedCandidate]:
        """Yield the candidate with moved boundaries and new orders, as long as this shortens the step."""
        best = found

        def step_s(stages: StageLayers) -> float:
            nonlocal best
            if stages == best.stages:
                return best.step_s
            self._effort.spend(_A_MOVE)
            same = self._evaluator.evaluated(best.candidate, stages)
            if self._bound_s(same) >= best.step_s:
                return inf
            self._effort.spend(len(same.runs.columns))
            both = [same, *self._made([same], self._all * _PER_MOVE)]
            faster = [each for each in both if each.step_s < best.step_s and not any(each.excess_bytes)]
            if not faster:
                return inf
            best = min(faster, key=_speed)
            return best.step_s

        before = None
        while best is not before and self._effort.left > until:
            before = best
            move(best, step_s, lambda: self._effort.left > until)
            if best is not before:
                effort = min(self._all * _PER_PAIR, self._effort.left - until)
                best = min((best, *self._made([best], effort)), key=_speed)
                yield best

    def _share(self, candidate: Candidate, effort: float) -> float | None:
        """Return the largest of ``_SHARES`` for which a search costs at most ``effort``; None if all cost more."""
        within = min(effort, self._effort.left)
        return next((share for share in _SHARES if _cost(candidate, share) <= within), None)


def _speed(found: EvaluatedCandidate) -> float:
    return found.step_s


def _groups(found: Iterable[EvaluatedCandidate], best_s: float) -> list[list[EvaluatedCandidate]]:
    """Group the fast candidates by placement, micro-batches and checkpointing.

    In each group, the fastest candidate comes first. The search looks for orders for this candidate.
    """
    several = sorted((each for each in found if each.candidate.num_ranks > 1), key=_speed)
    groups: dict[Any, list[EvaluatedCandidate]] = {}
    for each in several:
        if each.step_s <= best_s * _NEAR and not each.candidate.program.has_updates:
            groups.setdefault(_key(each), []).append(each)
    return list(groups.values())[:_PAIRS]


def _key(found: EvaluatedCandidate) -> tuple[Any, ...]:
    """Return the properties, apart from the cut, on which the orders of a candidate depend."""
    own = found.candidate
    return own.placement, own.num_microbatches, repr(own.checkpoint)


def _cost(candidate: Candidate, share: float) -> float:
    """Return the cost, in actions, of a search with this share of the default effort of `searched`."""
    actions = 3 * candidate.num_stages * candidate.num_microbatches
    evaluated = 3 * candidate.num_stages * num_evaluated(candidate.num_ranks, candidate.num_microbatches)
    steps = num_steps(actions, share) * actions + num_changes(evaluated, share) * evaluated
    return float(actions * num_lists(actions, share) * _A_LIST + steps * _A_STEP)


def _with(candidate: Candidate, program: Program, costs: Costs) -> Candidate:
    """Return the candidate with a program that the order search found."""
    schedule = searched_before(program, costs)
    made = replace(candidate, schedule=schedule, splits=bool(program.columns.are(Kind.W).any()))
    made.__dict__["program"] = program
    return made


def _times(found: EvaluatedCandidate) -> Costs:
    """Return the costs of F, I, W and B for the search, including overheads and the recomputation before I or B.

    A recomputed stage keeps its inputs in memory instead of its activations.
    """
    costs = with_overheads(found.costs, found.candidate.placement)
    if found.candidate.checkpoint not in LADDER[1:]:
        return costs
    action_s = found.costs.overheads.action_s if found.costs.overheads else 0
    before_s = [own + action_s for own in costs.recompute_s]
    gradients: dict[str, Any] = {
        name: tuple(own + more for own, more in zip(getattr(costs, name), before_s, strict=True))
        for name in ("input_grad_s", "backward_s")
    }
    return replace(costs, activation_bytes=costs.input_bytes, **gradients)


def _room(found: EvaluatedCandidate, costs: Costs) -> list[int] | None:
    """Return the number of bytes that each rank can use for its micro-batches; None if there are no limits.

    The number is the limit minus the bytes that the rank needs for other purposes, such as weights and transients, at
    the peak of the known program.
    """
    if found.limit_bytes is None:
        return None
    own = simulate(found.candidate.program, costs).peak_bytes
    return [limit - peak + held for limit, peak, held in zip(found.limit_bytes, found.peak_bytes, own, strict=False)]
