"""Every schedule against the closed forms, the figures and the tables of its paper.

F, I, W: the time of a forward, an input gradient and a weight gradient of one rank and micro-batch; a chunk takes
one v-th of it. T = F + I + W. c: the latency between two ranks. p ranks, m micro-batches, v chunks a rank.
"""

from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipesched import Costs, Kind, Program, lower, schedules, simulate, validate
from pipesched.errors import ScheduleError
from tests.support.closed_forms import (
    MICROBATCHES,
    RANKS,
    SECONDS,
    assert_makespan,
    built,
    peaks,
    timed,
    times_with_short_weight_gradients,
)
from tests.support.random_programs import quick

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in schedules.names() if schedules.get(name).num_chains == 1])
@pytest.mark.parametrize("p", range(1, 9))
def test_every_schedule_is_valid_and_exact_for_any_number_of_microbatches(name, p):
    """Up to two rounds of the ranks, and far beyond.

    Two chains share their weights: they are not exact, and in test_bidirectional.py.
    """
    plan = schedules.get(name)
    for m in (*range(1, 2 * p + 2), 31, 40):
        program = plan.program(p, m)
        validate(program, exact=True)
        validate(lower(program))
        assert (program.num_ranks, program.num_microbatches, program.name) == (p, m, name)


@quick
@given(st.data())
def test_gpipe_bubble_with_unequal_stages(data):
    """sum F + sum B + (m - 1)(max F + max B) + 2(p - 1)c; arXiv:1811.06965 has the uniform case."""
    p, m, c = data.draw(RANKS), data.draw(MICROBATCHES), data.draw(st.integers(0, 20))
    F, I, W = (data.draw(st.lists(st.integers(0, 9), min_size=p, max_size=p)) for _ in range(3))  # noqa: E741
    B = [i + w for i, w in zip(I, W, strict=True)]
    trace = simulate(schedules.get("gpipe").program(p, m), Costs(F, I, W, transfer_s=c))
    assert_makespan(trace, sum(F) + sum(B) + (m - 1) * (max(F) + max(B)) + 2 * (p - 1) * c)


@quick
@given(RANKS, MICROBATCHES, SECONDS, SECONDS, SECONDS, st.integers(0, 40))
def test_1f1b_bubble_with_latency(p, m, F, I, W, c):  # noqa: E741
    """(m + p - 1)(F + B) + 2c[(p - 1) + (m - 1) - ceil((m - 1) / p)]: only p are in flight, so latency adds up."""
    latencies = 2 * ((p - 1) + (m - 1) - -(-(m - 1) // p))
    assert_makespan(timed("1f1b", p, m, F=F, I=I, W=W, c=c), (m + p - 1) * (F + I + W) + latencies * c)


@quick
@given(RANKS, MICROBATCHES, SECONDS, SECONDS, SECONDS)
def test_1f1b_bubble_ratio(p, m, F, I, W):  # noqa: E741
    """(p - 1) / (m + p - 1); arXiv:2104.04473."""
    assert timed("1f1b", p, m, F=F, I=I, W=W).bubble_ratio == Fraction(p - 1, m + p - 1)


@quick
@given(RANKS, MICROBATCHES, SECONDS, SECONDS, SECONDS, st.data())
def test_eager_1f1b_hides_messages(p, m, F, I, W, data):  # noqa: E741
    """(m + p - 1)(F + B) + 2(p - 1)c for c <= (F + B) / 2; arXiv:2211.05322."""
    c = Fraction(data.draw(st.integers(0, F + I + W)), 2)
    assert_makespan(timed("eager-1f1b", p, m, F=F, I=I, W=W, c=c), (m + p - 1) * (F + I + W) + 2 * (p - 1) * c)


@quick
@given(RANKS, MICROBATCHES, SECONDS, SECONDS, SECONDS)
def test_zb_h1_bubble(p, m, F, I, W):  # noqa: E741
    """(p - 1)(F + I - min(F, I, W)) for m >= p; arXiv:2401.10241 has F = I >= W."""
    assume(m >= p)
    trace = timed("zb-h1", p, m, F=F, I=I, W=W)
    assert trace.makespan_s == m * (F + I + W) + (p - 1) * (F + I - min(F, I, W))
    if W <= I:
        assert trace.span_s == trace.makespan_s


@quick
@given(RANKS, MICROBATCHES, times_with_short_weight_gradients())
def test_zb_h1_bubble_with_latency(p, m, times):
    """(p - 1)(F + I - W + 4c) for m > p, and one round trip less for m = p."""
    assume(m >= p)
    F, I, W, c = times  # noqa: E741
    spared = 2 * c if m == p > 1 else 0
    assert_makespan(timed("zb-h1", p, m, F=F, I=I, W=W, c=c), m * (F + I + W) + (p - 1) * (F + I - W + 4 * c) - spared)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb"])
@quick
@given(RANKS, RANKS, times_with_short_weight_gradients())
def test_zero_bubble_with_no_more_microbatches_than_ranks(name, p, m, times):
    """(m + p - 1)(F + I) + W, all weight gradients but one lie in the bubble."""
    assume(m <= p)
    F, I, W, _ = times  # noqa: E741
    assert_makespan(timed(name, p, m, F=F, I=I, W=W), (m + p - 1) * (F + I) + W)


@quick
@given(RANKS, RANKS, times_with_short_weight_gradients())
def test_zb_h1_with_no_more_microbatches_than_ranks_and_latency(p, m, times):
    """(m + p - 1)(F + I) + W and 2(p + m - 3)c more, for m >= 2."""
    assume(m <= p)
    F, I, W, c = times  # noqa: E741
    latencies = 2 * (p - 1 + max(0, m - 2))
    assert_makespan(timed("zb-h1", p, m, F=F, I=I, W=W, c=c), (m + p - 1) * (F + I) + W + latencies * c)


@quick
@given(RANKS, st.integers(0, 6), st.integers(2, 4), SECONDS, SECONDS, SECONDS)
def test_looped_bfs_bubble(p, more, v, F, I, W):  # noqa: E741
    """(p - 1) times a chunk's work, for m >= p; arXiv:2211.05953."""
    m = p + more
    trace = timed("looped-bfs", p, m, v=v, F=F, I=I, W=W)
    assert_makespan(trace, m * (F + I + W) + Fraction((p - 1) * (F + I + W), v))


@quick
@given(st.integers(2, 6), st.integers(0, 5), st.integers(2, 4), SECONDS, SECONDS, SECONDS, st.data())
def test_looped_bfs_bubble_with_latency(p, more, v, F, I, W, data):  # noqa: E741
    """2(p - 1)c more for m >= 2p, where the next chunk's micro-batches are there in time; 2(pv - 1)c for m = p."""
    T = F + I + W
    c = Fraction(data.draw(st.integers(0, min(F, I + W))), v)
    for m, latencies in (2 * p + more, 2 * (p - 1)), (p, 2 * (p * v - 1)):
        trace = timed("looped-bfs", p, m, v=v, F=F, I=I, W=W, c=c)
        assert_makespan(trace, m * T + Fraction((p - 1) * T, v) + latencies * c)


@quick
@given(RANKS, st.integers(0, 6), SECONDS, SECONDS, SECONDS)
def test_zb_h2_bubble(p, more, F, I, W):  # noqa: E741
    """No bubble from a rank's own start where F + I <= 2 min(F, W), for m >= 2p - 1; arXiv:2401.10241."""
    m = 2 * p - 1 + more
    trace = timed("zb-h2", p, m, F=F, I=I, W=W)
    assert trace.span_s == m * (F + I + W) + (p - 1) * max(0, F + I - 2 * min(F, W))
    if W <= F:
        assert trace.makespan_s == m * (F + I + W) + (p - 1) * max(F, F + I - 2 * W)


@quick
@given(RANKS, st.integers(0, 6), times_with_short_weight_gradients())
def test_zb_h2_bubble_with_latency(p, more, times):
    """(p - 1) max(0, F + I - 2W + 2c) from a rank's own start, for m >= 2p - 1."""
    (F, I, W, c), m = times, 2 * p - 1 + more  # noqa: E741
    trace = timed("zb-h2", p, m, F=F, I=I, W=W, c=c)
    assert trace.span_s == m * (F + I + W) + (p - 1) * max(0, F + I - 2 * W + 2 * c)


@quick
@given(RANKS, st.integers(0, 6), SECONDS, SECONDS, SECONDS)
def test_zb_v_bubble(p, more, F, I, W):  # noqa: E741
    """(p - 1)(I - W) from a rank's own start, for m >= 2p - 1 and W <= F <= I; arXiv:2401.10241."""
    m, (W, F, I) = 2 * p - 1 + more, sorted((F, I, W))  # noqa: E741
    trace = timed("zb-v", p, m, v=2, F=F, I=I, W=W)
    assert trace.span_s == m * (F + I + W) + (p - 1) * (I - W)
    assert trace.makespan_s == m * (F + I + W) + (p - 1) * max(Fraction(I, 2), I - W)


@quick
@given(st.integers(2, 8), st.integers(0, 6), SECONDS, SECONDS, SECONDS, st.data())
def test_zb_v_bubble_with_latency(p, more, F, I, W, data):  # noqa: E741
    """(p - 1)(I - W) + (6p - 8)c from a rank's own start, for m >= 2p - 1, W <= F <= I and c <= W / 4."""
    m, (W, F, I) = 2 * p - 1 + more, sorted((F, I, W))  # noqa: E741
    c = Fraction(data.draw(st.integers(0, W)), 4)
    trace = timed("zb-v", p, m, v=2, F=F, I=I, W=W, c=c)
    assert trace.span_s == m * (F + I + W) + (p - 1) * (I - W) + (6 * p - 8) * c


def test_a_v_has_two_chunks():
    match = "needs 2 stages on each rank; got chunks_per_rank=3; cut the model into 8 stages"
    with pytest.raises(ScheduleError, match=match):
        schedules.get("zb-v").program(4, 8, chunks_per_rank=3)


PEAKS = {
    "gpipe": lambda p, m, r: m,
    "1f1b": lambda p, m, r: min(m, p - r),
    "eager-1f1b": lambda p, m, r: min(m, 2 * (p - 1 - r) + 1),
    "zb-h1": lambda p, m, r: min(m, p),
    "zb-h2": lambda p, m, r: min(m, 2 * p - 1),
    "looped-bfs": lambda p, m, r: 2 * m,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PEAKS)
@quick
@given(RANKS, MICROBATCHES)
def test_peak_memory(name, p, m):
    assert peaks(built(name, p, m, v=2)) == [PEAKS[name](p, m, rank) for rank in range(p)]


@quick
@given(RANKS, st.integers(0, 12))
def test_peak_memory_of_zb_v(p, more):
    """p micro-batches of two chunks on every rank, for m >= 2p - 1; arXiv:2401.10241."""
    assert peaks(built("zb-v", p, 2 * p - 1 + more, v=2)) == [2 * p] * p


def most_bytes(order, activations, weight_gradients):
    """The most that a rank holds between two actions: so much from F to I, and so much from I to W."""
    change = {Kind.F: activations, Kind.I: weight_gradients - activations, Kind.W: -weight_gradients}
    return max(accumulate(change[action.kind] for action in order))


@quick
@given(RANKS, st.integers(0, 6), SECONDS, st.data())
def test_peak_memory_of_zero_bubble_where_weight_gradients_need_less(p, more, M, data):
    """Rank r of ZB-H1 holds (p - r)M + rN, of ZB-H2 (2p - 2r - 1)M + 2rN; arXiv:2401.10241."""
    m, N = 2 * p - 1 + more, data.draw(st.integers(0, M))
    one, two = ([most_bytes(order, M, N) for order in built(name, p, m).orders] for name in ("zb-h1", "zb-h2"))
    assert one == [(p - r) * M + r * N for r in range(p)]
    assert two == [(2 * p - 2 * r - 1) * M + 2 * r * N for r in range(p)]


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_golden_programs(name):
    text = (GOLDEN / f"{name}.txt").read_text()
    program = schedules.get(name).program(4, 8)
    assert str(program) == text
    assert Program.parse(text) == program


def picture(plan):
    """The orders that a schedule's docstring draws, without stages: a list of "F0"-like texts a rank."""
    lines = [line for line in plan.description.splitlines() if line.startswith("rank ")]
    return [line.split("|")[1].split() for line in lines]


@pytest.mark.parametrize("name", [name for name in schedules.names() if picture(schedules.get(name))])
def test_the_docstring_draws_the_program(name):
    drawn = picture(schedules.get(name))
    num_microbatches = sum(action.startswith("F") for action in drawn[0])
    program = schedules.get(name).program(len(drawn), num_microbatches)
    assert [[f"{a.kind}{a.microbatch}" for a in order] for order in program.orders] == drawn
