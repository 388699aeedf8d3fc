"""Each row of the table of kinds, through everything that reads it."""

import copy
import pickle
import re
from dataclasses import fields, replace
from functools import cache

import matplotlib.pyplot as plt
import pytest
import torch

from pipesched import Action, Costs, Kind, Trace, lower, schedules, simulate, validate, viz
from pipesched.errors import ExecutionError, ScheduleError
from pipesched.program.actions import NUMBERED, OTHER_END, Holding, Lane, Queue
from pipesched.program.lowering import (
    add_gathers,
    add_norms,
    add_offloading,
    add_recompute,
    add_reductions,
    add_redundancy,
    add_updates,
)
from pipesched.program.program import Program
from pipesched.runtime.executors.threads import RunSpec, ThreadExecutor
from pipesched.runtime.stage.copied_stage import CopiedStage
from pipesched.runtime.stage.stage import Stage
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.trace import Span
from pipesched.testing import FakeStage, run_fake
from pipesched.testing.fake_executor import _VirtualClock
from pipesched.viz.colours import GREY, colour

every_kind = pytest.mark.parametrize("kind", Kind)
FIELDS = {field.name for field in fields(Costs)}
SIZES = sorted(name for name in FIELDS if name.endswith("_bytes"))
#: Times of which no two are equal.
COSTS = Costs.uniform(
    2,
    **{name: number for number, name in enumerate(sorted({name for kind in Kind for name in kind.row.costs}), 1)},
    transfer_s=0.25,
    other_s={"FREE": 20, "RESHARD": 30},
)


@cache
def programs():
    """Programs on two ranks that contain every kind."""
    plain = schedules.get("1f1b").program(2, 6)
    split = schedules.get("zb-h1").program(2, 6)
    trained = add_norms(add_updates(split))
    return [
        lower(add_redundancy(add_updates(plain))),
        lower(add_gathers(add_reductions(trained, 1))),
        lower(add_recompute(plain, "always")),
        lower(add_offloading(schedules.get("gpipe").program(2, 6), {0})),
    ]


def program_with(kind):
    return next(program for program in programs() if program.index.has(kind))


@every_kind
def test_a_kind_is_its_text(kind):
    assert kind.name == kind.value == str(kind) == kind.row.text == kind
    assert re.fullmatch("[A-Z_]+", kind)
    assert Kind(kind.row.text) is kind is Kind[kind.name]
    assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind
    assert hash(kind) == hash(kind.row.text)


@every_kind
def test_the_names_in_a_row_are_those_of_kinds_costs_and_methods(kind):
    row = kind.row
    assert {*row.costs, *filter(None, [row.transient])} <= FIELDS
    assert all(need.kinds for need in row.needs)
    assert all(Kind(name).row.costs for name in row.instead)
    if row.transfer:
        assert Kind(row.transfer.result_of)
        assert OTHER_END[OTHER_END[kind]] is kind
        assert row.transfer.sends != Kind(row.transfer.other_end).row.transfer.sends
    runs_on = CopiedStage if row.on_copy else Stage
    if not row.transfer:
        assert all(callable(getattr(owner, row.handler)) for owner in (runs_on, FakeStage(0, COSTS)))
    assert not row.spans or callable(getattr(runs_on, row.spans))
    assert (row.lane is Lane.COLLECTIVE) == (row.queue is Queue.COLLECTIVES)
    assert row.queue is None or row.lane is not Lane.COMPUTE  # other actions would not wait for its end
    assert (row.lane is Lane.REDUNDANCY) == (row.queue is Queue.REDUNDANCY)


@every_kind
def test_actions_of_a_kind_are_written_and_read(kind):
    program = program_with(kind)
    assert Program.parse(str(program)) == program
    action = next(action for action in program.columns if action.kind is kind)
    assert Action.parse(str(action)) == action
    assert str(action).startswith(f"{action.stage}{kind}{action.microbatch}")


@every_kind
def test_an_action_before_an_action_that_it_needs_is_refused(kind):
    program = program_with(kind)
    validate(program)
    own = [action for action in program.columns if action.kind is kind]
    pairs = [(action, need) for action in own for need in program.needs(action) if home(program, need, action)]
    without = (Kind.RECV_F, Kind.RECV_B, Kind.REDUCE, Kind.UNSHARD, Kind.MIRROR, Kind.REPLAY)
    assert bool(pairs) != (kind in without)
    for action, need in pairs[:1]:
        orders = [[one for one in order if one != action] for order in program.orders]
        order = orders[program.place(action)[0]]
        order.insert(order.index(need), action)
        with pytest.raises(ScheduleError, match=f"{action} needs {need} before it on this rank"):
            validate(program.with_orders(orders))


def home(program, *actions):
    """Whether all these actions are on one rank."""
    return len({program.place(action)[0] for action in actions}) == 1


@every_kind
def test_a_simulated_action_takes_the_time_that_the_costs_have_for_it(kind):
    if kind in (Kind.RECV_F, Kind.RECV_B):
        due = None  # a receive lasts until the message arrives
    elif kind is Kind.REDUCE:
        due = COSTS.reduce_s[0][0]
    elif kind is Kind.MIRROR:
        due = COSTS.transfer_s  # a message without links
    elif kind.row.costs:
        due = sum(getattr(COSTS, name)[0] for name in kind.row.costs)
    else:
        due = COSTS.other_s.get(kind, (0,))[0]
    spans = [span for span in simulate(program_with(kind), COSTS).spans if span.action.kind is kind]
    assert spans
    assert {span.end_s - span.start_s for span in spans} == {due} or due is None
    assert {COSTS.seconds(span.action) for span in spans} == {0 if kind is Kind.MIRROR else due or 0}
    assert {span.lane for span in spans} == {kind.row.lane}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.row.transient])
def test_the_memory_that_a_kind_needs_while_it_runs_is_a_transient_of_its_rank(kind):
    def most(size):
        costs = Costs.uniform(2, **{name: size * (name == kind.row.transient) for name in SIZES})
        return max(own.transients for own in rank_memory(program_with(kind), costs))

    assert (most(0), most(7)) == (0, 7)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.row.takes or kind.row.gives])
def test_memory_changes_when_an_action_that_takes_or_gives_it_runs(kind):
    costs = replace(COSTS, **dict.fromkeys(["input_bytes", "offload_bytes", "weight_grad_bytes"], (1, 1)))
    costs = replace(costs, **dict.fromkeys(["activation_bytes", "gathered_bytes"], (100, 100)))
    trace = simulate(program_with(kind), costs)
    changes = {time_s for rank in range(2) for time_s, _ in trace.memory(rank)}
    spans = [span for span in trace.spans if span.action.kind is kind]
    versioned = {Kind.UPDATE, Kind.REDUCE}  # no old weights are in use; the copies of gradients are not in a trace
    assert kind in versioned or changes & {time_s for span in spans for time_s in (span.start_s, span.end_s)}


@every_kind
def test_measured_times_correct_the_costs_of_a_kind_unless_it_is_a_copy(kind):
    trace = simulate(program_with(kind), COSTS)
    assert Trace.from_dict(trace.to_dict()) == trace
    found = measured_costs([trace], 2)
    if kind.row.costs:
        due = getattr(COSTS, kind.row.costs[0])
        if kind is Kind.UPDATE:
            due = COSTS.times(kind)
        assert getattr(found, kind.row.costs[0]) == ((0, 0) if kind.row.lane is Lane.COPY else due)


@pytest.mark.one_in(12)
@every_kind
def test_a_kind_is_drawn_in_its_colour_with_its_name(kind, tmp_path):
    trace = simulate(program_with(kind), COSTS)
    axes = viz.plot_timeline(trace)
    name = f"{kind.row.label} ({kind})" if kind.row.label else str(kind)
    drawn = kind.row.lane is not Lane.COPY
    assert (name in [text.get_text() for text in axes.get_legend().get_texts()]) == drawn
    assert colour(kind) == (kind.row.colour or GREY)
    axes.figure.savefig(tmp_path / "timeline.svg")
    axes.figure.savefig(tmp_path / "timeline.png")
    plt.close(axes.figure)
    assert not drawn or colour(kind) in (tmp_path / "timeline.svg").read_text(encoding="utf-8")
    assert viz.text_timeline(trace)


def test_the_colours_and_the_letters_of_kinds_differ():
    shown = [kind.row for kind in Kind if kind.row.lane is not Lane.COPY]
    colours = [row.colour for row in shown if row.colour]
    assert len({*colours}) == len(colours)
    assert sorted(row.letter for row in shown if row.lane is not Lane.COMPUTE) == ["", "K", "M", "R", "U"]


@every_kind
def test_a_kind_runs_on_fake_stages_on_a_virtual_clock_and_on_threads(kind):
    program = program_with(kind)
    actions = [action for action in program.columns if action.kind is kind]
    assert [span.action for span in run_fake(program, COSTS).spans if span.action.kind is kind] == actions
    no_time = Costs.uniform(2, forward_s=0, input_grad_s=0, weight_grad_s=0)
    executor = ThreadExecutor([torch.device("cpu")] * 2, 1)
    try:
        run = executor.run(RunSpec(program, {stage: FakeStage(stage, no_time) for stage in range(2)}), grad=False)
    finally:
        executor.close()
    assert [span.action for span in run.spans() if span.action.kind is kind] == actions


@pytest.mark.parametrize("kind", [kind for kind in Kind if not (kind.row.costs or kind.row.transfer)])
def test_a_time_without_a_field_of_its_own_is_the_same_on_fake_stages_and_in_the_simulator(kind):
    program = program_with(kind)
    untimed, timed = (Costs.uniform(2, other_s={kind: seconds}) for seconds in (0, 30))  # longer than a bubble

    assert run_fake(program, timed).makespan_s == simulate(program, timed).makespan_s
    assert simulate(program, timed).makespan_s > simulate(program, untimed).makespan_s


@every_kind
def test_the_number_of_an_action_counts_what_its_row_says(kind):
    program = program_with(kind)
    numbers = {action.microbatch for action in program.columns if action.kind is kind}
    count = {"micro-batch": range(6), "update": range(1), "bucket": range(1), "gather": range(1)}[kind.row.number]
    assert numbers <= {*count}
    assert (kind in NUMBERED) == (kind.row.number in ("bucket", "gather"))


def test_every_kind_of_memory_has_a_size_and_a_purpose():
    """A new member of `Holding` counts without another edit than its size. A REDUCE's copies are in `reduce_bytes`."""
    sizes = Costs.uniform(1).sizes()

    assert {*Holding} - {Holding.REDUCTION} == {*sizes}


def test_a_step_begins_with_a_copy_that_comes_first():
    first = Action(0, Kind.FETCH, 0)
    trace = Trace([Span(first, 0, 0, 2, first.lane), Span(Action(0, Kind.F, 0), 0, 2, 3, Lane.COMPUTE)], 1)

    assert trace.start_s == 0
    assert trace.makespan_s == 3


def test_the_fake_executor_refuses_a_started_action_that_it_does_not_know(monkeypatch):
    stage = FakeStage(0, Costs.uniform(1))
    row = replace(Kind.OFFLOAD.row, handler="unheard_of")
    monkeypatch.setattr(Kind.OFFLOAD, "row", row)

    with pytest.raises(ExecutionError, match=r"FakeStage has no unheard_of\(\) for OFFLOAD"):
        stage.unheard_of(0)


def test_copies_of_one_queue_run_one_after_the_other_on_the_virtual_clock(monkeypatch):
    monkeypatch.setattr(Kind.OFFLOAD, "row", replace(Kind.OFFLOAD.row, queue=Queue.FROM_HOST))
    clock = _VirtualClock()

    assert [clock.copy(Kind.FETCH, 4), clock.copy(Kind.OFFLOAD, 2)] == [4, 6]
