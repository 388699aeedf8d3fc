import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Costs, Program, lower, schedules, simulate
from pipesched.errors import DeadlockError, ScheduleError
from pipesched.program.lowering import add_recompute
from tests.support.random_programs import costs_for, fitting, programs, quick


def times(trace):
    return {str(span.action): (span.start_s, span.end_s) for span in trace.spans}


def test_two_ranks_by_hand():
    program = Program.parse("microbatches 2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")
    costs = Costs((2, 3), (1, 1), (3, 1), transfer_s=5)
    assert times(simulate(program, costs)) == {
        "0F0": (0, 2), "0F1": (2, 4), "0B0": (17, 21), "0B1": (22, 26),
        "1F0": (7, 10), "1B0": (10, 12), "1F1": (12, 15), "1B1": (15, 17),
    }  # fmt: skip


def test_a_split_backward_lets_the_other_rank_go_on_before_the_weight_gradient():
    program = Program.parse("microbatches 1\nrank 0: 0F0 0I0 0W0\nrank 1: 1F0 1I0 1W0")
    spans = times(simulate(program, Costs.uniform(2, weight_grad_s=5)))
    assert spans["1W0"] == (3, 8)
    assert spans["0I0"] == (3, 4)


def test_a_recompute_runs_before_the_gradient_arrives_and_costs_its_own_time():
    program = Program.parse("microbatches 1\nrank 0: 0F0 0R0 0B0\nrank 1: 1F0 1B0")
    spans = times(simulate(program, Costs.uniform(2, recompute_s=2)))
    assert spans["0R0"] == (1, 3)
    assert spans["0B0"] == (4, 6)


def test_there_is_no_latency_inside_a_rank():
    program = Program.parse("microbatches 1\nplacement 0 0\nrank 0: 0F0 1F0 1B0 0B0")
    assert simulate(program, Costs.uniform(2, transfer_s=100)).makespan_s == 6


@quick
@given(st.data())
def test_every_action_starts_as_early_as_its_rank_and_its_needs_allow(data):
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    trace = simulate(program, costs)
    ends = {span.action: span.end_s for span in trace.spans}
    for rank, row in enumerate(trace.by_rank):
        assert tuple(span.action for span in row) == program.orders[rank]
        free = 0
        for span in row:
            arrivals = [
                ends[need] + costs.transfer_s * (program.placement[need.stage] != rank)
                for need in program.needs(span.action)
            ]
            assert span.start_s == max([free, *arrivals])
            assert span.end_s - span.start_s == costs.seconds(span.action)
            free = span.end_s


@quick
@given(st.data())
def test_a_plain_and_a_lowered_program_take_equal_time_and_memory(data):
    program = add_recompute(data.draw(programs()), data.draw(st.sampled_from(["never", "always", "except_last"])))
    costs = data.draw(costs_for(program))
    plain, lowered = simulate(program, costs), simulate(lower(program), costs)
    assert lowered.makespan_s == plain.makespan_s
    assert lowered.by_rank == plain.by_rank
    assert lowered.peak_in_flight == plain.peak_in_flight


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", schedules.names())
@settings(quick, max_examples=15)
@given(st.data())
def test_every_schedule_takes_equal_time_plain_and_lowered(name, data):
    program = schedules.get(name).program(fitting(name, data.draw(st.integers(1, 6))), data.draw(st.integers(1, 10)))
    costs = data.draw(costs_for(program))
    assert simulate(lower(program), costs).by_rank == simulate(program, costs).by_rank


def test_a_receive_posted_early_delays_nothing():
    plain = Program.parse("microbatches 2\nforward-only\nrank 0: 0F0 0F1\nrank 1: 1F0 1F1")
    early = Program.parse(
        "microbatches 2\nforward-only\nrank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1\nrank 1: 1RECV_F0<0 1RECV_F1<0 1F0 1F1"
    )
    costs = Costs((10, 1), (1, 1), (1, 1), transfer_s=2)
    assert times(simulate(plain, costs))["1F0"] == (12, 13)
    assert simulate(early, costs).by_rank == simulate(plain, costs).by_rank


def test_the_trace_keeps_the_name_and_the_costs():
    costs = Costs.uniform(2)
    trace = simulate(schedules.get("1f1b").program(2, 3), costs)
    assert (trace.name, trace.costs, trace.num_ranks) == ("1f1b", costs, 2)


def test_a_rank_without_a_stage_is_idle():
    trace = simulate(Program.parse("microbatches 1\nplacement 1\nrank 0:\nrank 1: 0F0 0B0"), Costs.uniform(1))
    assert trace.busy_s == (0, 3)
    assert trace.bubble_ratio == 0.5


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match="the program has 2 stages, but the costs have 3; pass costs for 2 stages"):
        simulate(schedules.get("1f1b").program(2, 3), Costs.uniform(3))


def test_an_invalid_program_is_refused():
    program = Program.parse("microbatches 2\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError):
        simulate(program, Costs.uniform(2))
