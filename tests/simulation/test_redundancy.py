"""MIRROR, KEEP and REPLAY: their simulated times, their memory, and the run on fake stages, which agrees."""

import json
from dataclasses import asdict, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Plan, Trace, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.planning.step_shares import step_shares
from pipesched.program.completion import Completion
from pipesched.program.lowering import add_redundancy, add_updates
from pipesched.simulation.communication import communication
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.links import Link, Links
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.simulator import message_times
from pipesched.testing import run_fake
from tests.support.random_programs import quick, random_program

SHARED = ("chimera", "dualpipe")
# Fake stages do not overlap actions, as dualpipe-v does.
SCHEDULES = [name for name in schedules.names() if name not in (*SHARED, "dualpipe-v", "pipedream")]
KINDS = (Kind.MIRROR, Kind.KEEP, Kind.REPLAY)


def made(name="1f1b", num_ranks=4, num_microbatches=8, **own):
    return Completion(updates=True, redundancy=True, **own).complete(
        schedules.get(name).program(num_ranks, num_microbatches)
    )


def spans(trace, kind):
    """The starts and ends of a kind, keyed by stage."""
    return {span.action.stage: (span.start_s, span.end_s) for span in trace.spans if span.action.kind is kind}


def links(bytes_per_s=1, latency_s=0, **special):
    return Links(Link(latency_s, bytes_per_s), **special)


def test_a_rank_sends_then_keeps_then_replays_while_it_computes():
    costs = Costs.uniform(4, update_s=2, keep_s=1, gradient_bytes=3, links=links())
    trace = simulate(made(), costs)
    assert spans(trace, Kind.MIRROR) == dict.fromkeys(range(4), (0, 3))
    assert spans(trace, Kind.KEEP) == dict.fromkeys(range(4), (3, 4))
    assert spans(trace, Kind.REPLAY) == dict.fromkeys(range(4), (4, 6))
    plain = simulate(Completion(updates=True).complete(schedules.get("1f1b").program(4, 8)), costs)
    assert trace.by_rank == plain.by_rank
    assert (trace.makespan_s, trace.bubble_ratio, trace.bound_s) == (
        plain.makespan_s,
        plain.bubble_ratio,
        plain.bound_s,
    )
    assert {span.rank for span in trace.spans if span.action == Action(3, Kind.REPLAY, 0)} == {0}


def test_all_ranks_keep_once_they_know_that_the_last_gradients_have_arrived():
    slow = links(1, 0.5, special={(2, 3): Link(0.5, 0.25)})
    costs = Costs.uniform(4, keep_s=1, gradient_bytes=2, links=slow)
    trace = simulate(made(), costs)
    assert spans(trace, Kind.MIRROR) == {0: (0, 2.5), 1: (0, 2.5), 2: (0, 8.5), 3: (0, 2.5)}
    assert spans(trace, Kind.KEEP) == {0: (9, 10), 1: (9, 10), 2: (9, 10), 3: (8.5, 9.5)}  # rank 3 received them


def test_a_mirror_takes_no_time_if_nothing_is_known_of_links():
    trace = simulate(made(), Costs.uniform(4, gradient_bytes=10**9))
    assert spans(trace, Kind.MIRROR) == dict.fromkeys(range(4), (0, 0))
    late = simulate(made(), Costs.uniform(4, transfer_s=Fraction(1, 3), keep_s=1))
    assert spans(late, Kind.MIRROR)[2] == (0, Fraction(1, 3))
    assert spans(late, Kind.KEEP)[2] == (Fraction(2, 3), Fraction(5, 3))
    own = simulate(made(), Costs.uniform(4, gradient_bytes=3, overheads=Overheads(0, link=Link(0, 1))))
    assert spans(own, Kind.MIRROR)[1] == (0, 3)


def test_an_update_waits_for_the_keep_of_its_stage():
    costs = Costs.uniform(4, update_s=1, keep_s=100)
    trace = simulate(made(norms=True), costs)
    assert spans(trace, Kind.UPDATE) == dict.fromkeys(range(4), (100, 101))
    assert_same_times(run_fake(made(norms=True), costs), trace)


def test_a_step_lasts_until_all_copies_are_updated():
    costs = Costs.uniform(4, update_s=1, replay_s=100)
    trace = simulate(made(), costs)
    assert trace.makespan_s == 100
    assert trace.busy_s == (25,) * 4


@pytest.mark.parametrize("name", [name for name in schedules.names() if name not in (*SHARED, "pipedream")])
def test_a_step_is_not_longer_if_gradients_take_half_of_the_bubble(name):
    plain = Completion(updates=True).complete(schedules.get(name).program(4, 8))
    work = tuple(1 / share for share in plain.shares)
    costs = Costs(work, work, work, update_s=(0.5,) * plain.num_stages, gradient_bytes=(1,) * plain.num_stages)
    before = simulate(plain, costs)
    bubble_s = before.bubble_ratio * before.makespan_s
    stages_per_rank = plain.num_stages / 4
    costs = replace(costs, keep_s=costs.update_s, links=links(stages_per_rank / (bubble_s / 2)))
    program = made(name)
    after = simulate(program, costs)
    assert program.index.has(Kind.REPLAY)
    assert after.makespan_s == pytest.approx(before.makespan_s)
    ends = max(span.end_s for row in after.redundancy_by_rank for span in row)
    assert ends == pytest.approx(bubble_s / 2 + stages_per_rank * 2 * 0.5)


@pytest.mark.parametrize("factor", [1, 10, 100])
def test_a_step_lasts_as_long_as_the_slower_of_its_work_and_its_copies(factor):
    costs = Costs.uniform(4, update_s=1, keep_s=0, replay_s=factor, gradient_bytes=factor, links=links())
    plain = simulate(Completion(updates=True).complete(schedules.get("1f1b").program(4, 8)), replace(costs, links=None))
    assert simulate(made(), costs).makespan_s == max(plain.makespan_s, 2 * factor)


@quick
@given(st.data())
def test_a_run_on_fake_stages_takes_the_simulated_times(data):
    name = data.draw(st.sampled_from(SCHEDULES))
    plain = schedules.get(name).program(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)))
    completion = Completion(updates=True, redundancy=True, norms=data.draw(st.booleans()))
    check_fake(completion.complete(plain), data)


@quick
@given(st.integers(0, 10**6), st.data())
def test_random_programs_run_on_fake_stages_in_the_simulated_times(seed, data):
    rng = data.draw(st.randoms(use_true_random=False))
    plain = random_program(rng, 3, rng.randint(1, 4), rng.randint(1, 3), skips=seed % 2)
    check_fake(add_redundancy(add_updates(plain)), data)


def check_fake(program, data):
    def times(most=9):
        return data.draw(st.lists(st.integers(0, most), min_size=program.num_stages, max_size=program.num_stages))

    costs = Costs(
        times(),
        times(),
        times(),
        update_s=times(),
        keep_s=times(40),
        replay_s=times(20),
        gradient_bytes=times(40),
        transfer_s=data.draw(st.integers(0, 3)),
        links=data.draw(st.sampled_from([None, links(0.5, 2), links(1, 1, special={(0, 1): Link(3, 0.25)})])),
        other_s=data.draw(st.sampled_from([{}, {"MIRROR": [2] * program.num_stages}])),
    )
    assert_same_times(run_fake(program, costs), simulate(program, costs))


def assert_same_times(fake, simulated):
    assert fake.redundancy_by_rank == simulated.redundancy_by_rank
    assert fake.by_rank == simulated.by_rank
    assert fake.makespan_s == simulated.makespan_s


def test_a_run_that_sleeps_starts_all_actions():
    slept = run_fake(made(num_microbatches=2), Costs.uniform(4).scaled(0), sleeping=True)
    assert [len(spans(slept, kind)) for kind in KINDS] == [4, 4, 4]


def test_unknown_times_are_those_of_the_update_and_of_copies_to_the_host():
    costs = Costs.uniform(2, update_s=3, weight_bytes=10, optimizer_bytes=20, offload_bytes=4, offload_s=2)
    assert costs.times(Kind.REPLAY) == (3, 3)
    assert costs.times(Kind.KEEP) == (15, 15)
    assert Costs.uniform(2, weight_bytes=10).times(Kind.KEEP) == (0, 0)
    assert replace(costs, update_s=(5, 5)).times(Kind.REPLAY) == (5, 5)
    given = replace(costs, keep_s=(0, 0), replay_s=(0, 7))
    assert (given.times(Kind.KEEP), given.times(Kind.REPLAY)) == ((0, 0), (0, 7))
    assert Costs.from_dict(json.loads(json.dumps(given.to_dict()))) == given
    assert given.scaled(2).replay_s == (0, 14)
    assert costs.scaled(2).times(Kind.KEEP) == (30, 30)


def test_costs_without_redundancy_are_written_as_before():
    assert not {"keep_s", "replay_s"} & Costs.uniform(2, update_s=1, offload_s=1, offload_bytes=1).to_dict().keys()


def test_times_of_too_few_stages_are_refused():
    with pytest.raises(ScheduleError, match="forward_s has 2, keep_s has 1; make the numbers agree"):
        Costs((1, 1), (1, 1), (1, 1), keep_s=(1,))


def test_measured_times_correct_those_of_keep_and_replay():
    costs = Costs.uniform(4, update_s=1, keep_s=2, replay_s=3, gradient_bytes=3, links=links())
    trace = simulate(made(), costs)
    found = measured_costs([trace], 4, replace(costs, keep_s=(), replay_s=()))
    assert (found.keep_s, found.replay_s) == (costs.keep_s, costs.replay_s)
    assert "MIRROR" not in measured_costs([trace], 4).other_s


def test_host_copies_are_counted_apart_from_the_device():
    sizes = {"weight_bytes": (1, 2, 3, 4), "optimizer_bytes": (10, 20, 30, 40), "gradient_bytes": (100, 200, 300, 400)}
    costs = replace(Costs.uniform(4), **sizes)
    plain = rank_memory(Completion(updates=True).complete(schedules.get("1f1b").program(4, 8)), costs)
    memory = rank_memory(made(), costs)
    # its own weights, optimizer state and gradients, and those of the rank before
    assert [own.host_copies for own in memory] == [111 + 444, 222 + 111, 333 + 222, 444 + 333]
    assert [replace(own, host_copies=0) for own in memory] == [*plain]
    assert [own.total_bytes for own in memory] == [own.total_bytes for own in plain]
    assert [own.total_with_host_bytes - own.total_bytes for own in memory] == [own.host_copies for own in memory]
    assert [own.host_copies for own in plain] == [0] * 4


def test_with_replicas_the_host_holds_only_what_is_kept():
    costs = replace(Costs.uniform(2, weight_bytes=3, optimizer_bytes=6, gradient_bytes=3), reduce_s=((1,), (1,)))
    program = made("1f1b", 2, 4, buckets=(1, 1))
    assert [own.host_copies for own in rank_memory(program, costs)] == [9, 9]
    trace = simulate(program, replace(costs, keep_s=(2, 2)))
    assert spans(trace, Kind.KEEP) == {0: (0, 2), 1: (0, 2)}


def test_the_gradients_of_copies_count_as_sent():
    costs = Costs.uniform(4, gradient_bytes=300, output_bytes=10, links=links())
    plain = Completion(updates=True).complete(schedules.get("1f1b").program(4, 8))
    sent, seconds = message_times(made(), costs)
    before = message_times(plain, costs)
    assert [one - other for one, other in zip(sent, before[0], strict=True)] == [300] * 4
    assert [one - other for one, other in zip(seconds, before[1], strict=True)] == [300] * 4
    assert communication(made(), costs, None)[0].sent_bytes == 460


def test_the_shares_of_a_step_with_a_slow_copy_add_up():
    costs = Costs.uniform(4, update_s=1, keep_s=100)
    shares = asdict(step_shares(made(), costs))
    del shares["busiest"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["recomputation"] > 0.5


def test_a_trace_with_redundancy_is_written_and_read(tmp_path):
    trace = simulate(made(), Costs.uniform(4, update_s=1, keep_s=1, gradient_bytes=3, links=links()))
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    trace.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {rows[event["tid"]] for event in events if event["name"] == "0KEEP0"} == {"redundancy"}
    assert Trace.load(tmp_path / "trace.json").redundancy_by_rank[0][0].action == Action(0, Kind.MIRROR, 0)


def test_a_plan_states_whether_copies_of_stages_are_kept():
    costs = Costs.uniform(4, update_s=1, weight_bytes=1, optimizer_bytes=2, gradient_bytes=4)
    stages = tuple((str(stage),) for stage in range(4))
    plain = Plan(stages, "1f1b", schedules.get("1f1b").program(4, 8), costs=costs, completion=Completion(updates=True))
    plan = replace(plain, completion=Completion(updates=True, redundancy=True))
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["completion"] == {"updates": True, "norms": False, "redundancy": True}
    assert plain.to_dict()["completion"] == {"updates": True, "norms": False}
    assert {name for name in values if values[name] != plain.to_dict()[name]} <= {"completion"}
    loaded = Plan.from_dict(values)
    assert loaded.completion.redundancy
    assert loaded.completed == plan.completed == made()
    assert not Plan.from_dict(plain.to_dict()).completion.redundancy
    assert [own.host_copies for own in loaded.memory()] == [7 + 7] * 4
    with pytest.raises(ScheduleError, match="redundancy of a plan must be True or False"):
        Plan.from_dict({**values, "completion": {"updates": True, "redundancy": 1}})


@pytest.mark.parametrize("contended", [False, True])
def test_messages_of_a_program_do_not_change_the_times_of_redundancy(contended):
    costs = Costs.uniform(4, update_s=1, keep_s=2, gradient_bytes=30, output_bytes=1, links=links(contended=contended))
    program = made("interleaved-1f1b", 2)
    plain, lowered = simulate(program, costs), simulate(lower(program), costs)
    assert plain.redundancy_by_rank == lowered.redundancy_by_rank
    assert plain.by_rank == lowered.by_rank
    assert spans(plain, Kind.MIRROR) == {0: (0, 30), 1: (0, 30), 2: (30, 60), 3: (30, 60)}
    assert spans(plain, Kind.KEEP) == {0: (60, 62), 1: (60, 62), 2: (62, 64), 3: (62, 64)}
