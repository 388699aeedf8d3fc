"""The search for orders: its evaluation, its limits, its results against proven optima."""

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Costs, Program, schedules, simulate, validate
from pipesched.errors import MemoryLimitError, ScheduleError
from pipesched.program.search.bound import lower_bound, ranks_that_must_fuse
from pipesched.program.search.compiled import whole
from pipesched.program.search.list_orders import CHOICES, FUSED, rules
from pipesched.program.search.problem import OrderProblem, Resource
from pipesched.program.search.rule_search import RuleSearch
from pipesched.program.search.search import search
from pipesched.simulation.links import Link, Links
from tests.support.random_programs import quick

OPTIMA = json.loads((Path(__file__).parents[2] / "benchmarks" / "optima.json").read_text())["instances"]
QUICK = Fraction(1, 400)
SEARCHED = schedules.get("searched")
SEVEN = Costs((4, 2, 6), (5, 1, 3), (2, 2, 4), (6, 3, 6), transfer_s=1)


def costs_of(instance):
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s", "transfer_s")
    return Costs(**{name: instance[name] for name in names})


def solved(instance, effort=1):
    options = {"costs": costs_of(instance), "placement": instance["placement"]}
    schedule = SEARCHED.with_options(**options, max_in_flight=instance["max_in_flight"], effort=effort)
    program = schedule.program(instance["num_ranks"], instance["num_microbatches"])
    validate(program, exact=True, max_in_flight=instance["max_in_flight"])
    return simulate(program, costs_of(instance)).makespan_s


@pytest.mark.parametrize("number", range(0, len(OPTIMA), 23))
def test_small_problems_are_solved_to_the_proven_optimum(number):
    instance = OPTIMA[number]
    assert solved(instance, Fraction(1, 120)) == (instance["exact_optimum_s"] or instance["optimum_s"])


def test_a_tight_limit_costs_a_quarter_less_than_with_zb_auto():
    costs = Costs((25, 23, 15), (28, 27, 15), (22, 16, 11), (50, 42, 24), transfer_s=1)
    program = SEARCHED.program(3, 8, costs=costs, max_in_flight=2, effort=Fraction(1, 120))
    assert simulate(schedules.get("zb-auto").program(3, 8, costs=costs, max_in_flight=2), costs).makespan_s == 971
    assert simulate(program, costs).makespan_s == 728  # proven optimal


@st.composite
def problems(draw):
    """Placement, micro-batches and costs of a small problem."""
    stages = draw(st.integers(1, 5))
    ranks = draw(st.integers(1, stages))
    free = draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))
    placement = draw(st.permutations([*range(ranks), *free]))
    row = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    forward, inputs, weights = draw(row), draw(row), draw(row)
    saved = [min(draw(st.integers(0, 2)), i + w) for i, w in zip(inputs, weights, strict=True)]
    whole = [i + w - s for i, w, s in zip(inputs, weights, saved, strict=True)]
    sizes = [draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages)) for _ in range(2)]
    costs = Costs(
        forward,
        inputs,
        weights,
        whole,
        transfer_s=draw(st.integers(0, 3)),
        activation_bytes=sizes[0],
        weight_grad_bytes=sizes[1],
    )
    return tuple(placement), draw(st.integers(1, 4)), costs


@quick
@given(problems())
def test_the_search_keeps_its_promises(problem):
    """Valid, exact, within the limits, the same for equal inputs, and as fast in simulation as in the search."""
    placement, microbatches, costs = problem
    ranks = max(placement) + 1
    limit = max(map(placement.count, placement)) + 1
    sizes = zip(costs.activation_bytes, costs.weight_grad_bytes, placement, strict=True)
    room = [0] * ranks
    for activations, weight_grads, rank in sizes:
        room[rank] += activations + weight_grads
    schedule = SEARCHED.with_options(
        costs=costs, placement=placement, max_in_flight=limit, memory_limit_bytes=room, effort=QUICK, starts=()
    )
    program = schedule.program(ranks, microbatches)
    validate(program, max_in_flight=limit, exact=True)
    trace = simulate(program, costs)
    assert all(peak <= own for peak, own in zip(trace.peak_bytes, room, strict=True))
    assert program == schedule.program(ranks, microbatches)
    assert makespan(program, costs) == trace.makespan_s


def makespan(program, costs):
    """The makespan as the search evaluates it, in seconds."""
    from pipesched.program.generators import searched_orders as orders
    from pipesched.program.order import Shape

    shape = Shape(program.num_ranks, program.num_microbatches, 1, program.placement)
    problem = orders._problem(shape, [costs] * program.num_microbatches, [])
    longest = max((*costs.forward_s, *costs.input_grad_s, *costs.weight_grad_s, *costs.backward_s, costs.transfer_s))
    found = search(problem, [orders._codes(program)], steps=0, lists=0)
    return found.makespan * (Fraction(longest) / max_time(problem) if longest else 0)


def max_time(problem):
    tables = (*problem.times, problem.forward_lags, problem.backward_lags)
    return max((number for table in tables for row in table for number in row), default=1) or 1


@quick
@given(problems(), st.sampled_from(("1f1b", "zb-h1", "gpipe", "zb-auto")))
def test_no_known_schedule_is_faster(problem, name):
    _, microbatches, costs = problem
    other = schedules.get(name).program(costs.num_stages, microbatches)
    program = SEARCHED.program(costs.num_stages, microbatches, costs=costs, effort=0)
    assert simulate(program, costs).makespan_s <= simulate(other, costs).makespan_s


def test_a_known_schedule_wins_a_tie():
    program = SEARCHED.program(4, 8)
    assert program.orders == schedules.get("zb-h1").program(4, 8).orders


def test_the_program_is_the_same_on_every_machine():
    """Compiled or not."""
    costs = Costs((6, 3, 2, 9), (8, 6, 3, 8), (8, 1, 1, 4), (16, 7, 4, 12))
    options = {"placement": (0, 1, 0, 1), "max_in_flight": 4, "effort": Fraction(1, 120), "starts": ()}
    program = SEARCHED.program(2, 4, costs=costs, **options)
    assert str(program).splitlines()[3:] == [
        "rank 0: 0F0 2F0 0F1 2I0 0F2 2W0 2F1 0I0 0W0 2I1 2W1 2F2 0F3 0I1 0W1 2I2 2F3 2W2 0I2 0W2 2I3 2W3 0I3 0W3",
        "rank 1: 1F0 3F0 3I0 1F1 3W0 1I0 3F1 3I1 1F2 1I1 1W0 1W1 3F2 3I2 1F3 1I2 1W2 3F3 3I3 1I3 1W3 3W1 3W2 3W3",
    ]


def test_costs_of_each_microbatch():
    """Micro-batch 1 is four times as long as the others."""
    long = SEVEN.scaled(4)
    each = [SEVEN, long, SEVEN, SEVEN]
    schedule = SEARCHED.with_options(costs=each, effort=QUICK)
    program = schedule.program(3, 4)
    validate(program, exact=True)
    assert program == schedule.program(3, 4)
    with pytest.raises(ScheduleError, match="one for each micro-batch; got 4 for 3 micro-batches"):
        schedule.program(3, 3)


def test_messages_take_the_time_of_their_links():
    """A slow link from rank 0 to rank 1, and none that is slow back."""
    slow = Links(special=(((0, 1), Link(latency_s=3, bytes_per_s=2)),))
    costs = Costs((1, 1), (1, 1), (1, 1), output_bytes=(4, 4), links=slow)
    program = SEARCHED.program(2, 4, costs=costs, effort=QUICK)
    assert simulate(program, costs).makespan_s == simulate(program, costs).bound_s + 5 == 18


def test_a_limit_without_room():
    with pytest.raises(ScheduleError, match="rank 0 has 2 stages, but max_in_flight allows 1; pass 2 or more"):
        SEARCHED.program(2, 4, placement=(0, 1, 1, 0), max_in_flight=1)
    costs = Costs.uniform(2, activation_bytes=10, weight_grad_bytes=5)
    with pytest.raises(
        MemoryLimitError, match="no order was found for 2 stages on 2 ranks within memory_limit_bytes=9"
    ):
        SEARCHED.program(2, 4, costs=costs, memory_limit_bytes=9)
    SEARCHED.program(2, 4, costs=costs, memory_limit_bytes=15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": (0, 2)}, "every rank must hold a stage; got"),
        ({"placement": "01"}, "must be a list with the rank of each stage"),
        ({"placement": (0, 0, 0)}, "must place stages on all 2 ranks; its ranks are 0..0"),
        ({"costs": Costs.uniform(3)}, "there are 2 stages, but the costs have 3"),
        ({"costs": 3}, "costs= must be a pipesched.Costs"),
        ({"effort": -1}, "effort must be a number, at least 0; got -1"),
        ({"max_in_flight": (1, 2, 3)}, "got .* for 2 ranks"),
        ({"memory_limit_bytes": "9"}, "memory_limit_bytes must be a whole number"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ScheduleError, match=message):
        SEARCHED.program(2, 4, **options)


def test_uneven_numbers_of_stages_and_several_limits():
    """Three stages on rank 0, one on rank 1, each with its own limit."""
    program = SEARCHED.program(2, 5, placement=(0, 0, 1, 0), max_in_flight=(4, 1), effort=QUICK)
    validate(program, max_in_flight=(4, 1), exact=True)
    assert isinstance(program, Program)
    assert all(a.microbatch <= b.microbatch for a, b in pairwise(a for a in program.orders[1] if a.kind == "F"))


def rows(num_stages, num_microbatches, seed):
    """The times of F, I, W and B for each stage and micro-batch: uneven stages, and a B that is shorter than I + W."""
    rng = random.Random(seed)
    times = [[rng.randint(14, 24) for _ in range(num_stages)] for _ in range(3)]
    times.append([i + w - rng.randint(0, 4) for _, i, w in zip(*times, strict=True)])
    return [[[time] * num_microbatches for time in row] for row in times]


def uneven_problem(num_ranks=4, num_microbatches=20, chunks=1):
    stages = num_ranks * chunks
    one = [[[1] * num_microbatches] * stages] * 2
    none = [[[0] * num_microbatches] * stages] * 2
    return OrderProblem(
        num_ranks=num_ranks,
        placement=tuple(range(num_ranks)) * chunks,
        num_microbatches=num_microbatches,
        times=rows(stages, num_microbatches, seed=1),
        forward_lags=[[1] * num_microbatches] * (stages - 1),
        backward_lags=[[1] * num_microbatches] * (stages - 1),
        resources=[Resource(takes=[one[0], *none, none[0]], gives=[*none, *one], limits=[num_ranks] * num_ranks)],
    )


def test_a_rule_for_each_rank_is_better_than_one_for_all():
    same, own = (search(uneven_problem(), [], steps=0, lists=1, climbs=climbs) for climbs in (0, 40))
    assert own.makespan < same.makespan
    assert own.evaluations > same.evaluations
    assert own == search(uneven_problem(), [], steps=0, lists=1, climbs=40)


def with_times(problem, **of_stage):
    """A problem with one time for each stage and each of F, I, W and B, without messages and limits."""
    count = problem.num_microbatches
    times = [[[time] * count for time in of_stage[kind]] for kind in "FIWB"]
    none = [[0] * count] * (problem.num_stages - 1)
    return replace(problem, times=times, forward_lags=none, backward_lags=none, resources=())


def test_only_the_ranks_that_would_be_too_slow_must_fuse():
    """20 micro-batches: the bound is 3 + 20 x 9 + 9 on rank 1; with I and W apart, this rank takes 20 longer."""
    problem = with_times(uneven_problem(), F=(3, 3, 3, 3), I=(3, 4, 3, 3), W=(2, 3, 2, 2), B=(4, 6, 4, 4))
    bound = lower_bound(problem)
    assert ranks_that_must_fuse(problem, bound) == [False, True, False, False]
    assert ranks_that_must_fuse(problem, bound + 20) == [False] * 4
    fused = {tuple(rule[FUSED * 4 : FUSED * 4 + 4]) for rule in rules(problem, bound)}
    assert fused == {(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (0, 2, 0, 0)}


def test_rules_that_fuse_only_where_it_pays_are_better():
    problem = with_times(uneven_problem(), F=(3, 3, 3, 3), I=(3, 4, 3, 3), W=(2, 3, 2, 2), B=(4, 6, 4, 4))
    found = search(problem, [], steps=0, lists=600)
    apart = replace(problem, times=[*problem.times[:3], [[7] * 20] * 4])
    assert found.makespan < lower_bound(apart) <= search(apart, [], steps=0, lists=600).makespan


def test_a_rule_search_never_gets_worse():
    """A rule that gives no orders, because the limits are too tight, is not improved."""
    problem = uneven_problem(num_microbatches=4)
    climber = RuleSearch(problem, next(rules(problem, lower_bound(problem))))
    first = climber.makespan
    assert climber.run(30, 0) == 30
    assert climber.makespan <= first
    none = replace(problem, resources=[replace(problem.resources[0], limits=[0] * 4)])
    assert RuleSearch(none, whole([0] * (CHOICES * 4))).run(5, 0) == 0


def test_a_problem_with_fewer_microbatches():
    problem = uneven_problem()
    assert problem.shortened(3).num_microbatches == 3
    assert problem.shortened(20) is None
    times = [[[*row[:-1], 50] for row in table] for table in problem.times]
    assert replace(problem, times=times).shortened(3) is None  # its last micro-batch is longer
