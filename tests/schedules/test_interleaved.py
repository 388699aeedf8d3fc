"""Interleaved schedules against the closed forms of their papers, and with micro-batches that fill no even groups."""

from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Costs, lower, schedules, simulate, validate
from pipesched.errors import DeadlockError
from pipesched.order import Shape
from tests.support.closed_forms import MICROBATCHES, RANKS, SECONDS, assert_makespan, built, peaks, timed
from tests.support.random_programs import quick

NAMES = ["interleaved-1f1b", "interleaved-zb", "gis"]
CHUNKS, ROUNDS = st.integers(2, 4), st.integers(1, 5)


@quick
@given(RANKS, st.integers(1, 5), st.integers(2, 4), SECONDS, SECONDS, SECONDS)
def test_interleaved_bubble(p, rounds, v, F, I, W):  # noqa: E741
    """(p - 1)(F + B) / v for m a multiple of p; arXiv:2104.04473."""
    m, T = p * rounds, F + I + W
    trace = timed("interleaved-1f1b", p, m, v=v, F=F, I=I, W=W)
    assert_makespan(trace, m * T + Fraction((p - 1) * T, v))
    assert trace.bubble_ratio == Fraction(p - 1, v * m + p - 1)


@quick
@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4), SECONDS, SECONDS, SECONDS, st.data())
def test_interleaved_bubble_with_latency(p, rounds, v, F, I, W, data):  # noqa: E741
    """2(pv - 1)c more, as long as a message takes no longer than a chunk's forward or backward."""
    m, T = p * rounds, F + I + W
    c = Fraction(data.draw(st.integers(0, min(F, I + W))), v)
    trace = timed("interleaved-1f1b", p, m, v=v, F=F, I=I, W=W, c=c)
    assert_makespan(trace, m * T + Fraction((p - 1) * T, v) + 2 * (p * v - 1) * c)


@quick
@given(RANKS, st.integers(1, 4), st.integers(2, 4), SECONDS, SECONDS, SECONDS)
def test_grouped_interleaved_bubble(p, rounds, v, F, I, W):  # noqa: E741
    """(p - 1)(F + I) of a chunk, for m a multiple of p; arXiv:2503.01328."""
    m = p * rounds
    trace = timed("gis", p, m, v=v, F=F, I=I, W=W)
    assert trace.makespan_s == m * (F + I + W) + Fraction((p - 1) * (F + I), v)


@quick
@given(RANKS, st.integers(1, 4), st.integers(2, 4), SECONDS, SECONDS, SECONDS)
def test_interleaved_zero_bubble(p, rounds, v, F, I, W):  # noqa: E741
    """(p - 1)(F + I - W) of a chunk, for m a multiple of p and W <= F and I; arXiv:2401.10241."""
    m, W = p * rounds, min(W, F, I)
    trace = timed("interleaved-zb", p, m, v=v, F=F, I=I, W=W)
    assert trace.makespan_s == m * (F + I + W) + Fraction((p - 1) * (F + I - W), v)


PEAKS = {
    "interleaved-1f1b": lambda p, v, r: (v - 1) * p + 2 * (p - 1 - r) + 1,  # arXiv:2104.04473
    "interleaved-zb": lambda p, v, r: v * p,  # arXiv:2401.10241
    "gis": lambda p, v, r: (v - 1) * p + p - r,  # arXiv:2503.01328
}


@pytest.mark.parametrize("name", NAMES)
@quick
@given(RANKS, ROUNDS, st.integers(1, 4))
def test_peak_memory_of_interleaving(name, p, rounds, v):
    """In chunks, for m a multiple of p."""
    m = p * rounds
    assert peaks(built(name, p, m, v=v)) == [min(m * v, PEAKS[name](p, v, rank)) for rank in range(p)]


@pytest.mark.parametrize(("name", "plain"), [("interleaved-1f1b", "eager-1f1b"), ("interleaved-zb", "zb-h1")])
@quick
@given(RANKS, MICROBATCHES)
def test_with_one_chunk_nothing_is_interleaved(name, plain, p, m):
    assert built(name, p, m, v=1).orders == built(plain, p, m).orders


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
@quick
@given(RANKS, st.integers(1, 40), st.integers(1, 4))
def test_interleaving_is_valid_and_exact_for_any_number_of_chunks_and_microbatches(name, p, m, v):
    program = built(name, p, m, v=v)
    validate(program, exact=True)
    validate(lower(program))


def naive(name, p, m, v):
    """The same schedule with groups of p micro-batches and what is left as a shorter last group."""

    def groups(shape):
        p, m = shape.num_ranks, shape.num_microbatches
        return [min(p, m - first) for first in range(0, m, p)]

    with patch.object(Shape, "groups", groups):
        return built(name, p, m, v=v)


@pytest.mark.parametrize("name", NAMES)
def test_naive_groups_equal_ours_where_the_microbatches_fill_them(name):
    for p, m, v in [(2, 4, 2), (4, 8, 2), (3, 9, 3)]:
        assert naive(name, p, m, v) == built(name, p, m, v=v)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_interleaving_is_never_slower_than_naive_groups_at_equal_costs(name):
    for p in range(2, 9):
        for v in range(1, 5):
            for m in range(p + 1, 41, 7 - p % 3):
                assert_not_slower(name, p, m, v, Costs.uniform(p * v))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
@quick
@given(RANKS, st.integers(1, 40), CHUNKS, SECONDS, SECONDS, SECONDS)
def test_ragged_interleaving_is_never_slower_than_naive_groups(name, p, m, v, F, I, W):  # noqa: E741
    assert_not_slower(name, p, m, v, Costs.uniform(p * v, forward_s=F, input_grad_s=I, weight_grad_s=W))


def assert_not_slower(name, p, m, v, costs):
    try:
        other = simulate(naive(name, p, m, v), costs)
    except DeadlockError:
        return
    assert simulate(built(name, p, m, v=v), costs).makespan_s <= other.makespan_s


def test_naive_groups_deadlock_where_ours_run():
    with pytest.raises(DeadlockError):
        validate(naive("interleaved-1f1b", 8, 20, 2))
    validate(schedules.get("interleaved-1f1b").program(8, 20))


def test_ragged_interleaving_keeps_the_even_bubble_where_naive_groups_double_it():
    p, m, v, T = 4, 10, 2, 3
    ours = timed("interleaved-1f1b", p, m, v=v, F=1, I=1, W=1)
    other = simulate(naive("interleaved-1f1b", p, m, v), Costs.uniform(8).scaled(Fraction(1, v)))
    assert ours.makespan_s - m * T == 4.5
    assert other.makespan_s - m * T == 9.5


def test_four_microbatches_on_three_ranks_take_the_shortest_possible_time():
    """3 ranks, 2 chunks, 4 micro-batches, F = B = 1: no program with 6 chunks in flight is shorter than 20 (CP-SAT)."""
    costs = Costs.uniform(6, forward_s=1, input_grad_s=1, weight_grad_s=0)
    ours = simulate(built("interleaved-1f1b", 3, 4, v=2), costs)
    assert ours.makespan_s == 20
    assert simulate(naive("interleaved-1f1b", 3, 4, 2), costs).makespan_s == 24
