"""The tuner, by simulation alone: what it finds beside what there is, the limits it keeps, and what it says."""

import json
import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import schedules, simulate, validate
from pipesched.errors import MemoryLimitError, PartitionError
from pipesched.planning.candidates import microbatch_counts, synchronous
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.program.completion import UNCHANGED, Completion
from pipesched.simulation.links import Link, Links
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.profile import Profile
from tests.support.synthetic_profiles import profile, row

TIMES = [1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0]


def search(times=TIMES, ranks=2, counts=(8,), layers=None, **asked):
    known = profile(times, **(layers or {}))
    pins = Pins(list(known.layers), asked.pop("boundaries", None), asked.pop("together", ()))
    return SearchRequest(known, pins, ranks, max(counts), counts, **asked)


def cuts(layers, num_stages):
    for starts in combinations(range(1, len(layers)), num_stages - 1):
        ends = (*starts, len(layers))
        yield tuple(tuple(layers[begin:end]) for begin, end in zip((0, *starts), ends, strict=True))


def exhaustive(asked, chunks=(1, 2)):
    """The shortest step of every schedule, cut in every way."""
    steps = []
    for schedule in synchronous():
        own = [schedule]
        if "chunks_per_rank" in schedule.options:
            own = [schedule.with_options(chunks_per_rank=count) for count in chunks if count > 1]
        for each in own:
            program = each.program(asked.num_ranks, asked.num_microbatches[0])
            for stages in cuts(asked.pins.layers, program.num_stages):
                costs = replace(asked.profile.costs(stages, 1), links=asked.links)
                steps.append(simulate(program, costs).makespan_s)
    return min(steps)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("whole_searches")
@pytest.mark.parametrize("times", [TIMES, [1.0] * 6, [6.0, 1, 1, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 8], [5.0, 1, 4, 2, 3]])
def test_the_plan_is_within_one_percent_of_the_best_of_all_schedules_and_cuts(times):
    asked = search(times)
    assert find_plan(asked).predicted().makespan_s <= exhaustive(asked) * 1.01


def test_a_candidate_with_a_slow_first_cut_can_become_the_fastest():
    """Light and heavy layers in turn, and a heavy last one: as smallest bottlenecks cut them zb-h2 is ahead."""
    plan = find_plan(search([0.1] + [1.2, 2.1] * 8 + [5.0], 4, (4,), effort=600_000))
    known = {each.label: each.step_s for each in plan.alternatives}
    assert plan.predicted().makespan_s <= known["interleaved-zb, 2 chunks"] <= 115 < known["zb-h2"]


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.integers(2, 4), st.sampled_from([2, 4, 8]))
def test_no_baseline_is_faster_and_the_plan_is_proved(times, ranks, count):
    plan = find_plan(search([float(time) for time in times], ranks, (count,), effort=100_000))
    validate(plan.program, exact=True)
    own, *others = plan.alternatives
    assert own.step_s == pytest.approx(plan.predicted().makespan_s)
    baselines = {each.label: each.step_s for each in others if each.label in ("one device", "equal split")}
    assert {*baselines} == {"one device", "equal split"}
    assert own.step_s <= min(each.step_s for each in others) * 1.005
    assert own.num_microbatches == count


def test_a_step_with_norms_ends_with_updates_that_wait_for_all_ranks():
    """Rank 1 has all the updates to do. Without the barrier it would do them while rank 0 is in its last backward."""
    costs = {"schedule": schedules.get("1f1b"), "links": Links(Link(latency_s=2.0)), "all_ranks": True}
    asked = search([1.0, 1.0], boundaries=[1], completion=Completion(updates=True, norms=True), **costs)
    asked.profile.graphs[1].nodes["layer1"]["update_s"] = 5.0
    plan = find_plan(asked)
    without, free, bound = (
        simulate(completion.complete(plan.program), plan.costs)
        for completion in (UNCHANGED, Completion(updates=True), asked.completion)
    )
    assert plan.alternatives[0].step_s == plan.predicted().makespan_s == bound.makespan_s
    assert bound.makespan_s == without.makespan_s + 2.0 + 5.0 > free.makespan_s
    plan = find_plan(replace(asked, completion=Completion(updates=True)))
    assert plan.alternatives[0].step_s == plan.predicted().makespan_s == free.makespan_s


def test_a_profile_always_gives_the_same_plan():
    asked = search(TIMES, 3, (3, 6, 12), {"fixed_s": 0.1})
    assert json.dumps(find_plan(asked).to_dict()) == json.dumps(find_plan(asked).to_dict())


@pytest.mark.parametrize("heavy", [0, -1])
def test_a_heavy_first_or_last_layer_leaves_its_rank_fewer_layers(heavy):
    times = [1.0] * 12
    times[heavy] = 4.0
    plan = find_plan(search(times, 4, (16,)))
    equal = [each.step_s for each in plan.alternatives if each.label == "equal split"]
    assert len(equal) == 2
    assert plan.alternatives[0].step_s < 0.8 * min(equal)


def test_split_backwards_are_taken_only_where_both_parts_are_no_dearer():
    cheap, dear = (find_plan(search([1.0] * 8, 4, (8,), {"split": split})) for split in (1.0, 2.0))
    assert any(str(action.kind) == "W" for action in cheap.program.orders[0])
    assert not any(str(action.kind) == "W" for action in dear.program.orders[0])


def test_the_simplest_of_equally_fast_plans_is_chosen():
    plan = find_plan(search([1.0] * 4, 2, (1,), {"split": 2.0}))  # one micro-batch, whole backwards: nothing overlaps
    assert (plan.schedule, plan.program.num_ranks, plan.program.num_stages) == ("1f1b", 1, 1)


def test_ranks_that_only_wait_for_messages_are_left_out():
    slow = Links(inside=Link(latency_s=100.0))
    assert find_plan(search([1.0] * 8, 4, (8,), links=slow)).program.num_ranks == 1
    assert find_plan(search([1.0] * 8, 4, (8,), links=slow, all_ranks=True)).program.num_ranks == 4
    assert find_plan(search([1.0] * 8, 4, (8,))).program.num_ranks == 4


def test_fewer_larger_micro_batches_where_each_costs_a_fixed_time():
    def best(fixed_s):
        known = profile([1.0] * 8, (1, 2, 4, 8), fixed_s=fixed_s)
        counts = microbatch_counts(32, 4, known.graphs)
        return find_plan(SearchRequest(known, Pins(list(known.layers)), 4, 32, counts)).program.num_microbatches

    assert best(0.0) == 32
    assert best(3.0) < 32


def test_micro_batches_are_of_sizes_between_those_that_were_measured():
    assert microbatch_counts(32, 4, [2, 4]) == [8, 16]
    assert microbatch_counts(32, 4, [4]) == [8]
    assert microbatch_counts(7, 2, [1, 2]) == [4, 7]  # a prime number of rows: uneven ones too
    assert microbatch_counts(8, 2, [16]) == []


def test_only_exact_synchronous_schedules_are_searched():
    names = {schedule.name for schedule in synchronous()}
    assert {"1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"} <= names
    assert not {"pipedream", "pipedream-2bw", "chimera", "dualpipe"} & names


# ---- what is given --------------------------------------------------------------------------------------------------


def test_pins_groups_and_ties_are_kept():
    asked = search([1.0] * 8, 4, (8,), boundaries={"layer1": 1}, together=[("layer6", "layer7")], all_ranks=True)
    stages = find_plan(asked).stages
    assert stages[0] == ("layer0",)
    assert sum({"layer6", "layer7"} <= {*names} for names in stages) == 1


def test_a_schedule_stages_and_all_boundaries_that_are_given_stay():
    asked = search([1.0] * 8, 2, (8,), boundaries=["layer2", "layer4", "layer6"], num_stages=4)
    plan = find_plan(replace(asked, schedule=schedules.get("interleaved-1f1b")))
    assert (plan.schedule, plan.boundaries) == ("interleaved-1f1b", ["layer2", "layer4", "layer6"])


def test_more_stages_than_layers_are_an_error():
    with pytest.raises(PartitionError, match=r"at least one layer.*2 layers cannot be split into 3 stages on 3 ranks"):
        find_plan(search([1.0, 1.0], 3, (4,), num_stages=3, all_ranks=True))


# ---- memory ---------------------------------------------------------------------------------------------------------

HEAVY = {"activation_bytes": 10_000, "output_bytes": 100, "parameter_bytes": 100}


def peaks(plan):
    from pipesched.program.lowering import add_recompute

    return [each.total_bytes for each in rank_memory(add_recompute(plan.program, plan.checkpoint), plan.costs)]


def test_a_limit_is_kept_and_costs_time():
    free = find_plan(search([1.0] * 8, 4, (16,), HEAVY))
    limit = max(peaks(free)) // 2
    tight = find_plan(search([1.0] * 8, 4, (16,), HEAVY, memory_limit_bytes=(limit,) * 4))
    assert max(peaks(tight)) <= limit
    assert tight.predicted().makespan_s > free.predicted().makespan_s
    assert tight.alternatives[0].limit_bytes == limit
    assert tight.alternatives[0].fits


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("whole_searches")
@pytest.mark.parametrize(("seed", "ranks"), [(11, 3), (12, 3), (17, 4)])
def test_under_a_limit_that_equal_layers_keep_the_plan_is_at_least_as_fast(seed, ranks):
    """The layers have very different weights, and interleaved 1F1B needs the whole limit."""
    draw = random.Random(seed)
    program = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=3).program(ranks, ranks)
    size = 2
    count = size * program.num_stages
    weights = [3000 if layer % 2 else 10 for layer in range(count)]
    draw.shuffle(weights)
    asked = search([float(draw.randint(1, 4)) for _ in range(count)], ranks, (ranks,), {"parameter_bytes": weights})
    layers = asked.pins.layers
    costs = asked.profile.costs([layers[begin : begin + size] for begin in range(0, count, size)], 1)
    limit = max(memory.total_bytes for memory in rank_memory(program, costs))
    plan = find_plan(replace(asked, memory_limit_bytes=(limit,) * ranks))
    assert plan.predicted().makespan_s <= simulate(program, costs).makespan_s


def test_only_as_many_layers_are_recomputed_as_a_limit_asks_for():
    """Early ranks hold more micro-batches: they recompute, and the last ones do not."""
    asked = search([1.0] * 8, 4, (16,), HEAVY, memory_limit_bytes=(60_000,) * 4, schedule=schedules.get("1f1b"))
    plan = find_plan(replace(asked, all_ranks=True))
    assert plan.checkpoint == {"layer0": "recompute", "layer2": "recompute"}
    assert max(peaks(plan)) <= 60_000
    whole = find_plan(replace(asked, all_ranks=True, checkpoint="except_last"))
    assert plan.predicted().makespan_s < 0.92 * whole.predicted().makespan_s


def test_checkpoints_that_are_given_by_layer_stay_under_a_limit():
    asked = search([1.0] * 8, 2, (8,), HEAVY, checkpoint={"layer0": "recompute"})
    limit = max(peaks(find_plan(asked))) // 2
    plan = find_plan(replace(asked, memory_limit_bytes=(limit,) * 2))
    assert plan.checkpoint == {"layer0": "recompute"}
    assert max(peaks(plan)) <= limit
    with pytest.raises(MemoryLimitError, match=r"the smallest limit for a plan is \d+ bytes"):
        find_plan(replace(asked, memory_limit_bytes=(limit // 2,) * 2))


def test_a_limit_that_nobody_keeps_says_what_would_help():
    asked = search([1.0] * 8, 2, (8,), {"parameter_bytes": 1_000, "activation_bytes": 10})
    least = 8_000 // 2  # of weights alone
    with pytest.raises(MemoryLimitError, match=r"no plan for 2 ranks and a batch of 8 rows fits") as caught:
        find_plan(replace(asked, memory_limit_bytes=(least // 2,) * 2))
    text = str(caught.value)
    assert "the smallest limit for a plan is" in text
    ranks = int(text.split("use ")[1].split(" ranks", maxsplit=1)[0])
    limit = (least // 2,) * ranks
    assert find_plan(replace(asked, num_ranks=ranks, memory_limit_bytes=limit)).program.num_ranks <= ranks
    with pytest.raises(MemoryLimitError):
        find_plan(replace(asked, num_ranks=ranks - 1, memory_limit_bytes=limit[1:]))


LARGE, SMALL = 200_000, 20_000


def test_a_small_effort_does_not_make_a_limit_one_that_nobody_keeps():
    asked = search([1.0] * 6 + [5.0, 1.0], counts=(1, 2, 4, 8), ranks_are="processes", effort=SMALL)
    asked = replace(asked, memory_limit_bytes=(5500,) * 2)
    assert find_plan(asked).alternatives[0].peak_bytes <= 5500


@settings(max_examples=2)
@given(
    times=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=4, max_size=6),
    limit=st.integers(2_000, 8_000),
    ranks_are=st.sampled_from(["threads", "processes"]),
    checkpoint=st.sampled_from([None, "never", "always"]),
)
def test_what_fits_with_a_large_effort_fits_with_a_small_one(times, limit, ranks_are, checkpoint):
    asked = search(times, counts=(2, 4), ranks_are=ranks_are, checkpoint=checkpoint, memory_limit_bytes=(limit,) * 2)
    try:
        find_plan(replace(asked, effort=LARGE))
    except MemoryLimitError:
        with pytest.raises(MemoryLimitError, match="the smallest limit for a plan is"):
            find_plan(replace(asked, effort=SMALL))
    else:
        assert find_plan(replace(asked, effort=SMALL)).alternatives[0].peak_bytes <= limit


@pytest.mark.exhaustive
@settings(max_examples=2)
@given(
    times=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=4, max_size=6),
    heavy=st.sampled_from([100, 1_000, 10_000]),
    ranks=st.integers(2, 3),
    schedule=st.sampled_from([None, "1f1b", "interleaved-1f1b"]),
    checkpoint=st.sampled_from([None, "never", "always"]),
)
def test_the_least_limit_that_an_error_names_is_enough_and_the_same_whatever_the_limit(
    times, heavy, ranks, schedule, checkpoint
):
    wished = None if schedule is None else schedules.get(schedule)
    asked = search(times, ranks, (2, 4), {"activation_bytes": heavy}, schedule=wished, checkpoint=checkpoint)
    asked = replace(asked, effort=SMALL)
    with pytest.raises(MemoryLimitError) as caught:
        find_plan(replace(asked, memory_limit_bytes=(100,) * ranks))
    least = int(str(caught.value).split("the smallest limit for a plan is ")[1].split(" bytes")[0])
    plan = find_plan(replace(asked, memory_limit_bytes=(least,) * ranks))
    assert plan.alternatives[0].peak_bytes <= least
    with pytest.raises(MemoryLimitError, match=f"the smallest limit for a plan is {least} bytes"):
        find_plan(replace(asked, memory_limit_bytes=(int(least / 1.01),) * ranks))


def test_fewer_layers_than_ranks_do_not_hide_that_memory_is_what_lacks():
    with pytest.raises(MemoryLimitError, match="the smallest limit for a plan is"):
        find_plan(search([1.0] * 3, 4, (4,), memory_limit_bytes=(500,) * 4))


def test_a_schedule_that_searches_is_refused_for_its_memory():
    asked = search([1.0] * 4, 2, (4,), schedule=schedules.get("zb-auto"), memory_limit_bytes=(500,) * 2)
    with pytest.raises(MemoryLimitError, match="the smallest limit for a plan is"):
        find_plan(asked)


def test_a_layer_that_fits_nowhere_is_named():
    sizes = [100] * 7 + [100_000]
    with pytest.raises(MemoryLimitError, match=r"layer 'layer7' alone needs .* for one micro-batch, on any rank"):
        find_plan(search([1.0] * 8, 2, (8,), {"parameter_bytes": sizes}, memory_limit_bytes=(50_000,) * 2))


def test_without_recomputation_the_error_names_it():
    asked = search([1.0] * 8, 2, (8,), HEAVY, checkpoint="never", effort=300_000)
    limit = max(peaks(find_plan(replace(asked, checkpoint="always"))))
    with pytest.raises(
        MemoryLimitError, match=r"more than the given limit; the given limit is enough with checkpoint='always'; "
    ):
        find_plan(replace(asked, memory_limit_bytes=(limit,) * 2))


def test_sizes_between_measured_ones_cost_what_lies_between():
    known = Profile({1: row([1.0] * 4, rows=1), 4: row([1.0] * 4, rows=4)})
    plan = find_plan(SearchRequest(known, Pins(list(known.layers)), 2, 12, (4, 6)))
    assert sum(plan.costs.forward_s) == pytest.approx(4 * 12 / plan.program.num_microbatches)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_given_number_of_chunks_is_kept(chunks):
    given = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=chunks)
    plan = find_plan(search([1.0] * 8, 2, (4,), schedule=given, all_ranks=True))
    assert plan.program.num_stages == 2 * chunks
