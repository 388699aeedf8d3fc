"""The bound from all orders of one rank: never above an optimum, and close to it where memory is tight."""

import random
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipesched import Costs, lower_bound, simulate
from pipesched.program.actions import Kind
from pipesched.program.placement import loop, v
from pipesched.program.validation import peak_in_flight
from pipesched.simulation.simulator import simulate_with_bound
from tests.support.random_programs import programs, quick

# What a solver (CP-SAT) proved: placement, m, F, I, W, B, transfer, limit, optimum.
OPTIMA = [
    ((0, 1, 2), 8, (25, 23, 15), (28, 27, 15), (22, 16, 11), (50, 42, 24), 1, 2, 728),
    ((0, 1, 0, 1), 2, (6, 3, 2, 9), (8, 6, 3, 8), (8, 1, 1, 4), (16, 7, 4, 12), 0, 4, 79),
    ((0, 1, 2), 3, (3, 1, 1), (2, 2, 1), (1, 3, 3), (2, 5, 4), 1, 3, 25),
    ((0, 1), 3, (1, 6), (4, 5), (1, 1), (5, 6), 0, 2, 40),
    ((0, 1, 0, 1), 4, (2, 8, 4, 2), (7, 4, 5, 1), (8, 4, 1, 4), (15, 8, 6, 5), 1, 4, 120),
    ((0, 1, 0, 1), 5, (3, 1, 6, 9), (2, 1, 8, 1), (8, 1, 1, 7), (10, 2, 9, 8), 0, 3, 148),
    ((0, 1, 2), 2, (2, 6, 1), (1, 1, 2), (6, 6, 6), (7, 7, 8), 0, None, 29),
    ((0, 1, 2, 3), 6, (2, 3, 5, 1), (8, 5, 8, 9), (9, 5, 5, 3), (17, 10, 13, 12), 1, 3, 155),
    ((0, 1, 0, 1), 3, (8, 4, 5, 6), (3, 2, 4, 8), (4, 6, 3, 6), (7, 8, 7, 14), 0, 2, 128),
    ((0, 1, 2), 4, (6, 3, 1), (8, 7, 6), (2, 8, 5), (10, 15, 11), 0, None, 82),
]


def costs_of(F, I, W, B, c):  # noqa: E741
    return Costs(F, I, W, B, transfer_s=c)


@pytest.mark.parametrize(("placement", "m", "F", "I", "W", "B", "c", "limit", "optimum"), OPTIMA)
def test_it_lies_between_the_formulas_and_the_optimum(placement, m, F, I, W, B, c, limit, optimum):  # noqa: E741
    costs = costs_of(F, I, W, B, c)
    formulas, bound = (
        lower_bound(costs, m, placement=placement, max_in_flight=limit, effort=effort) for effort in (0, 1_000_000)
    )
    assert formulas < bound <= optimum <= 1.06 * bound
    assert isinstance(bound, int)


def by_random(rng, num_stages):
    """Whole numbers, zeros among them; B may be shorter or longer than I and W."""
    times = [[rng.randint(0, 9) for _ in range(num_stages)] for _ in range(4)]
    return Costs(*times, transfer_s=rng.randint(0, 5))


@settings(quick, max_examples=40)
@given(st.data())
def test_no_program_is_faster(data):
    program = data.draw(programs(max_stages=4, max_microbatches=4))
    assume(program.is_chain and not program.forward_only)
    costs = by_random(random.Random(data.draw(st.integers(0, 10**6))), program.num_stages)
    makespan = simulate(program, costs).makespan_s
    splits = {True, any(action.kind is Kind.I for order in program.orders for action in order)}
    limit = data.draw(st.sampled_from([None, [peak_in_flight(order) for order in program.orders]]))
    for split in splits:
        bound = lower_bound(
            costs,
            program.num_microbatches,
            placement=program.placement,
            max_in_flight=limit,
            split=split,
            effort=30_000,
        )
        assert bound <= makespan


def test_it_is_the_same_in_other_units():
    placement, m, F, I, W, B, c, limit, _ = OPTIMA[0]  # noqa: E741
    whole = lower_bound(costs_of(F, I, W, B, c), m, placement=placement, max_in_flight=limit)
    thirds = [tuple(Fraction(time, 3) for time in times) for times in (F, I, W, B)]
    assert lower_bound(costs_of(*thirds, Fraction(c, 3)), m, max_in_flight=limit) == Fraction(whole, 3)
    floats = [tuple(0.1 * time for time in times) for times in (F, I, W, B)]
    in_floats = lower_bound(costs_of(*floats, 0.1 * c), m, max_in_flight=limit)
    assert 0.1 * whole * (1 - 1e-4) < in_floats <= 0.1 * whole * (1 + 1e-12)
    large = [tuple(time * 10**15 for time in times) for times in (F, I, W, B)]
    in_large = lower_bound(costs_of(*large, c * 10**15), m, max_in_flight=limit)
    assert whole * 10**15 * (1 - 1e-4) < in_large <= whole * 10**15


def test_more_effort_never_makes_it_lower_and_equal_efforts_give_equal_bounds():
    rng = random.Random(5)
    F = [rng.randint(150, 260) for _ in range(8)]
    costs = Costs(F, F, [time // 2 for time in F], transfer_s=10)
    found = [lower_bound(costs, 12, max_in_flight=4, effort=effort) for effort in (0, 20_000, 200_000, 200_000)]
    assert found == sorted(found)
    assert found[0] < found[-1] == found[-2]


def test_where_there_are_too_many_states_the_formulas_remain():
    costs = Costs.uniform(64)
    limits = {"placement": loop(8, 8), "max_in_flight": 40}
    assert lower_bound(costs, 64, **limits) == lower_bound(costs, 64, effort=0, **limits)


def test_ranks_with_different_numbers_of_chunks():
    """Rank 0 holds two stages, and waits while the first micro-batch is on rank 1."""
    assert lower_bound(Costs.uniform(3), 3, placement=(0, 1, 0), max_in_flight=2) == 3 * 6 + 1


def test_a_path_between_two_chunks_bounds_the_step():
    """On rank 0 of a V of 2 ranks with 2 places, one micro-batch at a time is between its last F and its last I."""
    costs = Costs.uniform(4, forward_s=1, input_grad_s=10, weight_grad_s=0)
    way_back = 1 + 4 * 10
    assert lower_bound(costs, 4, placement=v(2, 2), max_in_flight=2, effort=0) == 3 + 4 * way_back


def test_a_trace_for_users_has_the_tighter_bound():
    from pipesched import schedules

    program = schedules.get("1f1b").program(2, 3)
    costs = Costs((6, 2), (3, 4), (2, 5), (5, 7), transfer_s=1)
    shown = simulate_with_bound(program, costs)
    assert simulate(program, costs).bound_s <= shown.bound_s <= shown.makespan_s
