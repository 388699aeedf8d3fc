"""Every schedule against the closed forms, the figures and the tables of its paper.

F, I, W: the time of a forward, an input gradient and a weight gradient of one rank and micro-batch; a chunk takes
one v-th of it. T = F + I + W. c: the latency between two ranks. p ranks, m micro-batches, v chunks a rank.
"""

from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_programs import quick

from pipesched import Costs, Program, lower, schedules, simulate, validate
from pipesched.errors import DeadlockError, ScheduleError
from pipesched.holdings import peak_in_flight
from pipesched.order import Order, Shape, loop, schedule

GOLDEN = Path(__file__).parent / "golden"
RANKS, MICROBATCHES, SECONDS = st.integers(1, 8), st.integers(1, 24), st.integers(1, 9)


def timed(name, p, m, *, F, I, W, c=0, v=1):  # noqa: E741
    """Simulate a schedule with uniform costs."""
    plan = schedules.get(name)
    if "chunks_per_rank" in plan.options:
        plan = plan.with_options(chunks_per_rank=v)
    chunk = {"forward_s": Fraction(F, v), "input_grad_s": Fraction(I, v), "weight_grad_s": Fraction(W, v)}
    return simulate(plan.program(p, m), Costs.uniform(p * v, transfer_s=c, **chunk))


def assert_makespan(trace, expected):
    """The makespan is as expected, and no rank's own span is shorter than it: no gain without a barrier."""
    assert trace.makespan_s == expected
    assert trace.span_s == expected


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("p", range(1, 9))
def test_every_schedule_is_valid_and_exact_for_any_number_of_microbatches(name, p):
    for m in range(1, 41):
        program = schedules.get(name).program(p, m)
        validate(program, exact=True)
        validate(lower(program))
        assert (program.num_ranks, program.num_microbatches, program.name) == (p, m, name)


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_interleaving_is_valid_and_exact_for_any_number_of_chunks(chunks):
    for p in range(1, 6):
        for m in range(1, 13):
            program = schedules.get("interleaved-1f1b").program(p, m, chunks_per_rank=chunks)
            validate(program, exact=True)
            validate(lower(program))


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
@given(RANKS, MICROBATCHES, SECONDS, SECONDS, SECONDS)
def test_zb_h1_bubble(p, m, F, I, W):  # noqa: E741
    """(p - 1)(F + I - min(F, I, W)) for m >= p; arXiv:2401.10241 has F = I >= W."""
    assume(m >= p)
    trace = timed("zb-h1", p, m, F=F, I=I, W=W)
    assert trace.makespan_s == m * (F + I + W) + (p - 1) * (F + I - min(F, I, W))
    if W <= I:
        assert trace.span_s == trace.makespan_s


@st.composite
def times_with_short_weight_gradients(draw):
    """(F, I, W, c) with W <= F, W <= I and c <= W / 2."""
    W = draw(st.integers(1, 9))
    return draw(st.integers(W, 12)), draw(st.integers(W, 12)), W, draw(st.integers(0, W // 2))


@quick
@given(RANKS, MICROBATCHES, times_with_short_weight_gradients())
def test_zb_h1_bubble_with_latency(p, m, times):
    """(p - 1)(F + I - W + 4c) for m > p, and one round trip less for m = p."""
    assume(m >= p)
    F, I, W, c = times  # noqa: E741
    spared = 2 * c if m == p > 1 else 0
    assert_makespan(timed("zb-h1", p, m, F=F, I=I, W=W, c=c), m * (F + I + W) + (p - 1) * (F + I - W + 4 * c) - spared)


@quick
@given(st.integers(1, 8), st.integers(1, 8), times_with_short_weight_gradients())
def test_zb_h1_with_no_more_microbatches_than_ranks(p, m, times):
    """(m + p - 1)(F + I) + W, all weight gradients but one lie in the bubble."""
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
@given(RANKS, st.integers(0, 6), SECONDS, SECONDS, SECONDS)
def test_zb_h2_bubble(p, more, F, I, W):  # noqa: E741
    """No bubble from a rank's own start where F + I <= 2 min(F, W), for m >= 2p - 1; arXiv:2401.10241."""
    m = 2 * p - 1 + more
    trace = timed("zb-h2", p, m, F=F, I=I, W=W)
    assert trace.span_s == m * (F + I + W) + (p - 1) * max(0, F + I - 2 * min(F, W))
    if W <= F:
        assert trace.makespan_s == m * (F + I + W) + (p - 1) * max(F, F + I - 2 * W)


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


@quick
@given(RANKS, st.integers(0, 6), SECONDS, SECONDS, SECONDS)
def test_zb_v_bubble(p, more, F, I, W):  # noqa: E741
    """(p - 1)(I - W) from a rank's own start, for m >= 2p - 1 and W <= F <= I; arXiv:2401.10241."""
    m, (W, F, I) = 2 * p - 1 + more, sorted((F, I, W))  # noqa: E741
    trace = timed("zb-v", p, m, v=2, F=F, I=I, W=W)
    assert trace.span_s == m * (F + I + W) + (p - 1) * (I - W)
    assert trace.makespan_s == m * (F + I + W) + (p - 1) * max(Fraction(I, 2), I - W)


def test_a_v_has_two_chunks():
    with pytest.raises(ScheduleError, match="holds 2 stages on each rank; asked for 3; cut the model into 8 stages"):
        schedules.get("zb-v").program(4, 8, chunks_per_rank=3)


PEAKS = {
    "gpipe": lambda p, m, r: m,
    "1f1b": lambda p, m, r: min(m, p - r),
    "zb-h1": lambda p, m, r: min(m, p),
    "zb-h2": lambda p, m, r: min(m, 2 * p - 1),
    "looped-bfs": lambda p, m, r: 2 * m,
}


@pytest.mark.parametrize("name", PEAKS)
@quick
@given(RANKS, MICROBATCHES)
def test_peak_memory(name, p, m):
    orders = schedules.get(name).program(p, m).orders
    assert [peak_in_flight(order) for order in orders] == [PEAKS[name](p, m, rank) for rank in range(p)]


@quick
@given(RANKS, st.integers(1, 5), st.integers(1, 4))
def test_peak_memory_of_interleaving(p, rounds, v):
    """(v - 1)p + 2(p - 1 - r) + 1 chunks on rank r; arXiv:2104.04473."""
    m = p * rounds
    orders = schedules.get("interleaved-1f1b").program(p, m, chunks_per_rank=v).orders
    peaks = [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
    assert [peak_in_flight(order) for order in orders] == peaks


@pytest.mark.parametrize(
    ("name", "v", "makespan", "peaks"),
    [
        ("gpipe", 1, 33, [8, 8, 8, 8]),
        ("1f1b", 1, 33, [4, 3, 2, 1]),
        ("interleaved-1f1b", 2, 28.5, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved-1f1b", 4, 26.25, [4.75, 4.25, 3.75, 3.25]),
        ("zb-h1", 1, 27, [4, 4, 4, 4]),
        ("looped-bfs", 2, 28.5, [8, 8, 8, 8]),
        ("zb-h2", 1, 27, [7, 7, 7, 7]),
        ("gis", 2, 27, [4, 3.5, 3, 2.5]),
        ("interleaved-zb", 2, 25.5, [4, 4, 4, 4]),
        ("zb-v", 2, 25.5, [4, 4, 4, 4]),
    ],
)
def test_four_ranks_eight_microbatches_with_unit_costs(name, v, makespan, peaks):
    """Peaks in activations of one micro-batch on one rank: a chunk holds one v-th of it."""
    trace = timed(name, 4, 8, F=1, I=1, W=1, v=v)
    assert trace.makespan_s == makespan
    assert trace.span_s == {"zb-h2": 24, "zb-v": 24}.get(name, makespan)  # each rank counted from its own start
    assert [Fraction(peak, v) for peak in trace.peak_in_flight] == peaks


# Times in ms and bubble rates: tables of the profiled times and of the bubble rates in arXiv:2401.10241, 8 ranks.
ZERO_BUBBLE = [
    # model, m, F, I, W, c, 1F1B, ZB-H1
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    ("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    ("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
]


@pytest.mark.parametrize(("model", "m", "F", "I", "W", "c", "one_f_one_b", "zb_h1"), ZERO_BUBBLE)
def test_bubble_rates_of_the_zero_bubble_paper(model, m, F, I, W, c, one_f_one_b, zb_h1):  # noqa: E741
    costs = Costs.uniform(8, forward_s=F, input_grad_s=I, weight_grad_s=W, transfer_s=c)
    for name, rate in {"1f1b": one_f_one_b, "zb-h1": zb_h1}.items():
        trace = simulate(schedules.get(name).program(8, m), costs)
        assert round(1 - m * (F + I + W) / trace.span_s, 4) == rate


@schedule("naive-interleaved", placement=loop, chunks_per_rank=2)
def naive(rank: int, shape: Shape) -> Order:
    """Interleaving with groups of p micro-batches and a short last group."""
    order, chunks, p, m = Order(shape), shape.chunks(rank), shape.num_ranks, shape.num_microbatches
    sizes = [min(p, m - first) for first in range(0, m, p)]
    forwards = [chunk for size in sizes for chunk in chunks for _ in range(size)]
    backwards = [chunk for size in sizes for chunk in reversed(chunks) for _ in range(size)]
    warm_up = 2 * (p - 1 - rank) + (len(chunks) - 1) * p
    for chunk in forwards[:warm_up]:
        order.F(chunk)
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        if forward is not None:
            order.F(forward)
        order.B(backward)
    return order


def test_naive_groups_equal_ours_where_the_microbatches_fill_them():
    for p, m, v in [(2, 4, 2), (4, 8, 2), (3, 9, 3)]:
        assert naive.program(p, m, chunks_per_rank=v) == schedules.get("interleaved-1f1b").program(
            p, m, chunks_per_rank=v
        )


@quick
@given(RANKS, MICROBATCHES, st.integers(2, 4), SECONDS, SECONDS)
def test_uneven_interleaving_is_never_slower_than_naive_groups(p, m, v, F, B):
    assume(m % p)
    costs = Costs.uniform(p * v, forward_s=F, input_grad_s=B, weight_grad_s=0)
    try:
        other = simulate(naive.program(p, m, chunks_per_rank=v), costs)
    except DeadlockError:
        return
    ours = simulate(schedules.get("interleaved-1f1b").program(p, m, chunks_per_rank=v), costs)
    assert ours.makespan_s <= other.makespan_s


def test_naive_groups_deadlock_where_ours_run():
    with pytest.raises(DeadlockError):
        validate(naive.program(8, 20))
    validate(schedules.get("interleaved-1f1b").program(8, 20))


def test_uneven_interleaving_keeps_the_even_bubble_where_naive_groups_double_it():
    p, m, v, T = 4, 10, 2, 3
    ours = timed("interleaved-1f1b", p, m, v=v, F=1, I=1, W=1)
    other = simulate(naive.program(p, m), Costs.uniform(8).scaled(Fraction(1, v)))
    assert ours.makespan_s - m * T == 4.5
    assert other.makespan_s - m * T == 9.5


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
