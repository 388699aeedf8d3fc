"""Reductions of gradients in the simulation: their lane, what hides them, their memory, and ring collectives."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Link, Links, Program, Trace, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.actions import Lane
from pipesched.program.lowering import add_norms, add_reductions, add_updates
from pipesched.program.reductions import early_stages
from pipesched.simulation.communication_time import CommunicationTime
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.simulator import step_time
from tests.support.random_programs import costs_for, programs, quick

ASYNCHRONOUS = {"pipedream", "pipedream-2bw"}  # refused by add_reductions
LINKS = Links(inside=Link(1e-3, 1e6), between=Link(5e-3, 1e5), hosts=(0, 0, 1, 1))


def reduced(name="1f1b", p=4, m=8, buckets=4):
    return add_reductions(schedules.get(name).program(p, m), buckets)


def test_1f1b_hides_all_reductions_but_the_last_bucket_of_the_first_stage():
    """4 ranks, 8 micro-batches, F = 1, B = 2, reductions of 2 a stage in 4 buckets."""
    program, costs = reduced(), Costs.uniform(4, reduce_s=(Fraction(1, 2),) * 4)
    trace = simulate(program, costs)
    plain = simulate(schedules.get("1f1b").program(4, 8), costs)
    half = Fraction(1, 2)
    assert trace.communication_times == (CommunicationTime(0, 3 * half, half), *[CommunicationTime(2, 0, 0)] * 3)
    assert [own.in_bubbles_s / own.total_s for own in trace.communication_times[1:]] == [1, 1, 1]
    assert trace.makespan_s == plain.makespan_s + half == 33 + half
    assert trace.hidden_communication == 1 - half / 8
    assert trace.busy_s == plain.busy_s
    assert (plain.communication_times, plain.hidden_communication) == ((), None)
    assert trace.bubble_ratio == pytest.approx(1 - 24 / 33.5)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "hanayo", "looped-bfs"])
@pytest.mark.parametrize("share", [Fraction(1, 2), 1, 3])
def test_an_early_start_on_every_stage_would_not_shorten_the_step(name, share, monkeypatch):
    """Equal stages, reductions of a stage as long as half a B, a whole one, three."""
    program = reduced(name)
    costs = Costs.uniform(program.num_stages, reduce_s=(Fraction(2 * share, 4),) * 4)
    ours = step_time(program, costs)
    stages = range(program.num_stages)
    monkeypatch.setattr("pipesched.simulation.simulator.early_stages", lambda program: frozenset(stages))
    assert ours == step_time(program, costs)
    monkeypatch.setattr("pipesched.simulation.simulator.early_stages", lambda program: frozenset())
    assert ours < step_time(program, costs)


@quick
@given(st.data())
def test_reductions_run_in_turn_after_their_place_or_inside_the_last_backward(data):
    """Random programs, buckets and costs; every span against the rules, and nothing else moves."""
    plain = data.draw(programs())
    buckets = data.draw(st.lists(st.integers(0, 5), min_size=plain.num_stages, max_size=plain.num_stages))
    program = add_reductions(plain, buckets)
    times = tuple(tuple(data.draw(st.integers(0, 9)) for _ in range(count)) for count in program.buckets)
    costs = replace(data.draw(costs_for(plain)), reduce_s=times)
    trace = simulate(program, costs)
    assert trace.makespan_s == simulate(lower(program), costs).makespan_s == step_time(program, costs)
    assert trace.bound_s is None or trace.bound_s <= trace.makespan_s
    spans = {span.action: span for span in trace.spans}
    before = {span.action: span for span in simulate(plain, costs).spans}
    assert all(spans[action] == span for action, span in before.items())
    early = early_stages(program)
    for order in program.orders:
        compute = free = 0
        for action in order:
            span = spans[action]
            if action.kind is not Kind.REDUCE:
                last, compute = action, span.end_s
                continue
            ready = compute
            if action.stage in early:
                count = program.buckets[action.stage]
                assert last.kind is Kind.B
                assert last.stage == action.stage
                ready -= costs.seconds(last) * (count - 1 - action.microbatch) / count
            assert span.start_s == max(ready, free)
            assert span.end_s == span.start_s + times[action.stage][action.microbatch]
            assert span.lane is Lane.COLLECTIVE
            free = span.end_s
    for own, row in zip(trace.communication_times, trace.by_rank, strict=False):
        assert min(own) >= 0
        assert own.under_compute_s <= sum(span.end_s - span.start_s for span in row)
    whole = sum(map(sum, times))
    assert sum(own.total_s for own in trace.communication_times) == pytest.approx(whole)


@pytest.mark.parametrize("name", sorted({*schedules.names()} - ASYNCHRONOUS))
def test_no_schedule_with_reductions_is_below_its_bound_and_lowering_changes_no_time(name):
    program = reduced(name, 4, 5, 3)
    program = add_norms(add_updates(program)) if any(program.buckets) else program
    costs = Costs.uniform(program.num_stages, norm_s=1, update_s=2, transfer_s=1, reduce_s=(3, 1, 7))
    trace = simulate(program, costs)
    assert trace.bound_s <= trace.makespan_s == simulate(lower(program), costs).makespan_s


def test_a_norm_and_an_update_wait_for_the_reductions_of_their_stage():
    program = add_updates(reduced("1f1b", 2, 2, 2))
    costs = replace(Costs.uniform(2, update_s=1), reduce_s=((4, 4), (10, 20)))
    spans = {str(span.action): (span.start_s, span.end_s) for span in simulate(program, costs).spans}
    assert spans["0B1"] == (7, 9)
    assert (spans["0REDUCE0"], spans["0REDUCE1"], spans["0UPDATE0"]) == ((8, 12), (12, 16), (16, 17))
    assert spans["1B1"] == (5, 7)
    assert (spans["1REDUCE0"], spans["1REDUCE1"], spans["1UPDATE0"]) == ((7, 17), (17, 37), (37, 38))
    spans = {str(span.action): span.start_s for span in simulate(add_norms(program), costs).spans}
    assert (spans["0NORM0"], spans["1NORM0"], spans["0UPDATE0"], spans["1UPDATE0"]) == (16, 37, 37, 37)


def test_reductions_wait_for_no_contended_link_and_slow_no_rank():
    costs = Costs.uniform(4, output_bytes=200_000, reduce_s=(0.5, 0.5))
    program = reduced(buckets=2)
    for overheads in (None, Overheads(action_s=0.1, waking_s=0.05, crowding=(1, 1.2, 1.5, 2))):
        for links in (LINKS, replace(LINKS, contended=True)):
            both = replace(costs, links=links, overheads=overheads)
            plain = simulate(schedules.get("1f1b").program(4, 8), both)
            trace = simulate(program, both)
            assert trace.busy_s == pytest.approx(plain.busy_s)
            last = max(span.end_s for span in trace.spans if span.lane is Lane.COMPUTE)
            assert trace.makespan_s == pytest.approx(last + 0.5)
            assert trace.makespan_s == pytest.approx(step_time(program, both))
            assert trace.communication_times[0].under_compute_s == pytest.approx(0.5)


def test_more_buckets_than_microbatches_with_overheads():
    program = reduced("1f1b", 2, 1, 9)
    trace = simulate(program, Costs.uniform(2, reduce_s=(1,) * 9, overheads=Overheads(action_s=1)))
    assert [own.total_s for own in trace.communication_times] == [pytest.approx(9)] * 2


def test_costs_and_program_must_have_the_same_buckets():
    program = reduced(buckets=2)
    with pytest.raises(ScheduleError, match="stage 0 has 2 REDUCEs, but 3 times in reduce_s; make the numbers agree"):
        simulate(program, Costs.uniform(4, reduce_s=(1, 1, 1)))
    with pytest.raises(ScheduleError, match="stage 1 has 2 REDUCEs, but 1 times"):
        step_time(program, replace(Costs.uniform(4), reduce_s=((1, 2), 1, (), ())))
    assert simulate(program, Costs.uniform(4)).makespan_s == 33  # without times, reductions take none


def test_costs_of_buckets():
    costs = Costs.uniform(3, reduce_s=(1, 2), reduce_bytes=8)
    assert costs.reduce_s == ((1, 2),) * 3
    assert costs.reduce_bytes == ((8,),) * 3
    assert costs.scaled(2).reduce_s == ((2, 4),) * 3
    assert [costs.seconds(Action(1, Kind.REDUCE, bucket)) for bucket in (0, 1)] == [1, 2]
    assert Costs.uniform(3).reduce_s == ((), (), ())
    assert "reduce_s" not in Costs.uniform(3).to_dict()
    mixed = replace(costs, reduce_s=[[1, 2.5], 3, ()])
    assert mixed.reduce_s == ((1, 2.5), (3,), ())
    assert Costs.from_dict(json.loads(json.dumps(mixed.to_dict()))) == mixed
    with pytest.raises(ScheduleError, match="reduce_s of stage 1, bucket 1, is -1"):
        replace(Costs.uniform(2), reduce_s=(1, (1, -1)))
    with pytest.raises(ScheduleError, match=r"reduce_bytes of stage 0, bucket 0, is 1\.5"):
        Costs.uniform(2, reduce_bytes=(1.5, 2))


def test_a_trace_keeps_its_reductions_in_files_and_draws_them_in_a_lane_of_chrome(tmp_path):
    trace = simulate(reduced(buckets=2), Costs.uniform(4, reduce_s=(0.5, 0.5)))
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    trace.to_chrome(tmp_path / "step.json")
    loaded = Trace.load(tmp_path / "step.json").communication_times
    assert [pytest.approx(own) for own in trace.communication_times] == list(loaded)
    events = trace.chrome_events()
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "REDUCE"} == {lanes["collective"]}
    plain = simulate(schedules.get("1f1b").program(4, 8), Costs.uniform(4)).chrome_events()
    assert {e["args"]["name"] for e in plain if e["name"] == "thread_name"} == {"compute", "copy"}


def test_measured_reductions_become_costs():
    costs = replace(Costs.uniform(2), reduce_s=((1, 2), 3))
    program = reduced("1f1b", 2, 2, [2, 1])
    trace = simulate(program, costs)
    assert measured_costs([trace, trace], 2, Costs.uniform(2)).reduce_s == ((1, 2), (3,))
    plain = simulate(schedules.get("1f1b").program(2, 2), costs)
    assert measured_costs([plain], 2, costs).reduce_s == costs.reduce_s


def test_reduction_time_by_hand():
    """Reductions of 0..4 and 6..12; compute 1..2, 2..3 and 8..9; the last backward ends at 7."""
    found = CommunicationTime.of([(0, 4), (6, 12)], [(1, 2), (2, 3), (8, 9)], 7)
    assert found == CommunicationTime(in_bubbles_s=2 + 1, under_compute_s=2 + 1, exposed_s=4)
    assert found.total_s == 10
    assert CommunicationTime.of([], [(0, 1)], 1) == CommunicationTime(0, 0, 0)


def test_a_rank_holds_the_copies_of_a_stage_until_its_update():
    text = (
        "microbatches 1\nplacement 0 0\nrank 0: 0F0 1F0 1B0 1REDUCE0 1REDUCE1 1UPDATE0 0B0 0REDUCE0 0REDUCE1 0UPDATE0\n"
    )
    program = Program.parse(text)
    ones = {"forward_s": (1, 1), "input_grad_s": (1, 1), "weight_grad_s": (1, 1), "reduce_bytes": ((10, 7), (5, 1))}
    found = rank_memory(program, Costs(**ones, backward_transient_bytes=(100, 0)))[0]
    assert (found.reductions, found.transients) == (27, 100)  # 0B0: buckets of a first stage start inside
    found = rank_memory(program, Costs(**ones, backward_transient_bytes=(0, 100)))[0]
    assert (found.reductions, found.transients) == (0, 100)  # 1B0: stage 1 is not a first stage
    assert rank_memory(program, Costs.uniform(2))[0].total_bytes == 0
    held = rank_memory(program, replace(Costs.uniform(2), reduce_bytes=((3, 4), (5, 1))))[0]
    assert held.total_bytes == held.reductions == 11  # both copies, and the shards of the one that is being added


@settings(quick, max_examples=40)
@given(st.integers(1, 9), st.integers(0, 10**9), st.integers(0, 9), st.integers(1, 10**6))
def test_ring_collectives(count, size, latency, speed):
    """2(d - 1)/d n/BW + 2(d - 1) latency."""
    links = Links(inside=Link(latency, speed))
    expected = (count - 1) / count * size / speed + (count - 1) * latency
    assert links.all_gather_s(size, range(count)) == pytest.approx(expected)
    assert links.reduce_scatter_s(size, range(count)) == pytest.approx(expected)
    assert links.all_reduce_s(size, range(count)) == pytest.approx(2 * expected)


def test_the_slowest_link_of_the_ring_decides():
    assert LINKS.all_gather_s(1000, (0, 1)) == pytest.approx(1e-3 + 500 / 1e6)
    assert LINKS.all_gather_s(1000, (0, 1, 2, 3)) == pytest.approx(3 * (5e-3 + 250 / 1e5))
    for wrong in ((), (0, 0), (1, 2, 1)):
        with pytest.raises(ScheduleError, match="at least one rank, and no rank twice"):
            LINKS.all_reduce_s(10, wrong)
    with pytest.raises(ScheduleError, match="num_bytes"):
        LINKS.all_reduce_s(-1, (0, 1))
