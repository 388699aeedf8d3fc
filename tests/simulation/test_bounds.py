"""No program is faster than the bound, and many are as fast."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipesched import Costs, Kind, lower_bound, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_recompute
from pipesched.program.placement import loop, v
from pipesched.program.validation import peak_in_flight
from pipesched.simulation.bounds import program_bound
from tests.support.call_count import calls
from tests.support.random_programs import costs_for, programs, quick

thorough = settings(quick, max_examples=120)
RANKS, MICROBATCHES, SECONDS = st.integers(1, 8), st.integers(1, 24), st.integers(0, 9)


def is_whole(program):
    return not any(action.kind is Kind.I for order in program.orders for action in order)


def bounds_of(program, costs):
    """Every bound that the program must keep: without a limit, within its own peaks, and whole where it is whole."""
    peaks = [peak_in_flight(order) for order in program.orders]
    for limit in (None, peaks, max(peaks)):
        for split in {True, not is_whole(program)}:
            yield lower_bound(
                costs,
                program.num_microbatches,
                placement=program.placement,
                max_in_flight=limit,
                split=split,
                effort=0,
            )


@st.composite
def any_costs(draw, num_stages, *, uniform=False):
    """Whole numbers, zeros among them; the whole backward may be shorter or longer than both halves."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    times = [[rng.randint(0, 9) for _ in range(num_stages)] for _ in range(4)]
    if uniform:
        times = [[values[0]] * num_stages for values in times]
    return Costs(*times[: draw(st.integers(3, 4))], transfer_s=draw(st.integers(0, 12)))


@thorough
@given(st.data())
def test_no_random_program_is_faster(data):
    program = data.draw(programs(max_stages=5, max_microbatches=5))
    assume(program.is_chain and not program.forward_only)
    costs = data.draw(st.one_of(costs_for(program), any_costs(program.num_stages)))
    makespan = simulate(program, costs).makespan_s
    assert max(bounds_of(program, costs)) <= makespan
    recomputed = add_recompute(program, "always")
    assert program_bound(recomputed, costs) <= simulate(recomputed, costs).makespan_s


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in schedules.names() if schedules.get(name).num_chains == 1])
@settings(quick, max_examples=25)
@given(st.data())
def test_no_schedule_is_faster(name, data):
    program = schedules.get(name).program(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12)))
    costs = data.draw(any_costs(program.num_stages, uniform=data.draw(st.booleans())))
    assert max(bounds_of(program, costs)) <= simulate(program, costs).makespan_s


def uniform_bound(name, p, m, costs, **options):
    program = schedules.get(name).program(p, m)
    bound = lower_bound(costs, m, placement=program.placement, effort=0, **options)
    return bound, simulate(program, costs).makespan_s


@quick
@given(RANKS, MICROBATCHES, SECONDS, SECONDS, st.integers(0, 20))
def test_gpipe_is_the_best_of_whole_backwards_with_uniform_costs(p, m, F, B, c):
    costs = Costs.uniform(p, forward_s=F, input_grad_s=B, weight_grad_s=0, transfer_s=c)
    bound, makespan = uniform_bound("gpipe", p, m, costs, split=False)
    assert bound == makespan == (m + p - 1) * (F + B) + 2 * (p - 1) * c


@quick
@given(RANKS, MICROBATCHES, SECONDS, SECONDS)
def test_1f1b_is_the_best_of_whole_backwards_with_uniform_costs(p, m, F, B):
    costs = Costs.uniform(p, forward_s=F, input_grad_s=B, weight_grad_s=0)
    bound, makespan = uniform_bound("1f1b", p, m, costs, split=False)
    assert bound == makespan


@quick
@given(RANKS, st.integers(1, 4), SECONDS, SECONDS)
def test_interleaving_is_the_best_for_its_placement(p, rounds, F, B):
    """Whole backwards, uniform costs, no latency, m a multiple of p."""
    costs = Costs.uniform(2 * p, forward_s=F, input_grad_s=B, weight_grad_s=0)
    for name in ("interleaved-1f1b", "looped-bfs"):
        bound, makespan = uniform_bound(name, p, p * rounds, costs, split=False)
        assert bound == makespan


@quick
@given(RANKS, st.integers(0, 6), st.integers(1, 9), st.integers(0, 9))
def test_zb_h2_is_the_best_with_uniform_costs(p, more, W, I):  # noqa: E741
    """m >= 2p - 1, no latency, W <= F and I <= 2W: the bubble is the way down the chain, (p-1)F."""
    m, F = 2 * p - 1 + more, max(W, I - W)
    assume(F + I - 2 * W <= F)
    bound, makespan = uniform_bound("zb-h2", p, m, Costs.uniform(p, forward_s=F, input_grad_s=I, weight_grad_s=W))
    assert bound == makespan == m * (F + I + W) + (p - 1) * F


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "interleaved-zb"])
def test_the_zero_bubble_schedules_are_the_best_with_equal_times(name):
    p, m = 4, 8
    stages = schedules.get(name).program(p, m).num_stages
    bound, makespan = uniform_bound(name, p, m, Costs.uniform(stages))
    assert bound == makespan


# What a solver (CP-SAT) proved to be the best, first in, first out on every stage: p, m, (F, I, W, c), limit, makespan.
OPTIMA = [
    (4, 8, (2, 2, 1, 0), 4, 49),
    (8, 16, (2, 2, 1, 0), 8, 101),
    (8, 24, (185, 181, 93, 6), 8, 13095),
    (8, 24, (185, 181, 93, 6), 16, 12360),  # found, not proved
    (4, 16, (185, 181, 93, 6), 4, 8235),  # found, not proved
]


@pytest.mark.parametrize(("p", "m", "times", "limit", "optimum"), OPTIMA)
def test_proved_optima_keep_the_bound_and_no_schedule_beats_them(p, m, times, limit, optimum):
    F, I, W, c = times  # noqa: E741
    costs = Costs.uniform(p, forward_s=F, input_grad_s=I, weight_grad_s=W, transfer_s=c)
    bound = lower_bound(costs, m, max_in_flight=limit, effort=0)
    assert 0.9 * optimum < bound <= optimum
    within = {}
    for name in schedules.names():
        program = schedules.get(name).program(p, m)
        if program.placement == tuple(range(p)) and max(map(peak_in_flight, program.orders)) <= limit:
            within[name] = simulate(program, costs).makespan_s
    assert min(within.values()) >= optimum
    if limit == p:
        assert within["zb-h1"] == optimum


@pytest.mark.parametrize(("limit", "optimum", "bound"), [(8, 51, 51), (6, 53, 53), (5, 56, 54), (4, 59, 55)])
def test_proved_optima_on_a_v(limit, optimum, bound):
    """4 ranks, 8 micro-batches, unit costs a chunk: ZB-V, V-Half, what lies between, V-Min."""
    assert lower_bound(Costs.uniform(8), 8, placement=v(4, 2), max_in_flight=limit, effort=0) == bound <= optimum
    program = schedules.get("zb-v").program(4, 8)
    assert (max(map(peak_in_flight, program.orders)), simulate(program, Costs.uniform(8)).makespan_s) == (8, 51)


def test_proved_optimum_on_a_loop():
    costs = Costs.uniform(6, weight_grad_s=0)
    assert lower_bound(costs, 4, placement=loop(3, 2), max_in_flight=6, split=False) == 20


def test_each_way_of_the_bound_by_hand():
    one = Costs((2,), (3,), (4,), (5,))  # the whole backward is shorter than both halves
    assert lower_bound(one, 3) == lower_bound(one, 3, split=False) == 3 * (2 + 5)
    assert lower_bound(Costs((2,), (3,), (4,), (9,)), 3) == 3 * (2 + 3 + 4)
    two = Costs((1, 10), (1, 1), (5, 1), transfer_s=2)
    assert lower_bound(two, 1) == 1 + 2 + 10 + 1 + 2 + 1 + 5  # one micro-batch there and back
    assert lower_bound(two, 1, placement=(0, 0)) == 1 + 10 + 1 + 1 + 5 + 1  # one rank: all its work, no latency
    assert lower_bound(two, 4) == 1 + 2 + 4 * (10 + 1) + 2 + 1 + 5  # the second rank waits; its W lie in the way back
    # One at a time: 4 lives of 1 + 2 + 10 + 1 + 2 + 6.
    assert lower_bound(two, 4, max_in_flight=1) == lower_bound(two, 4, max_in_flight=[1, 4]) == 4 * 22


def test_numbers_stay_exact():
    costs = Costs.uniform(4, forward_s=Fraction(1, 3), input_grad_s=Fraction(1, 3), weight_grad_s=Fraction(1, 3))
    assert lower_bound(costs, 8) == 9
    assert isinstance(lower_bound(Costs.uniform(3), 4), int)
    assert lower_bound(Costs.uniform(2, forward_s=0.1, input_grad_s=0, weight_grad_s=0), 1) == pytest.approx(0.2)
    assert lower_bound(Costs.uniform(2, forward_s=0, input_grad_s=0, weight_grad_s=0), 5) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((0,), {}, "num_microbatches must be a whole number, at least 1; got 0"),
        ((1.5,), {}, "at least 1; got 1.5"),
        ((2,), {"effort": -1}, "effort must be a whole number, at least 0; got -1; pass 0 or more"),
        ((2,), {"placement": (0, 1)}, "the costs are for 3 stages, the placement is for 2 stages; make"),
        (
            (2,),
            {"max_in_flight": [1, 1]},
            "got a list of 2 numbers for 3 ranks; pass one number, or a list of 3 numbers",
        ),
        ((2,), {"max_in_flight": 1.5}, "got 1.5; pass whole numbers"),
        ((2,), {"max_in_flight": 0}, "rank 0 has 1 stage, but max_in_flight allows 0"),
        ((2,), {"placement": (0, 1, 0), "max_in_flight": 1}, "rank 0 has 2 stages, but max_in_flight allows 1"),
    ],
)
def test_what_does_not_fit_is_an_error(arguments, options, said):
    with pytest.raises(ScheduleError, match=said):
        lower_bound(Costs.uniform(3), *arguments, **options)


@quick
@given(st.data())
def test_no_program_over_any_graph_is_below_its_bound(data):
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    bound = program_bound(program, costs)
    if program.forward_only:
        assert bound is None
    else:
        assert bound <= simulate(program, costs).makespan_s


@quick
@given(st.sampled_from(["chimera", "dualpipe", "dualpipe-v"]), st.integers(1, 4), st.integers(1, 12), st.data())
def test_no_schedule_of_two_directions_is_below_its_bound(name, half, m, data):
    program = schedules.get(name).program(2 * half, m)
    costs = data.draw(costs_for(program, overlap=data.draw(st.sampled_from([1, Fraction(1, 2), Fraction(4, 5)]))))
    trace = simulate(program, costs)
    assert 0 < trace.bound_s <= trace.makespan_s or trace.makespan_s == 0 or trace.bound_s == 0


def test_two_directions_are_shown_beside_their_bound():
    """Every rank works all the time but for the way to its first forward."""
    costs = Costs.uniform(8, input_grad_s=1, weight_grad_s=1)
    assert simulate(schedules.get("chimera").program(4, 8), costs).bound_s == 25


def test_evaluation_has_no_bound():
    program = schedules.get("1f1b").program(3, 4)
    assert program_bound(program, Costs.uniform(3)) == 14
    assert program_bound(program.forward(), Costs.uniform(3)) is None


def test_the_gap_is_a_share_of_the_bound():
    program, costs = schedules.get("1f1b").program(4, 8), Costs.uniform(4)
    trace = simulate(program, costs)
    assert (trace.bound_s, trace.above_bound) == (27, pytest.approx(6 / 27))
    assert replace(trace, bound_s=33.000000000000004).above_bound == 0
    assert simulate(program, costs.scaled(0)).above_bound == 0
    assert simulate(program.forward(), costs).above_bound is None


def test_it_is_quick_where_there_are_many_stages():
    costs = Costs.uniform(2048)
    made = calls(lambda: lower_bound(costs, 512, placement=loop(256, 8), max_in_flight=2304, effort=0))
    assert made.total() < 200 * costs.num_stages
