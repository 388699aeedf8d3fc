"""Orders that repeat a unit: the moves of the unit, and the search for one."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Costs, schedules, simulate, validate
from pipesched.program.generators import searched_orders
from pipesched.program.generators.searched_orders import num_changes
from pipesched.program.placement import v
from pipesched.program.search.evaluation import MOST, UNFIT, evaluate, hold, run_times, sequences
from pipesched.program.search.list_orders import progress_of, rules, write
from pipesched.program.search.periodic_orders import Timed, fuse, shift, shortest_period, split, unit_of, unroll
from pipesched.program.search.periodic_search import PeriodicSearch
from pipesched.program.search.problem import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    WEIGHT_GRAD,
    OrderProblem,
    Resource,
    num_evaluated,
)
from pipesched.program.search.search import search
from tests.support.random_programs import quick


def problem(seed=0, *, num_ranks=2, chunks=2, num_microbatches=32, limit=3):
    """Uneven stages in a V, with a limited number of (stage, micro-batch) pairs on each rank."""
    rng = random.Random(seed)
    stages = num_ranks * chunks
    times = [[rng.randint(14, 28) for _ in range(stages)] for _ in range(3)]
    times.append([i + w - rng.randint(0, 4) for _, i, w in zip(*times, strict=True)])
    one, none = ([[number] * num_microbatches] * stages for number in (1, 0))
    return OrderProblem(
        num_ranks=num_ranks,
        placement=v(num_ranks, chunks),
        num_microbatches=num_microbatches,
        times=[[[time] * num_microbatches for time in row] for row in times],
        forward_lags=[[1] * num_microbatches] * (stages - 1),
        backward_lags=[[1] * num_microbatches] * (stages - 1),
        resources=[Resource(takes=[one, none, none, none], gives=[none, none, one, one], limits=[limit] * num_ranks)],
    )


def one_by_one(problem, size):
    """The actions of ``size`` micro-batches, which run one after the other without overlap."""
    timed = [[] for _ in range(problem.num_ranks)]
    now = 0
    for microbatch in range(size):
        chain = [(stage, FORWARD) for stage in range(problem.num_stages)]
        chain += [(stage, kind) for stage in reversed(range(problem.num_stages)) for kind in (INPUT_GRAD, WEIGHT_GRAD)]
        for stage, kind in chain:
            timed[problem.placement[stage]].append(Timed(now, stage * KINDS + kind, microbatch))
            now += problem.times[kind][stage][0] + 1
    return timed, now


def orders_of(problem, unit, size):
    orders = sequences(problem.tables)
    for rank in range(problem.num_ranks):
        unroll(problem.tables, unit, size, rank, orders)
    return orders


def makespan(problem, orders):
    return evaluate(problem.tables, run_times(problem.tables), orders, MOST)


def codes(problem, orders, rank):
    first = problem.tables.first[rank]
    return [int(code) for code in orders.slots[first : first + orders.lengths[rank]]]


def check_order(problem, rank, own):
    """Each F, I and W occurs once (a B stands for I and W), in ascending order, and in the order F, I, W."""
    done = {}
    for code in own:
        pair, kind = divmod(code, KINDS)
        stage, microbatch = divmod(pair, problem.num_microbatches)
        for each in (INPUT_GRAD, WEIGHT_GRAD) if kind == BACKWARD else (kind,):
            assert done.get((stage, each), 0) == microbatch
            done[stage, each] = microbatch + 1
            if each != FORWARD:
                assert done[stage, each - 1] > microbatch
    assert done == {
        (stage, kind): problem.num_microbatches
        for stage in problem.chunks[rank]
        for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
    }


MOVES = st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 99), st.integers(-50, 50))


@quick
@given(st.integers(1, 3), st.integers(1, 9), st.lists(MOVES, max_size=30))
def test_moves_keep_each_stage_in_ascending_order(size, num_microbatches, moves):
    """Every micro-batch runs each action once, also if the number of micro-batches is not a multiple of the size."""
    own = problem(num_microbatches=num_microbatches)
    timed, life = one_by_one(own, size)
    unit = unit_of(own, timed, life, size)
    assert makespan(own, orders_of(own, unit, size)) != UNFIT
    for shifts, rank, number, distance in moves:
        at = unit.first[rank] + number % unit.lengths[rank]
        kind = unit.actions[at] % KINDS
        if shifts or kind == FORWARD:
            shift(unit, size, rank, at, distance)
        elif kind == BACKWARD:
            split(unit, size, rank, at, distance)
        else:
            fuse(unit, size, rank, at)
    for rank in range(own.num_ranks):
        check_order(own, rank, codes(own, orders_of(own, unit, size), rank))


def test_an_action_moves_to_the_previous_period():
    own = problem(num_microbatches=3)
    timed, life = one_by_one(own, 1)
    unit = unit_of(own, timed, life, 1)
    assert shift(unit, 1, 0, 0, -1) == -1  # the first F, in front of the last W of the previous micro-batch
    first = codes(own, orders_of(own, unit, 1), 0)
    assert first.index(FORWARD + KINDS) == first.index(WEIGHT_GRAD) - 1
    assert shift(unit, 1, 0, unit.first[0] + unit.lengths[0] - 1, 1) == 1
    assert codes(own, orders_of(own, unit, 1), 0) == codes(own, orders_of(own, unit_of(own, timed, life, 1), 1), 0)


def test_a_backward_is_split_and_fused():
    own = problem(num_microbatches=3)
    unit = unit_of(own, *one_by_one(own, 1), 1)
    before = codes(own, orders_of(own, unit, 1), 1)
    at = next(at for at in range(unit.first[1], unit.first[2]) if unit.actions[at] % KINDS == INPUT_GRAD)
    assert fuse(unit, 1, 1, at)
    assert sum(code % KINDS == BACKWARD for code in codes(own, orders_of(own, unit, 1), 1)) == 3
    split(unit, 1, 1, at, 1)
    assert codes(own, orders_of(own, unit, 1), 1) != before  # the W has moved behind the next action
    assert shift(unit, 1, 1, at + 2, -1) == -1
    assert codes(own, orders_of(own, unit, 1), 1) == before


def test_with_a_shorter_period_ranks_hold_more_microbatches():
    own = problem(limit=100)
    timed, life = one_by_one(own, 1)

    def most_held(period):
        orders = orders_of(own, unit_of(own, timed, period, 1), 1)
        first, last = own.tables.first[0], own.tables.first[0] + orders.lengths[0]
        assert hold(own.tables, orders, 0, first, last)
        return max(orders.held[first:last])

    assert most_held(life) == 2  # a pair for each of the rank's two stages
    assert most_held(life // 4) > most_held(life // 2) > 2


def test_the_shortest_period_keeps_microbatches_in_ascending_order():
    """The two W start 50 apart. So with a period of 50, the W of micro-batches 1 and 2 would start together."""
    own = [Timed(0, FORWARD, 0), Timed(5, FORWARD, 1), Timed(10, INPUT_GRAD, 0), Timed(12, WEIGHT_GRAD, 0)]
    own += [Timed(20, INPUT_GRAD, 1), Timed(62, WEIGHT_GRAD, 1)]
    assert shortest_period([own]) == 51
    assert shortest_period([[own[0], own[2], Timed(30, WEIGHT_GRAD, 0)]]) == 1
    fused = [own[0], own[1], own[2], own[3], Timed(90, BACKWARD, 1)]
    assert shortest_period([fused]) == 81  # from the I of micro-batch 0 to the B of micro-batch 1


def listed(own):
    """Orders by the first rule of list scheduling that fits."""
    progress = progress_of(own.tables)
    for rule in rules(own, 0):
        orders = sequences(own.tables)
        if write(own.tables, rule, progress, orders, MOST) != UNFIT:
            return orders
    raise AssertionError


def fits(own, orders):
    first = own.tables.first
    return all(hold(own.tables, orders, rank, first[rank], first[rank] + orders.lengths[rank]) for rank in range(2))


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_orders_within_the_limits(seed):
    own, fewer = problem(seed, num_microbatches=64), problem(seed, num_microbatches=16)
    sources = [(own.tables, listed(own))]

    def run(steps):
        periodic = PeriodicSearch(own, fewer)
        found = next(periodic.run(sources, steps, 0))
        return [codes(own, found, rank) for rank in (0, 1)], makespan(own, found), periodic.ran, found

    ranks, makespan_of_found, ran, found = run(800)
    assert run(800)[:3] == (ranks, makespan_of_found, ran)
    assert 400 < ran <= 1000
    for rank in (0, 1):
        check_order(own, rank, ranks[rank])
    assert fits(own, found)
    assert makespan_of_found < run(0)[1]  # shorter than with the best unit of the list schedule
    assert makespan_of_found < makespan(own, sources[0][1])


@pytest.mark.parametrize("size", range(1, 5))
def test_the_makespan_is_extrapolated_to_all_microbatches(size):
    """All periods take equally long, so the extrapolation is exact."""
    own, fewer = problem(num_microbatches=64, limit=8), problem(num_microbatches=16, limit=8)
    unit = unit_of(fewer, *one_by_one(fewer, size), size)
    assert PeriodicSearch(own, fewer)._estimate(unit, size) == makespan(own, orders_of(own, unit, size))


def test_late_weight_gradients_count_in_the_extrapolation():
    """The W start 12 micro-batches late, so they do not make the last F and I of the evaluated orders later."""
    own, fewer = (problem(num_microbatches=count, limit=100) for count in (64, 16))
    timed, life = one_by_one(fewer, 1)
    late = [
        [each._replace(start=each.start + 12 * life * (each.action % KINDS == WEIGHT_GRAD)) for each in row]
        for row in timed
    ]
    unit = unit_of(fewer, late, life // 4, 1)
    estimate = PeriodicSearch(own, fewer)._estimate(unit, 1)
    assert estimate == pytest.approx(makespan(own, orders_of(own, unit, 1)), rel=0.02)


def test_no_unit_fits():
    own = problem(limit=100)
    tight = replace(own, resources=[replace(own.resources[0], limits=[0, 0])])
    assert list(PeriodicSearch(tight, tight.shortened(16)).run([(own.tables, listed(own))], 600, 0)) == []


def found_with(problem, changes):
    return search(problem, [], steps=0, lists=16, changes=changes)


def test_many_microbatches_take_less_time_with_a_unit():
    own = problem(num_microbatches=128)
    direct, found = (found_with(own, changes) for changes in (0, 2000))
    assert found.makespan < 0.97 * direct.makespan


def test_units_are_searched_only_for_many_equal_microbatches():
    own = problem(num_microbatches=20)
    assert found_with(own, 600).evaluations > found_with(own, 0).evaluations
    longer = replace(own, times=[[[*row[:-1], row[-1] + 1] for row in table] for table in own.times])
    assert found_with(longer, 600) == found_with(longer, 0)
    many, few = (3 * 4 * num_evaluated(2, count) for count in (16, 15))
    assert num_changes(many, 1) > 0 == num_changes(few, 1)  # too few micro-batches
    assert num_changes(many, 0.01) == 0  # too little effort


def test_the_schedule_searched_uses_units(monkeypatch):
    costs = Costs((20, 25, 17, 22), (22, 27, 19, 24), (18, 23, 15, 20), (38, 48, 32, 42), transfer_s=1)
    options = {"costs": costs, "placement": (0, 1, 1, 0), "max_in_flight": 3, "effort": Fraction(1, 25)}
    found = schedules.get("searched").program(2, 48, **options)
    validate(found, exact=True, max_in_flight=3)
    monkeypatch.setattr(searched_orders, "_CHANGES", 0)
    direct = schedules.get("searched").program(2, 48, **options)
    assert simulate(found, costs).makespan_s < 0.99 * simulate(direct, costs).makespan_s
