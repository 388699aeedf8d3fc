"""Gathers of weights in the simulation: their lane, what hides them, their memory, and their costs."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Program, Trace, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.actions import Lane
from pipesched.program.dependencies import WEIGHT_USES
from pipesched.program.lowering import add_gathers, add_norms, add_recompute, add_reductions, add_updates
from pipesched.simulation.communication_time import CommunicationTime
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.simulator import step_time
from tests.support.random_programs import costs_for, fitting, programs, quick

SHARED = {"chimera", "dualpipe"}
ASYNCHRONOUS = {"pipedream", "pipedream-2bw"}
NAMES = [name for name in schedules.names() if name not in SHARED | ASYNCHRONOUS]


@pytest.mark.parametrize("name", NAMES)
def test_gathers_lengthen_no_step_below_that_without_and_lowering_changes_no_time(name):
    """Every schedule, ranks and micro-batches: at least as long as without, at most longer by all gathers."""
    for num_ranks, m in ((1, 2), (3, 4), (4, 7)):
        program = schedules.get(name).program(fitting(name, num_ranks), m)
        count = program.num_stages
        costs = Costs.uniform(count, transfer_s=1, unshard_s=2, reduce_s=(1, 2), norm_s=1, update_s=1)
        plain = add_norms(add_updates(add_reductions(program, 2)))
        without = simulate(plain, costs)
        for keep in (True, False):
            made = add_gathers(plain, keep=keep)
            trace = simulate(made, costs)
            gathers = sum(action.kind is Kind.UNSHARD for action in made.columns)
            assert without.makespan_s <= trace.makespan_s <= without.makespan_s + 2 * gathers
            assert trace.bound_s <= trace.makespan_s == simulate(lower(made), costs).makespan_s
            assert trace.busy_s == without.busy_s
            free = simulate(made, replace(costs, unshard_s=()))
            assert free.makespan_s == without.makespan_s


@settings(quick, max_examples=30)
@given(st.data())
def test_gathers_run_in_turn_with_reductions_and_before_their_uses(data):
    """Random programs and costs; every span against the rules."""
    program = data.draw(programs())
    program = add_reductions(program, data.draw(st.integers(0, 2)))
    program = add_gathers(program, keep=data.draw(st.booleans()), prefetch=data.draw(st.integers(0, 2)))
    seconds = tuple(data.draw(st.integers(0, 9)) for _ in range(program.num_stages))
    buckets = tuple((2,) * count for count in program.buckets)
    costs = replace(data.draw(costs_for(program)), unshard_s=seconds, reduce_s=buckets)
    trace = simulate(program, costs)
    assert trace.makespan_s == step_time(program, costs) == simulate(lower(program), costs).makespan_s
    assert trace.bound_s is None or trace.bound_s <= trace.makespan_s
    spans = {span.action: span for span in trace.spans}
    for order in program.orders:
        free = now = 0
        gathered = {}
        for action in order:
            span = spans[action]
            if action.kind in (Kind.UNSHARD, Kind.REDUCE):
                assert span.lane is Lane.COLLECTIVE
                assert span.start_s >= free
                free = span.end_s
            if action.kind is Kind.UNSHARD:
                assert span.start_s >= now
                assert span.end_s == span.start_s + seconds[action.stage]
                gathered[action.stage] = span.end_s
            elif action.kind is Kind.RESHARD:
                assert span.start_s == span.end_s == max(now, gathered.pop(action.stage))
            elif action.kind in WEIGHT_USES:
                assert span.start_s >= gathered[action.stage]
                now = span.end_s
    parts = zip(trace.communication_times, trace.by_rank, strict=False)
    assert all(min(own) >= 0 and own.under_compute_s <= sum(s.end_s - s.start_s for s in row) for own, row in parts)
    total = sum(s.end_s - s.start_s for s in trace.spans if s.lane is Lane.COLLECTIVE)
    assert sum(own.total_s for own in trace.communication_times) == pytest.approx(total)


def test_1f1b_waits_for_the_first_gather_only():
    """4 ranks, 8 micro-batches, F = 1, B = 2, a gather of 1: rank 0 waits for it, ranks 1 to 3 gather meanwhile."""
    plain = schedules.get("1f1b").program(4, 8)
    trace = simulate(add_gathers(plain), Costs.uniform(4, unshard_s=1))
    assert trace.makespan_s == simulate(plain, Costs.uniform(4)).makespan_s + 1
    assert trace.communication_times[0] == CommunicationTime(0, 0, 1)
    assert trace.communication_times[1:] == (CommunicationTime(1, 0, 0),) * 3
    assert trace.hidden_communication == 0.75


def test_a_prefetched_gather_runs_under_compute():
    """2 stages on one rank, gathers of 1 and F = B = 1: with prefetch=1, only the first gather is waited for."""
    program = Program.parse("microbatches 1\nplacement 0 0\nrank 0: 0F0 1F0 1B0 0B0\n")
    costs = Costs.uniform(2, input_grad_s=1, weight_grad_s=0, unshard_s=1)
    for prefetch, makespan_s, times in (
        (0, 7, CommunicationTime(0, 0, 3)),
        (1, 5, CommunicationTime(0, 2, 1)),
    ):
        trace = simulate(add_gathers(program, keep=False, prefetch=prefetch), costs)
        assert (trace.makespan_s, trace.communication_times) == (makespan_s, (times,))
        assert len(trace.collectives_by_rank[0]) == 3


def test_gathers_are_exposed_only_if_the_next_action_starts_at_their_end():
    """Gathers of 0..4, 6..8 and 10..12; compute 4..5, 7..9 and 13..14."""
    computes = [(4, 5), (7, 9), (13, 14)]
    assert CommunicationTime.of((), computes, 14, [(0, 4)]) == CommunicationTime(0, 0, 4)
    assert CommunicationTime.of((), computes, 14, [(6, 8)]) == CommunicationTime(1, 1, 0)
    assert CommunicationTime.of((), computes, 14, [(10, 12)]) == CommunicationTime(2, 0, 0)
    assert CommunicationTime.of([(14, 15)], computes, 14, [(0, 4)]) == CommunicationTime(0, 0, 5)


def test_a_measured_action_that_starts_a_little_after_a_gather_has_waited_for_it():
    assert CommunicationTime.of((), [(1.02, 2)], 2, [(0, 1)]).exposed_s == 1
    assert CommunicationTime.of((), [(1.2, 2)], 2, [(0, 1)]).exposed_s == 0


def test_gathered_weights_are_memory_until_their_end():
    """2 stages on a rank, whole weights of 10 and 20 bytes: kept 30; gathered for each use 20, or 30 if prefetched."""
    program = schedules.get("interleaved-1f1b").program(2, 4, chunks_per_rank=2)
    costs = Costs.uniform(4, weight_bytes=3, gathered_bytes=10)
    costs = replace(costs, gathered_bytes=(10, 10, 20, 20))
    for keep, prefetch, expected in ((True, 1, 30), (False, 1, 30), (False, 0, 20)):
        made = add_gathers(program, keep=keep, prefetch=prefetch)
        found = rank_memory(made, costs)
        assert [own.gathered for own in found] == [expected] * 2
        assert [own.total_bytes for own in found] == [expected + 6] * 2
        assert simulate(made, costs).peak_bytes == (expected, expected)
    assert [own.gathered for own in rank_memory(program, costs)] == [0, 0]


def test_whole_weights_are_freed_before_gradients_are_copied_for_their_reduction():
    program = add_reductions(add_gathers(schedules.get("gpipe").program(2, 2)), 1)
    costs = Costs.uniform(2, gathered_bytes=100, reduce_bytes=40)
    found = rank_memory(program, costs)[1]  # a stage with a producer reduces after its last backward
    assert (found.gathered, found.reductions, found.total_bytes) == (100, 0, 100)


def test_a_recomputed_action_uses_gathered_weights():
    program = schedules.get("interleaved-1f1b").program(2, 4)
    made = add_gathers(add_recompute(program, "always"), keep=False, prefetch=0)
    plain = add_gathers(program, keep=False, prefetch=0)
    costs = Costs.uniform(4, unshard_s=1)
    assert simulate(made, costs).makespan_s > simulate(plain, costs).makespan_s
    assert made.columns.are(Kind.UNSHARD).sum() == plain.columns.are(Kind.UNSHARD).sum()


def test_costs_of_gathers():
    costs = Costs.uniform(3, unshard_s=2, gathered_bytes=8)
    assert costs.seconds(Action(1, Kind.UNSHARD, 5)) == 2
    assert costs.seconds(Action(1, Kind.RESHARD, 5)) == 0
    assert costs.scaled(2).unshard_s == (4,) * 3
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert not {"unshard_s", "gathered_bytes"} & set(Costs.uniform(3).to_dict())
    with pytest.raises(ScheduleError, match="unshard_s of stage 1"):
        Costs((1, 1), (1, 1), (1, 1), unshard_s=(1, -1))
    with pytest.raises(ScheduleError, match="gathered_bytes of stage 0"):
        Costs.uniform(2, gathered_bytes=1.5)


def test_a_trace_keeps_its_gathers_in_files_and_measured_gathers_become_costs():
    costs = replace(Costs.uniform(4), unshard_s=(1, 2, 3, 0))
    trace = simulate(add_gathers(schedules.get("interleaved-1f1b").program(2, 9), keep=False), costs)
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    assert measured_costs([trace, trace], 4, Costs.uniform(4)).unshard_s == costs.unshard_s
    events = [event for event in trace.chrome_events() if event.get("cat") == "UNSHARD"]
    assert {event["tid"] for event in events} == {2}
