"""Replays of traces for every policy: accounting, limits, and small cases by hand."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from pipesched.errors import InputError
from pipesched.fleet import POLICIES, Capacity, FleetCosts, FleetTrace, generate, replay
from tests.fleet.small_fleet import NUM_RANKS, capacity, outage, profile, traces
from tests.support.random_programs import quick

TINY = 1e-9


def alive_at(trace, time_s):
    return [count for since_s, count in trace.num_alive if since_s <= time_s][-1]


def seconds(result, activity):
    return result.seconds[activity]


@quick
@given(traces())
def test_every_second_has_one_activity_and_only_training_processes_rows(trace):
    for result in replay(trace, capacity()).results:
        assert result.segments[0].start_s == 0
        assert result.segments[-1].end_s == trace.duration_s
        assert all(a.end_s == b.start_s for a, b in pairwise(result.segments))
        assert sum(result.seconds.values()) == pytest.approx(trace.duration_s)
        assert all((own.rows_per_s > 0) == (own.activity == "train") for own in result.segments)


@quick
@given(traces())
def test_no_policy_exceeds_what_the_ranks_can_do(trace):
    known = capacity()
    for result in replay(trace, known).results:
        assert result.rows <= result.ideal_rows * (1 + TINY)
        assert result.planned_rows <= result.ideal_rows * (1 + TINY)
        for own in result.segments:
            limit = known.ideal_rows_per_s(alive_at(trace, own.start_s))
            assert own.rows_per_s <= limit * (1 + TINY)


@quick
@given(traces())
def test_our_plans_and_those_after_a_restart_are_the_planners(trace):
    known = capacity()
    rates = {known.best_rows_per_s(count) for count in range(NUM_RANKS + 1)}
    for name in ("elastic", "checkpoint-restart"):
        result = replay(trace, known, policies=[name])[name]
        assert {own.rows_per_s for own in result.segments} <= rates
        assert result.rows <= result.planned_rows * (1 + TINY)


@quick
@given(traces())
def test_a_replay_is_the_same_each_time(trace):
    assert replay(trace, capacity()).to_dict() == replay(trace, capacity()).to_dict()


def test_without_losses_all_policies_reach_the_plan_except_for_checkpoints():
    trace = FleetTrace(num_ranks=NUM_RANKS, duration_s=20_000, events=())
    report = replay(trace, capacity())
    assert report["checkpoint-restart"].share == 1  # without losses, Daly's interval is infinite
    for result in report.results:
        assert result.rows == pytest.approx(
            result.planned_rows * (1 - seconds(result, "checkpoint") / trace.duration_s)
        )
        assert result.share == result.ideal_share
        assert result.seconds["lost"] == result.seconds["stall"] == result.seconds["idle"] == 0
    # 36 GB, written by 8 ranks at 1 GB/s, after 1,800 s of training rounded to steps
    assert seconds(report["elastic"], "checkpoint") == pytest.approx(20_000 // 1_804.5 * 4.5)


def test_a_loss_takes_back_the_step_under_way_and_the_survivors_move_layers():
    known = capacity()
    plan = known.best(8)
    result = replay(outage(3, at=1_000), known, policies=["elastic"])["elastic"]
    assert seconds(result, "lost") == pytest.approx(1_000 % plan.step_s)
    # To 7 stages from 4: by hand, only the number of bytes that must arrive somewhere is known.
    after = known.best(7)
    held = sum(max(known.bytes_of(layers & own) for own in plan.layers) for layers in after.layers)
    assert result.moved_bytes >= known.state_bytes - held
    costs = FleetCosts()
    least_s = costs.notice_s + costs.replan_s + costs.switch_s
    assert least_s < seconds(result, "stall") < least_s + 2 * known.state_bytes / costs.link_bytes_per_s
    assert result.segments[-1].rows_per_s == after.rows_per_s
    assert result.num_restarts == 0


def test_a_survivor_that_holds_everything_goes_on_without_a_transfer():
    known = capacity(2, 2, "16GB")  # two replicas of one rank
    result = replay(outage(1, at=100, num_ranks=2), known, policies=["elastic"])["elastic"]
    assert seconds(result, "stall") == pytest.approx(0.5 + 3 + 2)
    assert (result.moved_bytes, result.num_restarts) == (0, 0)


def test_the_neighbours_copy_saves_a_single_pipeline_and_losing_both_does_not():
    known = capacity(6)
    assert known.best(6).num_replicas == 1
    saved = replay(outage(2, at=1_000, num_ranks=6), known, policies=["elastic"])["elastic"]
    assert saved.num_restarts == 0
    both = replay(outage(2, 5, at=1_000, num_ranks=6), known, policies=["elastic"])["elastic"]
    assert both.num_restarts == 1
    assert seconds(both, "restart") == 120
    assert seconds(both, "lost") == 1_000  # there is no checkpoint before 1,800 s
    near = replay(outage(2, 3, at=1_000, num_ranks=6), known, policies=["elastic"])["elastic"]
    assert near.num_restarts == 0


def test_a_second_loss_before_the_recovery_is_complete_can_lose_the_state():
    def events(gap_s):
        first, second = outage(2, at=1_000, num_ranks=6), outage(5, at=1_000 + gap_s, num_ranks=6)
        return replace(first, events=(*first.events, *second.events))

    known = capacity(6)
    assert replay(events(1), known, policies=["elastic"])["elastic"].num_restarts == 1
    assert replay(events(60), known, policies=["elastic"])["elastic"].num_restarts == 0


def test_ranks_join_again_if_it_pays():
    long, short = outage(3, at=1_000, until=1_100), outage(3, at=1_000, until=2_995)
    known = capacity()
    joined = replay(long, known, policies=["elastic"])["elastic"]
    assert joined.segments[-1].rows_per_s == known.best_rows_per_s(8)
    late = replay(short, known, policies=["elastic"])["elastic"]
    assert late.segments[-1].rows_per_s == known.best_rows_per_s(7)


def test_checkpoint_restart_goes_back_to_the_last_checkpoint():
    known = capacity()
    result = replay(outage(3, at=1_000), known, policies=["checkpoint-restart"])["checkpoint-restart"]
    assert result.num_restarts == 1
    assert seconds(result, "restart") == 120
    saves = [own for own in result.segments if own.activity == "checkpoint" and own.end_s <= 1_000]
    assert seconds(result, "lost") == pytest.approx(1_000 - saves[-1].end_s)
    assert result.segments[-1].rows_per_s == known.best_rows_per_s(7)


def test_a_replica_drops_out_until_its_rank_is_back():
    known = capacity()
    plan = known.best(8)
    result = replay(outage(3, at=1_000, until=2_000), known, policies=["whole-replicas"])["whole-replicas"]
    rates = {own.start_s: own.rows_per_s for own in result.segments if own.activity == "train"}
    assert plan.num_replicas == 2
    assert set(rates.values()) == {plan.rows_per_s, plan.rows_per_s / 2}
    half = [own for own in result.segments if own.rows_per_s == plan.rows_per_s / 2]
    assert half[0].start_s == 1_000.5
    # start, weights, the step under way, and maybe a checkpoint
    assert 2_030 < half[-1].end_s < 2_030 + 2 + 2 * plan.step_s + 4.5


def test_the_rank_at_the_same_position_takes_the_micro_batches_of_a_lost_one():
    known = capacity()
    plan = known.best(8)
    result = replay(outage(3, at=1_000), known, policies=["rerouting"])["rerouting"]
    least_s = min(max(plan.step_s, 2 * busy_s) for busy_s in plan.busy_s)
    assert result.segments[-1].rows_per_s == pytest.approx(32 / least_s)
    assert plan.spread(7).count(1) == 1
    assert plan.spread(4) == (1, 1, 1, 1)


def test_rerouting_restarts_if_all_ranks_of_a_position_are_lost():
    result = replay(outage(3, 7, at=1_000), capacity(), policies=["rerouting"])["rerouting"]
    assert result.num_restarts == 1
    assert result.segments[-1].rows_per_s == capacity().best_rows_per_s(6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fleet_with_too_few_ranks_waits_and_goes_on(policy):
    result = replay(outage(*range(2, 8), at=1_000, until=1_500), capacity(), policies=[policy])[policy]
    assert 400 < seconds(result, "idle") + seconds(result, "restart") < 800
    late = {own.rows_per_s for own in result.segments if own.end_s > 2_000}
    assert max(late) == capacity().best_rows_per_s(8)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fleet_that_never_has_enough_ranks_is_idle(policy):
    result = replay(outage(0, at=1_000, until=1_500, num_ranks=2), capacity(2), policies=[policy])[policy]
    assert seconds(result, "idle") == 3_000
    assert result.rows == result.planned_rows == result.share == 0


def test_a_plan_for_more_ranks_is_at_least_as_fast():
    rates = [capacity().best_rows_per_s(count) for count in range(NUM_RANKS + 1)]
    assert rates == sorted(rates)
    assert rates[2] == 0 < rates[3]
    plan = capacity().best(8)
    assert sorted(layer for layers in plan.layers for layer in layers) == list(range(12))


def test_a_cut_is_uneven_where_it_must_be():
    sizes = sorted(len(layers) for layers in capacity().best(7).layers)
    assert sum(sizes) == 12
    assert sizes[0] < sizes[-1]


def test_a_report_is_text_json_and_a_picture(tmp_path):
    report = replay(generate("spot", num_ranks=NUM_RANKS, duration_s=20_000), capacity())
    lines = report.text().splitlines()
    assert lines[0].startswith("spot, seed 0: 8 ranks, 5.56 h, ")
    assert [line.split()[0] for line in lines[2:6]] == list(POLICIES)
    report.save(tmp_path / "fleet.json")
    saved = json.loads((tmp_path / "fleet.json").read_text())
    assert [policy["policy"] for policy in saved["policies"]] == list(POLICIES)
    assert saved["policies"][0]["share_of_planned"] == report["elastic"].share
    report.save(tmp_path / "fleet.svg")
    picture = (tmp_path / "fleet.svg").read_text()
    assert all(f'id="{name}"' in picture for name in [*POLICIES, "alive"])
    with pytest.raises(InputError, match=r"saved as \.json, .*; got 'fleet\.txt'; change the suffix"):
        report.save(tmp_path / "fleet.txt")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policies": ["magic"]}, "one of|names of policies: elastic, .*; got 'magic'; choose from them"),
        ({"policies": "elastic"}, "names of policies: .*; got 'elastic'; pass a list"),
        ({"trace": "spot"}, "trace must be a FleetTrace; got 'spot'; pass"),
        ({"capacity": 3}, "capacity must be a Capacity; got 3; pass"),
        ({"costs": 3}, "costs must be FleetCosts; got 3; for example"),
        ({"trace": generate("spot", num_ranks=9)}, "the trace has 9, the capacity 8; pass num_ranks=9"),
    ],
)
def test_wrong_arguments_are_errors(given, message):
    arguments = {"trace": outage(1, at=5), "capacity": capacity()} | given
    with pytest.raises(InputError, match=message):
        replay(arguments.pop("trace"), arguments.pop("capacity"), **arguments)


@pytest.mark.parametrize(
    ("name", "value"), [("restart_s", -1), ("notice_s", "soon"), ("link_bytes_per_s", 0), ("start_s", float("nan"))]
)
def test_costs_are_numbers_that_make_sense(name, value):
    with pytest.raises(InputError, match=f"{name} must be a number, .*; got .*; correct it"):
        FleetCosts(**{name: value})


@pytest.mark.parametrize("name", ["batch_size", "num_ranks", "effort", "microbatch_rows"])
def test_a_capacity_needs_counts(name):
    with pytest.raises(InputError, match=f"{name} must be a whole number, at least 1; got 0; pass 1 or more"):
        Capacity(profile(), **({"batch_size": 32, "num_ranks": 8} | {name: 0}))
