"""Chimera, DualPipe and DualPipeV against the closed forms and the figures of their papers.

Letters as in closed_forms.py. f, i, w: the times of a chunk of DualPipeV, half of those of its rank. rho: what an
overlapped pair takes, as a share of the sum of its two parts.
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Costs, Order, Program, lower, schedule, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_recompute, forward_then_backward
from tests.support.closed_forms import SECONDS, peaks
from tests.support.random_programs import quick

EVEN, MORE = st.sampled_from([2, 4, 6, 8]), st.integers(0, 6)
HALF = Fraction(1, 2)


def timed(name, p, m, F, I, W, rho=1):  # noqa: E741
    """Simulate with equal times of every stage."""
    program = schedules.get(name).program(p, m)
    times = {"forward_s": F, "input_grad_s": I, "weight_grad_s": W, "overlap": rho}
    return simulate(program, Costs.uniform(program.num_stages, **times))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_any_number_of_microbatches_goes_both_ways(name, p):
    for m in range(1, 41):
        program = schedules.get(name).program(p, m)
        validate(program)
        for form in (program, program.forward(), forward_then_backward(program)):
            validate(lower(add_recompute(form, "except_last")))
        assert (program.num_ranks, program.num_stages, program.num_weights) == (p, 2 * p, p)
        assert program.visits.sum() == p * m
        assert program.first_descent() is None
        assert not program.exact


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
@pytest.mark.parametrize(("p", "nearest"), [(1, [2]), (3, [2, 4]), (7, [6, 8])])
def test_an_odd_number_of_ranks_is_refused_with_the_nearest_even_ones(name, p, nearest):
    said = f"got {p}; use {' or '.join(map(str, nearest))} ranks, with any number of micro-batches"
    with pytest.raises(ScheduleError, match=said):
        schedules.get(name).program(p, 8)
    for count in nearest:
        validate(schedules.get(name).program(count, 8))


@quick
@given(EVEN, MORE, SECONDS)
def test_chimera_where_a_backward_takes_as_long_as_a_forward(p, units, F):
    """p - 2 slots, a ratio of (p-2)/(2m+p-2), for m a multiple of p; arXiv:2107.06925."""
    m = p * (units + 1)
    trace = timed("chimera", p, m, F, F, 0)
    assert trace.makespan_s == (2 * m + p - 2) * F
    assert trace.bubble_ratio == pytest.approx((p - 2) / (2 * m + p - 2))


@quick
@given(EVEN, st.integers(1, 6), SECONDS)
def test_chimera_where_a_backward_takes_twice_as_long(p, units, F):
    """2(p-2)F for m = p, and (p-2)F more for each further unit: the gaps between units are not filled."""
    m = p * units
    assert timed("chimera", p, m, F, F, F).makespan_s == (3 * m + (units + 1) * (p - 2)) * F


@quick
@given(EVEN, MORE)
def test_peak_memory_of_chimera(p, units):
    """From p/2 + 1 at the ends to p in the middle."""
    expected = [p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)]
    assert peaks(schedules.get("chimera").program(p, p * (units + 1))) == expected


@quick
@given(EVEN, st.integers(0, 8), SECONDS, SECONDS)
def test_dualpipe_bubble(p, more, a, b):
    """(p/2 - 1)(F&B + B - 3W) for F = I >= W and even m >= 2p; arXiv:2412.19437."""
    W, F = sorted((a, b))
    m = 2 * p + 2 * more
    trace = timed("dualpipe", p, m, F, F, W)
    assert trace.makespan_s == m * (2 * F + W) + (p // 2 - 1) * (2 * F + W + F + W - 3 * W)


@quick
@given(st.integers(1, 8), st.integers(0, 8), SECONDS, SECONDS)
def test_dualpipe_v_bubble(p, more, a, b):
    """(p - 1)(f&b + b - 3w) for f = i >= w and m >= 2p: half of DualPipe's for as many ranks."""
    w, f = sorted((a, b))
    m = 2 * p + more
    assert timed("dualpipe-v", p, m, f, f, w).makespan_s == 2 * m * (2 * f + w) + (p - 1) * (3 * f - w)


@quick
@given(st.integers(1, 8), st.integers(0, 8), SECONDS, SECONDS, SECONDS)
def test_dualpipe_v_bubble_where_forwards_take_longer(p, more, a, b, c):
    """(p - 1)(2f + i - w) for f >= i >= w, where overlapping gains nothing."""
    w, i, f = sorted((a, b, c))
    m = 2 * p + more
    assert timed("dualpipe-v", p, m, f, i, w).makespan_s == 2 * m * (f + i + w) + (p - 1) * (2 * f + i - w)


@quick
@given(EVEN, st.integers(0, 8))
def test_peak_memory_of_the_dual_pipes(p, more):
    """p + 1 micro-batches of DualPipe, p + 1/2 of DualPipeV, on every rank."""
    assert peaks(schedules.get("dualpipe").program(p, 2 * p + 2 * more)) == [p + 1] * p
    assert peaks(schedules.get("dualpipe-v").program(p, 2 * p + more)) == [2 * p + 1] * p


@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 8, 20), ("dualpipe-v", 4, 10)])
def test_the_pictures_of_the_open_source(name, p, m):
    """66 slots, 6 of them idle on every rank, in units of F = I = W of a stage; github.com/deepseek-ai/DualPipe."""
    trace = timed(name, p, m, 1, 1, 1)
    assert trace.makespan_s == 66
    assert trace.busy_s == (60,) * p


@pytest.mark.parametrize(("rho", "first", "last"), [(Fraction(4, 5), 6.2, 9.8), (Fraction(2, 3), 1, 7)])
def test_an_overlap_that_gains_leaves_less_than_the_closed_form(rho, first, last):
    """(p - 1)(f&b + b - 3w) is then what the last rank idles; the ranks before it idle less."""
    trace = timed("dualpipe-v", 8, 20, 1, 1, 1, rho)
    idle = [trace.makespan_s - busy for busy in trace.busy_s]
    assert idle[-1] == max(idle) == 7 * (3 * rho + 2 - 3)
    assert (float(idle[0]), float(idle[-1])) == (first, last)


@pytest.mark.parametrize(
    ("name", "unit", "makespan", "held"),
    [
        ("chimera", 1, 30, [3, 4, 4, 3]),
        ("dualpipe", 1, 26, [5, 5, 5, 5]),
        ("dualpipe-v", HALF, 27, [4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_four_ranks_eight_microbatches_with_unit_costs(name, unit, makespan, held):
    trace = timed(name, 4, 8, unit, unit, unit)
    assert (trace.makespan_s, trace.span_s) == (makespan, makespan)
    assert [peak * unit for peak in trace.peak_in_flight] == held


def test_whole_and_split_backwards_of_a_stage_count_together():
    @schedule("mixed")
    def mixed(rank, shape):
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
        order.I(rank)
        order.B(rank)
        order.W(rank)
        order.B(rank)
        order.I(rank)
        for _ in range(3):  # more than are left
            order.W(rank)
            order.B(rank)
        return order

    assert str(mixed.program(1, 4)).splitlines()[-1] == "rank 0: 0F0 0F1 0F2 0F3 0I0 0B1 0W0 0B2 0I3 0W3"
    validate(mixed.program(1, 4))


def test_pairs_that_overlap_keep_their_mark_in_the_text():
    program = schedules.get("dualpipe-v").program(2, 4)
    assert "0F3&3B1 3F2&0B0" in str(program)
    assert Program.parse(str(program)).columns == program.columns
