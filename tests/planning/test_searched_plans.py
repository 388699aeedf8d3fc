"""Plans with searched orders: when they are chosen, their memory limits, and loading one without a search."""

from itertools import combinations

import pytest

from pipesched import Plan, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.partitioning.partition import balance
from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import Candidate, candidates
from pipesched.planning.effort import SearchEffort
from pipesched.planning.pins import Pins
from pipesched.planning.plan import searched_before
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.program.liveness import peak_in_flight
from pipesched.program.lowering import add_recompute
from pipesched.simulation.memory import rank_memory
from tests.support.synthetic_profiles import profile

TIMES = [0.5, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 4.0]
EFFORT = 300_000


def search(times=TIMES, ranks=2, count=4, layers=None, **asked):
    known = profile(times, **(layers or {}))
    pins = Pins(list(known.layers), asked.pop("boundaries", None))
    return SearchRequest(known, pins, ranks, count, (count,), **{"effort": EFFORT, "all_ranks": True, **asked})


@pytest.fixture(scope="module")
def plan():
    return find_plan(search())


@pytest.fixture
def without_search(monkeypatch):
    def search(*_, **__):
        raise AssertionError("a search runs")

    monkeypatch.setattr("pipesched.program.search.search.search", search)


def rival_s(asked):
    """The shortest step of all schedules and numbers of chunks on the cut with the shortest slowest stage."""
    layers = asked.pins.layers
    times = [asked.profile.graph(1).nodes[layer]["forward_s"] for layer in layers]
    rivals = candidates(None, None, [asked.num_ranks], asked.num_microbatches, most_stages=len(layers))
    steps = []
    for rival in rivals:
        costs = asked.profile.costs(asked.pins.stages(balance(times, rival.num_stages)), 1)
        steps.append(simulate(rival.program, costs).makespan_s)
    return min(steps)


@pytest.mark.parametrize("times", [TIMES, [1.0] * 8, [4.0, 1, 1, 1, 1, 1, 1]])
def test_no_schedule_on_the_balanced_cut_is_faster(times):
    asked = search(times)
    assert find_plan(asked).predicted().makespan_s <= rival_s(asked)


def test_a_faster_order_is_chosen_and_named(plan):
    own, *others = plan.alternatives
    assert (own.label, plan.schedule, plan.program.name) == ("searched, 2 chunks", "searched", "searched")
    assert own.step_s == plan.predicted().makespan_s < min(each.step_s for each in others) * 0.99
    validate(plan.program, exact=True)
    text = plan.explain()
    assert text.startswith("searched on 2 ranks")
    assert "no schedule of these stages on these ranks can take less than" in text


def test_a_known_schedule_wins_a_tie():
    plan = find_plan(search([1.0] * 4, boundaries=[2]))
    assert plan.schedule == "zb-h1"
    assert "the predicted step is optimal" in plan.explain()


def test_the_plan_has_the_order_with_few_microbatches_in_flight_among_equally_fast_ones():
    plan = find_plan(search([3.0, 1, 2, 1, 4, 1, 2, 2], 2, 8, {"activation_bytes": 100}, effort=1_200_000))
    most = max(peak_in_flight(order) for order in plan.program.orders)
    assert plan.schedule == "searched"
    assert most <= 8, "each rank has two stages, which would hold 16 pairs"
    fewer = schedules.get("searched").with_options(
        placement=plan.program.placement, costs=plan.costs, max_in_flight=most - 1, effort=1 / 50
    )
    least_s = simulate(fewer.program(2, 8), plan.costs).makespan_s
    assert least_s > plan.predicted().makespan_s


@pytest.mark.one_in(3)
@pytest.mark.parametrize("limit", [75_000, 90_000])
def test_a_searched_order_stays_within_the_bytes_of_a_rank(limit):
    layers = {"activation_bytes": 10_000, "output_bytes": 100, "parameter_bytes": 100}
    plan = find_plan(search([1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 2.0, 4.0], 2, 6, layers, memory_limit_bytes=(limit,) * 2))
    assert plan.schedule == "searched"
    program = add_recompute(plan.program, plan.checkpoint)
    assert max(rank.total_bytes for rank in rank_memory(program, plan.costs)) <= limit


def test_orders_of_recomputed_stages_stay_within_the_bytes_of_a_rank():
    layers = {"activation_bytes": 10_000, "output_bytes": 4_000, "parameter_bytes": 100}
    limit = 52_000
    plan = find_plan(search([1.0, 1.5] * 2, 2, 8, layers, checkpoint="always", memory_limit_bytes=(limit,) * 2))
    program = add_recompute(plan.program, plan.checkpoint)
    assert max(rank.total_bytes for rank in rank_memory(program, plan.costs)) <= limit


def test_the_schedule_that_is_asked_for_is_searched_with_the_costs_of_the_layers():
    plan = find_plan(search([1.0] * 4, schedule=schedules.get("searched")))
    assert plan.schedule == "searched"
    assert plan.predicted().makespan_s == pytest.approx(find_plan(search([1.0] * 4)).predicted().makespan_s)


def test_a_saved_plan_needs_no_search(plan, without_search):
    again = Plan.from_dict(plan.to_dict())
    assert again == plan
    request = PlanRequest().pinned(again, [name for names in plan.stages for name in names])
    programs = ProgramFactory(request, 2)
    assert programs.full.plain == plan.program
    for count in range(1, 4):
        short = programs.of(count).plain
        validate(short, exact=True)
        assert (short.num_microbatches, short.placement) == (count, plan.program.placement)


def test_more_microbatches_than_planned_hold_no_more_at_once(plan):
    schedule = searched_before(plan.program, plan.costs)
    validate(schedule.program(2, 6), exact=True, max_in_flight=schedule.options["max_in_flight"])


def test_a_candidate_with_a_searched_program_has_its_placement():
    schedule = searched_before(schedules.get("zb-v").program(2, 4), None)
    own = Candidate(schedule=schedule, num_ranks=2, num_microbatches=4, splits=True)
    assert own.placement == own.program.placement == own.outline.placement == (0, 1, 1, 0)


def test_a_program_of_other_stages_is_refused(plan):
    other = schedules.get("searched").with_options(found=plan.program, placement=(0, 1, 1, 0, 0, 1))
    with pytest.raises(ScheduleError, match="found= must be the program of an earlier search for the same placement"):
        other.program(2, 4)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"memory_limit_bytes": 10}, "memory_limit_bytes="),
        ({"chunks_per_rank": 2}, "num_stages="),
        ({"effort": 2}, "effort="),
        ({"starts": ()}, "leave it out"),
    ],
)
def test_options_that_a_search_for_a_plan_sets_itself_are_refused(option, remedy):
    schedule = schedules.get("searched").with_options(**option)
    with pytest.raises(
        ScheduleError, match=f"keeps only the options .* of the schedule 'searched'.*{next(iter(option))}.*{remedy}"
    ):
        SearchRequest.of(profile(TIMES), 2, 4, PlanRequest(schedule=schedule, num_microbatches=4))


def asked_with(**options):
    return search(schedule=schedules.get("searched").with_options(**options))


@pytest.mark.parametrize("limit", [1, 3, (2, 1)])
def test_an_order_is_searched_within_the_pairs_in_flight_that_are_given(limit):
    plan = find_plan(asked_with(max_in_flight=limit))
    assert plan.schedule == "searched"
    validate(plan.program, exact=True, max_in_flight=limit)
    most = schedules.get("searched").with_options(
        costs=plan.costs, placement=plan.program.placement, max_in_flight=limit
    )
    assert plan.predicted().makespan_s <= simulate(most.program(2, 4), plan.costs).makespan_s


def test_a_limit_on_pairs_is_combined_with_a_limit_in_bytes():
    layers = {"activation_bytes": 10_000, "output_bytes": 100, "parameter_bytes": 100}
    given = schedules.get("searched").with_options(max_in_flight=3)
    plan = find_plan(search([1.0] * 8, 2, 6, layers, schedule=given, memory_limit_bytes=(95_000,) * 2))
    validate(plan.program, exact=True, max_in_flight=3)
    program = add_recompute(plan.program, plan.checkpoint)
    assert max(rank.total_bytes for rank in rank_memory(program, plan.costs)) <= 95_000


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (1, 0), (0, 1, 1, 0, 0, 1)])
def test_an_order_is_searched_for_the_placement_that_is_given(placement):
    plan = find_plan(asked_with(placement=placement))
    assert (plan.schedule, plan.program.placement) == ("searched", placement)
    validate(plan.program, exact=True)
    alone = sum(TIMES) * 3 * 4
    assert plan.predicted().makespan_s < 0.75 * alone


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"max_in_flight": 0}, "room for a micro-batch on each of its stages; got 0 for 2 ranks.*at least 1"),
        ({"max_in_flight": (1, 2, 3)}, r"one number for each rank.*got \(1, 2, 3\) for 2 ranks"),
        ({"max_in_flight": 1, "placement": (0, 1, 1, 0)}, "2 stages each; pass numbers of at least 2"),
        ({"placement": (0, 1, 0)}, "same number of stages on every rank"),
        ({"placement": (0, 1, 2)}, "same number of stages on every rank"),
    ],
)
def test_options_without_a_plan_are_refused(option, rule):
    with pytest.raises(ScheduleError, match=rule):
        asked_with(**option)


@pytest.mark.parametrize("pinned", [{}, {"together": [("layer2", "layer5")]}, {"boundaries": {"layer4": 2}}])
def test_balanced_cuts_are_those_with_the_least_work_of_the_busiest_rank(pinned):
    times = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    known = profile(times)
    search = SearchRequest(known, Pins(list(known.layers), **pinned), 2, 8, (8,))
    candidate = Candidate(
        schedule=schedules.get("zb-v"), num_ranks=2, num_microbatches=8, splits=True, checkpoint="never"
    )
    evaluator = CandidateEvaluator(search, SearchEffort(search.effort))

    def work(stages):
        """The work of the busiest rank, and of the largest stage."""
        each = [sum(times[int(name.removeprefix("layer"))] for name in names) for names in stages]
        return max(each[0] + each[3], each[1] + each[2]), max(each)

    every = [(0, *starts) for starts in combinations(range(1, 8), 3)]
    allowed = [search.pins.stages(starts) for starts in every if search.pins.allows(starts)]
    found = evaluator.balanced_cuts(candidate, 3)
    assert len(set(found)) == 3 < len(allowed)
    assert set(found) <= set(allowed)
    assert [*map(work, found)] == sorted(map(work, allowed))[:3]
    assert set(evaluator.balanced_cuts(candidate, 1000)) == set(allowed)
