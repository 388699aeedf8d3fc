"""NORM: the norms of gradients as actions, which the updates of all stages need."""

from dataclasses import replace

import pytest

from pipesched import Action, Costs, Kind, Program, lower, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_norms, add_updates
from pipesched.testing.fake_executor import run_virtual
from tests.support.models import KINDS

TWO_RANKS = "microbatches 1\nrank 0: 0F0 0B0 0NORM0 0UPDATE0\nrank 1: 1F0 1B0 1NORM0 1UPDATE0\n"


def clipped(name, num_ranks=3, num_microbatches=4):
    return add_norms(add_updates(schedules.get(name).program(num_ranks, num_microbatches)))


@pytest.mark.parametrize("name", KINDS)
def test_a_norm_follows_the_last_gradient_of_its_stage(name):
    program = clipped(name)
    validate(program)
    validate(lower(program))
    assert Program.parse(str(program)) == program
    for stage in range(program.num_stages):
        rank, position = program.place(Action(stage, Kind.NORM, 0))
        last = program.orders[rank][position - 1]
        assert (last.stage, last.kind in (Kind.B, Kind.W), last.microbatch) == (stage, True, 3)
        assert set(program.needs(Action(stage, Kind.UPDATE, 0))) == {
            Action(other, Kind.NORM, 0) for other in range(program.num_stages)
        }
    without = program.orders.where(~program.columns.are(Kind.NORM))
    assert replace(program, orders=without) == add_updates(schedules.get(name).program(3, 4))
    assert add_norms(program) is program


def test_without_updates_no_norm_is_added():
    program = schedules.get("1f1b").program(2, 2)
    assert add_norms(program) is program


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("transfer", [0, 2])
def test_an_update_waits_for_the_norms_of_all_ranks(name, transfer):
    """On the virtual clock of the interpreter, too; messages of the norms travel as others do."""
    program = clipped(name)
    costs = Costs.uniform(program.num_stages, norm_s=1, update_s=2, transfer_s=transfer)
    trace = simulate(program, costs)
    ends = {span.action: span.end_s for span in trace.spans}
    starts = {span.action: span.start_s for span in trace.spans}
    placement = program.placement
    for stage in range(program.num_stages):
        for other in range(program.num_stages):
            lag = transfer * (placement[stage] != placement[other])
            assert starts[Action(stage, Kind.UPDATE, 0)] >= ends[Action(other, Kind.NORM, 0)] + lag
    assert simulate(lower(program), costs).makespan_s == trace.makespan_s == run_virtual(program, costs).makespan_s
    assert trace.makespan_s > simulate(add_updates(schedules.get(name).program(3, 4)), costs).makespan_s


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0NORM0 ", "", "1UPDATE0 needs 0NORM0, which no rank runs"),
        ("0B0 0NORM0", "0NORM0 0B0", "rank 0, position 1: a NORM must measure all gradients of its update; got 0NORM0"),
        ("0NORM0 0UPDATE0", "0UPDATE0 0NORM0", "0UPDATE0 needs 0NORM0 before it on this rank"),
        ("0NORM0", "0NORM1", "outside the program's 2 stages and 1 micro-batch"),
        ("0UPDATE0", "", "every gradient must be applied by an update"),
    ],
)
def test_wrong_norms_are_refused(old, new, message):
    validate(Program.parse(TWO_RANKS))
    with pytest.raises(ScheduleError, match=message):
        validate(Program.parse(TWO_RANKS.replace(old, new)))


def test_norms_without_updates_are_refused():
    text = TWO_RANKS.replace(" 0UPDATE0", "").replace(" 1UPDATE0", "")
    with pytest.raises(ScheduleError, match="a NORM needs an UPDATE that uses it"):
        validate(Program.parse(text))
