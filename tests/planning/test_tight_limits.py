"""Limits that no schedule of the catalogue meets: orders are searched within them, with or without recomputation."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import schedules, simulate, validate
from pipesched.errors import MemoryLimitError
from pipesched.planning.candidates import synchronous
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.program.actions import Action, Kind
from pipesched.program.lowering import add_recompute
from pipesched.program.program import Program
from pipesched.simulation.memory import rank_memory
from tests.support.synthetic_profiles import profile

EFFORT = 300_000
HEAVY = {"activation_bytes": 10_000, "output_bytes": 100, "parameter_bytes": 100}


def search(times, ranks, count, **asked):
    known = profile(times, **asked.pop("layers", HEAVY))
    pins = Pins(list(known.layers))
    return SearchRequest(known, pins, ranks, count, (count,), **{"effort": EFFORT, "all_ranks": True, **asked})


def limited(limit, *arguments, **asked):
    return search(*arguments, memory_limit_bytes=(limit,) * arguments[1], **asked)


def largest(program, costs):
    return max(memory.total_bytes for memory in rank_memory(program, costs))


def peak(plan):
    return largest(add_recompute(plan.program, plan.checkpoint), plan.costs)


def one_at_a_time(ranks, count):
    """Each micro-batch runs alone."""
    order = [[Action(rank, kind, m) for m in range(count) for kind in (Kind.F, Kind.B)] for rank in range(ranks)]
    return Program(orders=order, placement=tuple(range(ranks)), num_microbatches=count)


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_an_order_is_found_where_no_schedule_of_the_catalogue_fits(pairs):
    limit = pairs * 10_000 + 2_000
    plan = find_plan(limited(limit, [1.0] * 4, 4, 8, checkpoint="never"))
    assert plan.schedule == "searched"
    validate(plan.program, exact=True)
    assert peak(plan) <= limit
    known = [schedule.program(4, 8) for schedule in synchronous() if schedule.chunks_per_rank == 1]
    assert min(largest(each, plan.costs) for each in known) > limit
    least_s = {1: 8 * 12, 2: 48, 3: 33}[pairs]
    assert plan.predicted().makespan_s <= least_s


def test_an_order_without_recomputation_is_chosen_if_it_is_faster():
    """Three of four micro-batches fit. With split backwards they are enough, and recomputation would be slower."""
    asked = limited(32_000, [1.0] * 4, 4, 8)
    plan = find_plan(asked)
    assert (plan.schedule, plan.checkpoint) == ("searched", "never")
    recomputed = find_plan(replace(asked, schedule=schedules.get("1f1b")))
    assert recomputed.checkpoint != "never"
    assert plan.predicted().makespan_s < 0.95 * recomputed.predicted().makespan_s


def test_recomputation_is_chosen_if_it_is_faster():
    asked = limited(22_000, [1.0] * 4, 4, 8)
    plan = find_plan(asked)
    assert peak(plan) <= 22_000
    alone = find_plan(replace(asked, checkpoint="never"))
    assert plan.checkpoint != "never"
    assert plan.predicted().makespan_s < alone.predicted().makespan_s


def test_an_order_and_recomputation_are_combined_where_neither_alone_fits():
    """A rank has room for the inputs of two micro-batches, and for the activations of the layer that is recomputed."""
    layers = {"activation_bytes": 10_000, "output_bytes": 2_000, "parameter_bytes": 100}
    asked = limited(28_000, [1.0] * 16, 4, 8, layers=layers, num_stages=4)
    for alone in ({"schedule": schedules.get("1f1b")}, {"checkpoint": "never"}):
        with pytest.raises(MemoryLimitError):
            find_plan(replace(asked, **alone))
    plan = find_plan(asked)
    assert plan.schedule == "searched"
    assert plan.checkpoint != "never"
    assert peak(plan) <= 28_000


@settings(max_examples=8)
@given(
    times=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=3, max_size=6),
    sizes=st.lists(st.sampled_from([100, 5_000, 9_000]), min_size=6, max_size=6),
    ranks=st.integers(2, 3),
    checkpoint=st.sampled_from([None, "never", "always"]),
)
def test_a_plan_is_found_if_micro_batches_fit_one_at_a_time(times, sizes, ranks, checkpoint):
    """With the cut that needs the least memory of all."""
    layers = {**HEAVY, "parameter_bytes": sizes}
    asked = search(times, ranks, 4, checkpoint=checkpoint, effort=20_000, layers=layers)
    program = add_recompute(one_at_a_time(ranks, 4), checkpoint or "never")
    cuts = (asked.pins.stages((0, *starts)) for starts in combinations(range(1, len(times)), ranks - 1))
    each = [asked.profile.costs(stages, 1) for stages in cuts]
    limit, costs = min(((largest(program, own), own) for own in each), key=lambda pair: pair[0])
    plan = find_plan(replace(asked, memory_limit_bytes=(limit,) * ranks))
    assert peak(plan) <= limit
    assert plan.predicted().makespan_s <= simulate(program, costs).makespan_s


def test_the_smallest_limit_in_an_error_is_that_of_one_micro_batch_at_a_time():
    asked = limited(9_000, [1.0] * 4, 4, 8, checkpoint="never")
    with pytest.raises(MemoryLimitError, match=r"the smallest limit for a plan is (\d+) bytes") as caught:
        find_plan(asked)
    least = int(str(caught.value).split("a plan is ")[1].split()[0])
    assert 10_000 < least < 12_000
    assert peak(find_plan(replace(asked, memory_limit_bytes=(least,) * 4))) <= least
