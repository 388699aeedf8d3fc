"""Schedules that are generated: V-Half and V-Min from a building block.

p ranks, m micro-batches; F, I, W: the time of a forward, an input gradient and a weight gradient of one stage.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import quick

from pipesched import Costs, schedules, simulate, validate
from pipesched.building_blocks import repeated
from pipesched.errors import ScheduleError
from pipesched.order import Shape, linear, schedule

SIZES = [*range(2, 9), 12, 16]


def bubble_and_peak(name, p, m):
    """The bubble in chunk times, and the most chunks held, with unit times."""
    trace = simulate(schedules.get(name).program(p, m), Costs.uniform(2 * p))
    return trace.makespan_s - 6 * m, max(trace.peak_in_flight)


@pytest.mark.parametrize("p", SIZES)
def test_v_half(p):
    """3p - 7 for even p, 3p - 4 for odd p; floor((p + 2) / 2) micro-batches; arXiv:2405.15362."""
    bubble = 1 if p == 2 else 3 * p - (4 if p % 2 else 7)
    for m in sorted({p, p + 1, p + 2, 2 * p + 1, 3 * p}):
        assert bubble_and_peak("v-half", p, m) == (bubble, 2 * ((p + 2) // 2))


@pytest.mark.parametrize("p", SIZES)
def test_v_min(p):
    """4p - 5, or 4p - 7 for p a multiple of 3; floor((p + 4) / 3) micro-batches; arXiv:2405.15362."""
    for m in sorted({p, p + 1, p + 2, 2 * p + 1, 3 * p}):
        assert bubble_and_peak("v-min", p, m) == (4 * p - (5 if p % 3 else 7), 2 * ((p + 4) // 3))


@pytest.mark.parametrize(
    ("name", "p", "m", "optimum"), [("v-min", 3, 6, 41), ("v-min", 4, 8, 59), ("v-half", 4, 8, 53)]
)
def test_makespans_that_a_constraint_solver_proved_optimal_for_their_memory(name, p, m, optimum):
    assert bubble_and_peak(name, p, m)[0] + 6 * m == optimum


@pytest.mark.parametrize(("name", "peak"), [("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)])
@quick
@given(st.integers(1, 12), st.integers(1, 30))
def test_building_blocks_stay_within_their_memory(name, peak, p, m):
    validate(schedules.get(name).program(p, m), max_in_flight=2 * peak(p), exact=True)


def test_a_block_that_no_rank_can_follow_is_refused():
    shape = Shape(2, 3, 1, linear(2, 1))
    with pytest.raises(ScheduleError, match="17 actions wait for each other with 1 micro-batches in flight"):
        repeated(shape, {0: (1, 3), 1: (2, 0)}, interval=4, max_in_flight=1, early_forwards=False)
    with pytest.raises(ScheduleError, match="or raise the limit"):
        repeated(shape, {0: (0, 3), 1: (1, 2)}, interval=3, max_in_flight=0, early_forwards=True)


@schedule("one-pass-a-rank")
def one_pass_a_rank(shape):
    """A block of one stage a rank, down and up again."""
    p = shape.num_ranks
    block = {stage: (stage, 2 * p - 1 - stage) for stage in range(p)}
    return repeated(shape, block, interval=3, max_in_flight=p, early_forwards=True)


@pytest.mark.parametrize("p", range(1, 7))
def test_a_block_of_one_stage_a_rank_is_faster_than_1f1b(p):
    for m in (p, 2 * p, 3 * p + 1):
        program = one_pass_a_rank.program(p, m)
        validate(program, max_in_flight=p, exact=True)
        other = schedules.get("1f1b").program(p, m)
        makespans = [simulate(each, Costs.uniform(p)).makespan_s for each in (program, other)]
        assert makespans[0] < makespans[1] or p == 1


def test_generated_schedules_of_a_v_have_two_chunks():
    for name in ("v-half", "v-min"):
        with pytest.raises(ScheduleError, match="holds 2 stages on each rank; asked for 3"):
            schedules.get(name).program(4, 8, chunks_per_rank=3)
