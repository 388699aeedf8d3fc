"""Greedy list scheduling: what it writes is valid, exact and within its limit; and Hanayo, which it writes."""

from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Program, lower, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.order import Shape, linear, loop, v
from pipesched.program.generators import list_scheduling
from pipesched.program.generators.list_scheduling import backward_first
from pipesched.schedules.hanayo import hanayo
from pipesched.simulation.costs import Costs
from tests.support.closed_forms import RANKS, SECONDS, built, peaks, timed
from tests.support.random_programs import quick

WAVES = st.integers(1, 4)


@quick
@given(RANKS, st.integers(1, 20), st.integers(1, 5), st.sampled_from([linear, loop, v]), st.data())
def test_any_limit_gives_a_valid_exact_program_within_it(p, m, chunks, rule, data):
    limit = data.draw(st.integers(chunks, 3 * p * chunks))
    windows = data.draw(st.lists(st.integers(1, 2 * p), min_size=1, max_size=3))
    forward, backward = data.draw(SECONDS), data.draw(SECONDS)
    shape = Shape(p, m, chunks, rule(p, chunks))
    orders = backward_first(shape, max_in_flight=limit, windows=windows, forward_time=forward, backward_time=backward)
    program = Program(tuple(tuple(order.actions) for order in orders), shape.placement, m)
    validate(program, exact=True, max_in_flight=limit)


def test_without_a_place_kept_for_the_oldest_microbatch_the_ranks_fill_up_and_stop():
    def has_place(rank, stage):
        clock = rank._clock
        held = sum(len(clock.forwards[chunk]) - len(clock.backwards[chunk]) for chunk in rank._chunks)
        return held < rank._max_in_flight

    with patch.object(list_scheduling._ListRank, "_has_place", has_place), pytest.raises(ValueError, match="empty"):
        built("hanayo", 2, 8, v=4)
    validate(built("hanayo", 2, 8, v=4), max_in_flight=8)


def test_less_memory_than_one_microbatch_needs_is_refused():
    shape = Shape(2, 4, 4, v(2, 4))
    match = "max_in_flight is 3, but a rank has 4 chunks; pass max_in_flight=4 or more"
    with pytest.raises(ScheduleError, match=match):
        backward_first(shape, max_in_flight=3, windows=[2])


@quick
@given(RANKS, st.integers(1, 40), WAVES)
def test_waves_are_valid_exact_and_hold_p_microbatches(p, m, waves):
    program = built("hanayo", p, m, v=2 * waves)
    validate(program, exact=True, max_in_flight=p * 2 * waves)
    validate(lower(program))


@quick
@given(RANKS, WAVES)
def test_waves_hold_everything_on_the_last_rank_for_m_equal_to_p(p, waves):
    """No rank holds less than the one before it."""
    held = peaks(built("hanayo", p, p, v=2 * waves))
    assert held == sorted(held)
    assert held[-1] == 2 * waves * p


# Bubble ratios of backward-first greedy waves at m = p, B = 2F: (p, W) -> computed independently of this code.
GREEDY = {(4, 1): 0.333, (4, 2): 0.213, (4, 4): 0.119, (8, 1): 0.368, (8, 2): 0.238, (8, 4): 0.135}


@pytest.mark.parametrize(("p", "waves"), GREEDY)
def test_the_bubble_of_waves(p, waves):
    ratio = timed("hanayo", p, p, v=2 * waves, F=1, I=1, W=1).bubble_ratio
    assert round(float(ratio), 3) == GREEDY[p, waves]


@pytest.mark.parametrize(("p", "waves"), GREEDY)
def test_the_formula_of_the_hanayo_paper_is_an_approximation(p, waves):
    """(2p - 2) / (3pW + p - 1) at m = p, B = 2F; arXiv:2308.15762. One and two waves do better."""
    formula = Fraction(2 * p - 2, 3 * p * waves + p - 1)
    ratio = timed("hanayo", p, p, v=2 * waves, F=1, I=1, W=1).bubble_ratio
    assert Fraction(81, 100) <= ratio / formula <= Fraction(102, 100)


@pytest.mark.parametrize("p", range(2, 9))
def test_waves_beat_1f1b_with_as_many_microbatches_as_ranks(p):
    costs = {"F": 1, "I": 1, "W": 1}
    plain = timed("1f1b", p, p, **costs).makespan_s
    waves = [timed("hanayo", p, p, v=2 * count, **costs).makespan_s for count in (1, 2, 4)]
    assert plain > waves[0] > waves[1] > waves[2]


@pytest.mark.parametrize(("chunks", "stages", "even"), [(1, 8, 2), (3, 8, 2), (5, 16, 4)])
def test_half_a_wave_is_refused(chunks, stages, even):
    match = rf"got chunks_per_rank={chunks}; cut the model into {stages} stages for 4 ranks \(chunks_per_rank={even}\)"
    with pytest.raises(ScheduleError, match=match):
        hanayo.program(4, 8, chunks_per_rank=chunks)


def test_waves_turn_within_a_rank():
    assert hanayo.program(3, 1, chunks_per_rank=4).placement == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)


def test_the_best_of_several_windows_is_taken():
    shape = Shape(6, 48, 8, v(6, 8))
    spans = []
    for windows in ([7], [8], [12], range(7, 13)):
        orders = backward_first(shape, max_in_flight=48, windows=windows)
        program = Program(tuple(tuple(order.actions) for order in orders), shape.placement, 48)
        spans.append(simulate(program, Costs.uniform(48)).makespan_s)
    assert spans[-1] == min(spans) == spans[1] < spans[0]
