"""The search: tries known orders, list schedules and a beam search, then improves the best orders by annealing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pipesched.program.search.annealing import Annealer, Cooling
from pipesched.program.search.beam_search import BeamSearch
from pipesched.program.search.bound import lower_bound
from pipesched.program.search.compiled import Whole
from pipesched.program.search.evaluation import MOST, UNFIT, Sequences, copy, evaluate, hold, run_times, sequences
from pipesched.program.search.list_orders import FUSED, progress_of, rules, write
from pipesched.program.search.periodic_search import PeriodicSearch
from pipesched.program.search.problem import (
    BACKWARD,
    INPUT_GRAD,
    KINDS,
    ROUNDS,
    WEIGHT_GRAD,
    OrderProblem,
    num_evaluated,
)
from pipesched.program.search.rule_search import RuleSearch

__all__ = ["FoundOrders", "search"]


@dataclass(frozen=True)
class FoundOrders:
    """The result of a search.

    Attributes:
        orders: for each rank, the codes of its actions.
        makespan: the makespan of the orders.
        bound: a lower bound on the makespan of any orders.
        evaluations: the number of orders that the search has tried.
        known: the index of these orders among the known orders, or None if the search has found better ones.

    """

    orders: tuple[tuple[int, ...], ...]
    makespan: int
    bound: int
    evaluations: int
    known: int | None


def search(
    problem: OrderProblem,
    known: Iterable[Sequence[Sequence[int]]],
    *,
    steps: int,
    lists: int,
    climbs: int = 0,
    changes: int = 0,
) -> FoundOrders | None:
    """Find orders with a short makespan. Return None if no orders within the limits are found.

    Args:
        problem: the stages, times and limits.
        known: known orders, as codes of actions; simpler ones first. Orders that exceed a limit are ignored.
        steps: the maximum number of annealing steps. If there are few actions, a beam search uses some of these steps.
        lists: the maximum number of list schedules to write by rules that make the same choices for all ranks.
        climbs: the maximum number of list schedules to write to improve the best of these rules, with separate choices
            for each rank. Default: 0.
        changes: the number of changes to try on a unit that the orders repeat (see `periodic_search`), if there are at
            least 16 equal micro-batches. Default: 0.

    """
    return _Search(problem, steps, lists, climbs, changes).run(known)


@dataclass(order=True)
class _Start:
    """Orders to start from, sorted by makespan, then by the time at which they were added."""

    makespan: int
    number: int
    known: int | None = field(compare=False)
    orders: Sequences = field(compare=False)


class _Search:
    def __init__(self, problem: OrderProblem, steps: int, lists: int, climbs: int, changes: int) -> None:
        self._problem = problem
        self._tables = problem.tables
        self._seconds = [int(number) for number in self._tables.seconds]
        self._times = run_times(self._tables)
        self._steps = steps
        self._lists = lists
        self._climbs = climbs
        self._changes = changes
        self._starts: list[_Start] = []
        self._bound = lower_bound(problem)
        self._tried = 0

    def run(self, known: Iterable[Sequence[Sequence[int]]]) -> FoundOrders | None:
        """Search, and stop as soon as the bound is reached."""
        for at, orders in enumerate(known):
            self._add(self._sequences(orders), at)
        if not self._done:
            self._list()
        if not self._starts:
            return None
        self._starts.sort()
        for improve in (self._search_units, self._search_beam):
            if not self._done:
                improve()
                self._starts.sort()
        best = self._starts[0]
        if not self._done and self._steps > 0:
            best = min(best, self._anneal())
        return self._found(best)

    @property
    def _done(self) -> bool:
        return any(start.makespan <= self._bound for start in self._starts)

    def _add(self, orders: Sequences, known: int | None = None) -> None:
        """Add orders to start from, if they are within the limits and do not deadlock."""
        self._tried += 1
        if self._holds(orders):
            makespan = int(evaluate(self._tables, self._times, orders, MOST))
            if makespan != UNFIT:
                self._keep(makespan, orders, known)

    def _keep(self, makespan: int, orders: Sequences, known: int | None = None) -> None:
        self._starts.append(_Start(makespan, len(self._starts), known, orders))

    def _holds(self, orders: Sequences) -> bool:
        first = self._tables.first
        fits = True
        for rank in range(self._problem.num_ranks):
            fits &= bool(hold(self._tables, orders, rank, first[rank], first[rank] + orders.lengths[rank]))
        return fits

    def _sequences(self, codes: Sequence[Sequence[int]]) -> Sequences:
        orders = sequences(self._tables)
        for rank, order in enumerate(codes):
            self._write(orders, rank, order)
        return orders

    def _list(self) -> None:
        """Write list schedules by rules that make the same choices for all ranks, then improve the best of these rules.

        Of all rules that run a B on the same ranks, only the best one is improved.
        """
        progress = progress_of(self._tables)
        ranks = self._problem.num_ranks
        orders = sequences(self._tables)
        best: dict[tuple[int, ...], tuple[int, Whole]] = {}
        for rule in islice(rules(self._problem, self._bound), self._lists):
            fused = tuple(rule[FUSED * ranks : (FUSED + 1) * ranks])
            most = MOST
            if best and self._climbs:
                least = min(makespan for makespan, _ in best.values())
                most = min(best[fused][0] - 1 if fused in best else MOST, least + least // _WORSE)
            makespan = int(write(self._tables, rule, progress, orders, most))
            self._tried += 1
            if makespan == UNFIT:
                continue
            self._keep(makespan, orders)
            if self._done:
                return
            if fused not in best or makespan < best[fused][0]:
                best[fused] = makespan, rule
            orders = sequences(self._tables)
        if best and self._climbs:
            ranked = sorted(best.values(), key=lambda found: found[0])
            self._climb([rule for _, rule in ranked[:_CLIMBERS]])

    def _climb(self, chosen: list[Whole]) -> None:
        """Improve each of the chosen rules a little, then improve the best one further, and store its orders.

        If there are many micro-batches, the rules are first improved for fewer micro-batches, because shorter orders
        take less time to write.
        """
        count = self._problem.num_microbatches
        fewer = self._problem.shortened(ROUNDS * self._problem.num_ranks)
        climbers = [RuleSearch(fewer or self._problem, rule, count) for rule in chosen]
        climbers = [climber for climber in climbers if climber.makespan != UNFIT]
        if not climbers:
            return
        goal = 0 if fewer else self._bound
        each = self._climbs // 2 // len(climbers)
        for climber in climbers:
            self._tried += climber.run(each, goal)
        best = min(climbers, key=lambda climber: climber.makespan)
        self._tried += best.run(self._climbs - each * len(climbers), goal)
        if fewer:
            best = RuleSearch(self._problem, best.rule, count)
            self._tried += best.run(self._climbs // _SHARE, self._bound)
        if best.makespan != UNFIT:
            self._add(best.orders)

    def _search_units(self) -> None:
        """Search for orders that repeat a unit, if there are many equal micro-batches and the bound is far.

        With more micro-batches than needed, units are evaluated for fewer. Otherwise, a unit seldom helps unless the
        best makespan is far above the bound.
        """
        problem = self._problem
        if not self._changes or not problem.is_uniform or not all(problem.chunks):
            return
        fewer = problem.shortened(num_evaluated(problem.num_ranks, problem.num_microbatches))
        near = self._bound + self._bound // (_CLOSE if fewer else _CLOSE_IF_FEW)
        if self._starts[0].makespan <= near:
            return
        periodic = PeriodicSearch(problem, fewer or problem)
        sources = [(self._tables, start.orders) for start in self._different(_SOURCES)]
        for orders in periodic.run(sources, self._changes, 0 if fewer else self._bound):
            self._add(orders)
        self._tried += periodic.ran

    def _search_beam(self) -> None:
        """Write orders by beam search, if there are few actions. This reduces the number of annealing steps.

        If the beam search proves that no better orders exist, the best makespan becomes the bound.
        """
        actions = len(self._tables.rank_of_slot)
        width = min(_WIDEST, self._steps // (_STEPS_OF_PLACE * actions))
        if actions > _SMALL or not width:
            return
        orders = sequences(self._tables)
        found, ran, proved = BeamSearch(self._problem, width).run(orders, self._starts[0].makespan)
        self._tried += ran
        self._steps -= ran * _STEPS_OF_CANDIDATE
        if found:
            self._add(orders)
        if proved:
            self._bound = min(start.makespan for start in self._starts)

    def _anneal(self) -> _Start:
        """Improve the best starts by annealing, and return the best result.

        Orders with few actions are annealed several times from a high temperature. The results are then annealed
        repeatedly from a lower temperature, the best results first. A smaller number of steps reduces the number of
        runs, not their length.
        """
        annealer = Annealer(self._tables)
        actions = sum(self._starts[0].orders.lengths)
        if actions > _SMALL:
            return min(self._starts[0], self._cooled(annealer, self._starts[0], _COLD, self._steps))
        runs = min(_RUNS, -(-self._steps // _SHORTEST))
        hot_runs = -(-runs // _HOT_SHARE)
        starts = self._different(hot_runs)
        found: list[_Start] = []
        for number in range(runs):
            warm = number >= hot_runs
            start = sorted(found)[number % hot_runs] if warm else starts[number % len(starts)]
            heat = _WARM if warm else _HOT
            found.append(self._cooled(annealer, start, heat, self._steps // runs, number))
            if found[-1].makespan <= self._bound:
                break
        return min(self._starts[0], *found)

    def _cooled(
        self, annealer: Annealer, start: _Start, heat: tuple[float, float], steps: int, number: int = 0
    ) -> _Start:
        """Anneal the orders of a start, and return the result.

        ``heat`` holds the first and the last temperature. ``number`` is the seed.
        """
        orders = sequences(self._tables)
        copy(start.orders, orders)
        if heat != _WARM:
            self._split(orders)
        makespan = int(evaluate(self._tables, self._times, orders, MOST))
        makespan, ran = annealer.run(orders, makespan, Cooling(*heat, steps), goal=self._bound, seed=number)
        self._tried += ran
        return _Start(makespan, len(self._starts) + number, None, orders)

    def _different(self, count: int) -> list[_Start]:
        """Return the best ``count`` starts whose orders differ from each other."""
        chosen: list[_Start] = []
        seen = set()
        for start in self._starts:
            key = tuple(self._codes(start.orders))
            if key not in seen:
                seen.add(key)
                chosen.append(start)
            if len(chosen) == count:
                break
        return chosen

    def _split(self, orders: Sequences) -> None:
        """Split each B into an I and a W if these take no more time, so that the previous stage waits less.

        If the new order of a rank would exceed a limit, the rank keeps its order.
        """
        for rank, codes in enumerate(self._codes(orders)):
            pieces = [piece for code in codes for piece in self._pieces(code)]
            kept = codes
            for attempt in (pieces, kept):
                self._write(orders, rank, attempt)
                begin = self._tables.first[rank]
                if hold(self._tables, orders, rank, begin, begin + len(attempt)):
                    break

    def _pieces(self, code: int) -> tuple[int, ...]:
        seconds = self._tables.seconds
        if code % KINDS != BACKWARD:
            return (code,)
        apart = code - BACKWARD + INPUT_GRAD, code - BACKWARD + WEIGHT_GRAD
        return apart if seconds[apart[0]] + seconds[apart[1]] <= seconds[code] else (code,)

    def _write(self, orders: Sequences, rank: int, codes: Sequence[int]) -> None:
        begin = int(self._tables.first[rank])
        orders.slots[begin : begin + len(codes)] = codes
        orders.lengths[rank] = len(codes)
        orders.busy[rank] = sum(self._seconds[code] for code in codes)

    def _codes(self, orders: Sequences) -> list[tuple[int, ...]]:
        first = self._tables.first
        return [
            tuple(int(code) for code in orders.slots[first[rank] : first[rank] + orders.lengths[rank]])
            for rank in range(self._problem.num_ranks)
        ]

    def _found(self, best: _Start) -> FoundOrders:
        return FoundOrders(tuple(self._codes(best.orders)), best.makespan, self._bound, self._tried, best.known)


_SMALL = 100  # with at most this many actions, a beam search runs, and annealing starts at a high temperature
_WIDEST = 1000  # the maximum number of partial orders of each length in the beam search
_STEPS_OF_PLACE = 40  # annealing steps per action for each partial order that the beam search may keep
_STEPS_OF_CANDIDATE = 5  # a candidate of the beam search takes as long as this many annealing steps
_WORSE = 16  # a rule is not improved if its makespan exceeds the best one by more than 1/16
_CLIMBERS = 3  # the maximum number of rules to improve
_RUNS = 72  # the maximum number of annealing runs
_HOT_SHARE = 6  # one in this many annealing runs starts at a high temperature
_SHORTEST = 800  # the maximum number of steps of a run, unless there are steps for more than _RUNS runs
_SHARE = 8  # after a search with fewer micro-batches, 1/8 as many list schedules are written with all micro-batches
_SOURCES = 2  # the number of orders from which the first units are taken
_CLOSE = 100  # units are searched if the best makespan exceeds the bound by more than 1/100
_CLOSE_IF_FEW = 10  # with few micro-batches, units are searched if it exceeds the bound by more than 1/10
_HOT = (1.0, 0.05)
_WARM = (0.3, 0.02)
_COLD = (0.1, 0.01)
