"""Schedules that are generated: V-Half and V-Min from a building block, ZB-auto from costs.

p ranks, m micro-batches; F, I, W: the time of a forward, an input gradient and a weight gradient of one stage.
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Costs, Kind, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.order import Shape, linear, schedule
from pipesched.program.generators.building_blocks import repeated
from tests.support.random_programs import quick

SIZES = [*range(2, 9), 12, 16]


def bubble_and_peak(name, p, m):
    """The bubble in chunk times, and the most chunks held, with unit times."""
    trace = simulate(schedules.get(name).program(p, m), Costs.uniform(2 * p))
    return trace.makespan_s - 6 * m, max(trace.peak_in_flight)


@pytest.mark.parametrize("p", SIZES)
def test_v_half_has_the_bubble_and_the_peak_of_its_paper(p):
    """3p - 7 for even p, 3p - 4 for odd p; floor((p + 2) / 2) micro-batches; arXiv:2405.15362."""
    bubble = 1 if p == 2 else 3 * p - (4 if p % 2 else 7)
    for m in sorted({p, p + 1, p + 2, 2 * p + 1, 3 * p}):
        assert bubble_and_peak("v-half", p, m) == (bubble, 2 * ((p + 2) // 2))


@pytest.mark.parametrize("p", SIZES)
def test_v_min_has_the_bubble_and_the_peak_of_its_paper(p):
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
    with pytest.raises(ScheduleError, match="max_in_flight=1, 17 actions wait for each other; change the slots"):
        repeated(shape, {0: (1, 3), 1: (2, 0)}, interval=4, max_in_flight=1, early_forwards=False)
    with pytest.raises(ScheduleError, match="or raise max_in_flight"):
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
        with pytest.raises(ScheduleError, match="needs 2 stages on each rank; got chunks_per_rank=3"):
            schedules.get(name).program(4, 8, chunks_per_rank=3)


# Times in ms and bubble rates: tables of the profiled times and of the bubble rates in arXiv:2401.10241, 8 ranks.
# Between I and W a micro-batch holds 32 / (34 + 5as/h) of its activations: a heads, hidden size h, s = 1024 tokens.
SHARE = {"1.5B": Fraction(32) / (34 + Fraction(5 * 24 * 1024, 2304)), "6.2B": Fraction(32, 34 + 5 * 32 * 1024 // 4096)}
ZERO_BUBBLE = [
    # model, m, F, I, W, c, ZB-1p, ZB-2p
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    ("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    ("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
]


@pytest.mark.parametrize(("model", "m", "F", "I", "W", "c", "zb_1p", "zb_2p"), ZERO_BUBBLE)
def test_bubble_rates_of_the_zero_bubble_paper(model, m, F, I, W, c, zb_1p, zb_2p):  # noqa: E741
    """ZB-1p to four digits; ZB-2p equal, or better by 0.0005 at most."""
    costs = Costs.uniform(8, forward_s=F, input_grad_s=I, weight_grad_s=W, transfer_s=c)

    def rate(max_in_flight, share):
        options = {"costs": costs, "max_in_flight": max_in_flight, "weight_grad_share": share}
        trace = simulate(schedules.get("zb-auto").program(8, m, **options), costs)
        return round(1 - m * (F + I + W) / trace.span_s, 4)

    assert rate(8, 1) == rate(8, SHARE[model]) == zb_1p
    assert zb_2p - 0.0005 <= rate(16, SHARE[model]) <= zb_2p


@pytest.mark.parametrize(("model", "m", "F", "I", "W", "c", "zb_1p", "zb_2p"), ZERO_BUBBLE)
def test_whole_micro_batches_until_w_ends_need_more_time_than_the_paper(model, m, F, I, W, c, zb_1p, zb_2p):  # noqa: E741
    """The last rank can owe 2p weight gradients, not all m: m - 2p of them delay its last input gradient."""
    costs = Costs.uniform(8, forward_s=F, input_grad_s=I, weight_grad_s=W, transfer_s=c)
    trace = simulate(schedules.get("zb-auto").program(8, m, costs=costs, max_in_flight=16), costs)
    bound = 7 * (F + I + 2 * c) + m * (F + I) + (m - 16) * W + W
    assert trace.span_s == pytest.approx(bound, rel=1e-3)


@st.composite
def pipelines(draw, max_ranks=7, max_microbatches=14):
    """(p, m, costs): any times, a different one on each stage."""
    p, m = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    F, I, W = (draw(st.lists(st.integers(0, 12), min_size=p, max_size=p)) for _ in range(3))  # noqa: E741
    return p, m, Costs(F, I, W, transfer_s=draw(st.integers(0, 4)))


@quick
@given(pipelines(), st.integers(1, 16))
def test_zb_auto_stays_within_its_memory(pipeline, max_in_flight):
    p, m, costs = pipeline
    program = schedules.get("zb-auto").program(p, m, costs=costs, max_in_flight=max_in_flight)
    validate(program, max_in_flight=max_in_flight, exact=True)


@quick
@given(pipelines(), st.integers(1, 9), st.fractions(0, 1, max_denominator=7))
def test_zb_auto_counts_a_share_between_i_and_w(pipeline, max_in_flight, share):
    p, m, costs = pipeline
    options = {"costs": costs, "max_in_flight": max_in_flight, "weight_grad_share": share}
    program = schedules.get("zb-auto").program(p, m, **options)
    validate(program, exact=True)
    change = {Kind.F: 1, Kind.I: share - 1, Kind.W: -share}
    for order in program.orders:
        held = 0
        for action in order:
            held += change[action.kind]
            assert held <= max_in_flight


@quick
@given(pipelines())
def test_zb_auto_is_never_slower_than_zb_h1_in_its_memory(pipeline):
    p, m, costs = pipeline
    ours = simulate(schedules.get("zb-auto").program(p, m, costs=costs), costs)
    assert ours.span_s <= simulate(schedules.get("zb-h1").program(p, m), costs).span_s
    assert max(ours.peak_in_flight) <= p


def test_zb_auto_is_faster_than_zb_h1_where_stages_differ():
    costs = Costs((1, 2, 4), (1, 1, 1), (1, 3, 2))
    assert simulate(schedules.get("zb-auto").program(3, 6, costs=costs), costs).span_s == 42
    assert simulate(schedules.get("zb-h1").program(3, 6), costs).span_s == 45


def test_one_micro_batch_in_flight_is_a_serial_schedule():
    trace = simulate(schedules.get("zb-auto").program(3, 4, max_in_flight=1), Costs.uniform(3))
    assert trace.peak_in_flight == (1, 1, 1)
    assert trace.makespan_s == 4 * (3 + 3 + 1)  # rank 0 runs W before the next F; the others' W are hidden


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": Costs.uniform(3)}, "there are 4 stages, but the costs have 3; pass costs for 4 stages"),
        ({"max_in_flight": 0}, "a whole number, at least 1; got 0"),
        ({"max_in_flight": 2.5}, "a whole number, at least 1; got 2.5"),
        ({"weight_grad_share": 1.5}, "0 to 1; got 1.5"),
        ({"weight_grad_share": "1"}, "0 to 1; got '1'"),
        ({"costs": {"forward_s": [1]}}, "costs= must be a pipesched.Costs"),
    ],
)
def test_wrong_options_of_zb_auto(options, message):
    with pytest.raises(ScheduleError, match=message):
        schedules.get("zb-auto").program(4, 8, **options)
