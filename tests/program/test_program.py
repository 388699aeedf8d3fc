from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Program, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.dependencies import StageGraph, chain
from pipesched.program.lowering import add_recompute
from tests.support.random_programs import fitting, programs, quick

TEXT = """\
# a skip connection, one rank without a stage of its own
name skipping
microbatches 2

placement 0 1 0   # stage -> rank
edges 0-1 0-2 1-2
rank 0: 0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1
   # nothing here
rank 1: 1F0 1F1 1B0 1B1
"""


def variants(program):
    """A program as written, recomputed, and lowered."""
    recomputed = add_recompute(program, "except_last")
    return program, recomputed, lower(program), lower(recomputed), program.forward(), lower(program.forward())


@pytest.mark.parametrize("name", schedules.names())
@settings(quick, max_examples=8)
@given(num_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 10))
def test_parse_is_the_inverse_of_str_for_every_schedule(name, num_ranks, num_microbatches):
    for program in variants(schedules.get(name).program(fitting(name, num_ranks), num_microbatches)):
        read = Program.parse(str(program))
        assert read == program
        assert read.name == name
        assert str(read) == str(program)


@quick
@given(programs())
def test_parse_is_the_inverse_of_str_for_any_placement_and_stage_graph(program):
    for variant in variants(program):
        assert Program.parse(str(variant)) == variant


def test_comments_and_empty_lines_do_not_count():
    program = Program.parse(TEXT)
    assert program.name == "skipping"
    assert program.num_microbatches == 2
    assert program.placement == (0, 1, 0)
    assert program.graph == StageGraph.of(3, [(0, 1), (0, 2), (1, 2)])
    assert program.orders[1] == tuple(Action(1, kind, k) for kind in (Kind.F, Kind.B) for k in (0, 1))
    assert not program.forward_only


def test_repr_is_the_grid_of_the_orders():
    assert repr(schedules.get("1f1b").program(2, 3)).splitlines() == [
        "Program '1f1b': 2 ranks, 2 stages, 3 micro-batches",
        "rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2",
        "rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_repr_shows_overlapping_actions_in_one_column():
    program = Program.parse("microbatches 2\nrank 0: 0F0 0F1&0B0 0B1\n")
    assert repr(program).splitlines() == [
        "Program: 1 rank, 1 stage, 2 micro-batches",
        "rank 0 | 0F0 0F1&0B0 0B1",
    ]


def test_repr_shows_the_first_eight_ranks():
    lines = repr(schedules.get("gpipe").program(10, 20)).splitlines()
    assert lines[0] == "Program 'gpipe': 10 ranks, 10 stages, 20 micro-batches"
    assert len(lines) == 1 + 8 + 1
    assert [len(line.split(" | ")[1].split()) for line in lines[1:-1]] == [40] * 8
    assert lines[-1] == "not shown: 2 of 10 ranks, 80 of 400 actions; str(program) has all of them"


def test_repr_shows_the_first_forty_columns():
    lines = repr(schedules.get("gpipe").program(1, 1000)).splitlines()
    assert lines[1].split() == ["rank", "0", "|", *(f"0F{k}" for k in range(40))]
    assert lines[2:] == ["not shown: 0 of 1 rank, 1,960 of 2,000 actions; str(program) has all of them"]


def test_the_header_has_defaults():
    program = Program.parse("microbatches 1\nrank 0: 0F0\nrank 1: 1F0")
    assert program.placement == (0, 1)
    assert program.is_chain
    assert program.graph == chain(2)


def test_a_graph_without_edges_keeps_its_text_form():
    program = Program(((), ()), (0, 1), 1, StageGraph.of(2, []))
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rank 2: 0F0", r"line 4: ranks must be written in order.*got 'rank 2:'; write 'rank 1:'"),
        ("rank 1", r"line 4: ranks must be written in order.*write 'rank 1:'"),
        ("rank 1: 1F0 1Q0", r"line 4: an action must have the form .* got '1Q0'"),
        ("rank 1: 1SEND_B0", r"line 4: a send must end with '>'.*got '1SEND_B0'"),
        ("microbatches two", r"line 4: expected whole numbers; got 'microbatches two'"),
        ("microbatches 1 2", r"line 4: a line must be 'name NAME'.*got 'microbatches 1 2'"),
        ("placement 0 x", r"line 4: expected whole numbers; got 'placement 0 x'"),
        ("edges 0>1", r"line 4: a line must be 'name NAME'.*got 'edges 0>1'"),
        ("forward-only please", r"line 4: a line must be 'name NAME'.*got 'forward-only please'"),
        ("stages 2", r"line 4: a line must be 'name NAME'.*got 'stages 2'; correct or remove it"),
        ("edges 1-0", r"line 4: an edge A-B must go from a stage to a later one, .*0\.\.1; got 1-0"),
        ("microbatches 2", r"line 4: .*microbatches"),
        ("edges 0-2", r"line 4: an edge A-B must go from a stage to a later one, .*0\.\.1; got 0-2"),
    ],
)
def test_an_error_says_in_which_line(line, message):
    text = f"# line 1\nmicrobatches 1\nrank 0: 0F0 0B0\n{line}\n"
    if "edges" in line:
        text += "rank 1: 1F0 1B0\n"
    with pytest.raises(ScheduleError, match=message):
        Program.parse(text)


def test_a_program_says_how_many_microbatches_it_has():
    with pytest.raises(ScheduleError, match="add 'microbatches N'"):
        Program.parse("rank 0: 0F0 0B0")


@pytest.mark.parametrize("text", ["", "# nothing\n", "microbatches 1\n"])
def test_a_text_without_ranks_is_refused(text):
    with pytest.raises(ScheduleError):
        Program.parse(text)


def test_a_program_is_a_value():
    program = schedules.get("1f1b").program(2, 3)
    again = schedules.get("1f1b").program(2, 3)
    assert program == again
    assert hash(program) == hash(again)
    assert program != schedules.get("gpipe").program(2, 3)
    with pytest.raises(FrozenInstanceError):
        program.num_microbatches = 4


def test_the_name_does_not_make_two_programs_different():
    assert Program(((),), (0,), 1, name="a") == Program(((),), (0,), 1, name="b")


def test_counts_and_chunks():
    program = schedules.get("interleaved-1f1b").program(3, 4, chunks_per_rank=2)
    assert (program.num_ranks, program.num_stages, program.num_microbatches) == (3, 6, 4)
    assert program.chunks(1) == (1, 4)
    assert program.place(Action(1, Kind.F, 0)) == (1, 0)


def test_forward_keeps_the_forwards_in_their_order():
    forward = Program.parse(TEXT).forward()
    assert forward.forward_only
    assert [" ".join(map(str, order)) for order in forward.orders] == ["0F0 0F1 2F0 2F1", "1F0 1F1"]
    assert forward.graph == Program.parse(TEXT).graph


@pytest.mark.parametrize(
    ("order", "exact"),
    [
        ("0F0 0F1 0B0 0B1", True),
        ("0F0 0F1 0B1 0B0", False),
        ("0F1 0F0 0B0 0B1", False),
        ("0F0 0F1 0I0 0I1 0W0 0W1", True),
        ("0F0 0F1 0I0 0I1 0W1 0W0", False),
        ("0F0 0F1 0I0 0B1 0W0", False),
        ("0F0 0F1 0I1 0I0 0W0 0W1", False),
        ("0F0 0F1 0I1 0B0 0W1", False),
        ("0F0 0F1 0B0 0I1 0W1", True),
    ],
)
def test_exact_means_ascending_microbatches_for_each_stage(order, exact):
    assert Program.parse(f"microbatches 2\nrank 0: {order}").exact is exact


def test_stages_of_one_rank_may_be_at_different_microbatches_in_an_exact_program():
    assert Program.parse("microbatches 2\nplacement 0 0\nrank 0: 0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1").exact


def test_versions_that_no_stage_has_are_no_versions():
    text = "microbatches 1\nversions 0 :\nrank 0: 0F0 0B0 0UPDATE0\n"
    assert Program.parse(text).versions == ()
    assert Program.parse(str(Program.parse(text))) == Program.parse(text)


@pytest.mark.parametrize(
    "action",
    [
        Action(0.5, Kind.F, 0),
        Action("0", Kind.F, 0),
        Action(0, "X", 0),
        Action(0, Kind.F, 2**31),
        Action(0, Kind.F, 2**70),
        (0, Kind.F),
        "0F0",
    ],
)
def test_orders_are_of_actions_with_whole_numbers(action):
    with pytest.raises(ScheduleError, match=r"an order may contain only actions|must be whole numbers below"):
        Program(((action, Action(0, Kind.B, 0)),), (0,), 1)


def test_a_program_made_of_lists_is_the_same_value():
    one = schedules.get("chimera").program(2, 2)
    other = Program(
        [list(order) for order in one.orders],
        list(one.placement),
        one.num_microbatches,
        one.graph,
        weights=list(one.weights),
        routes=[list(route) for route in one.routes],
    )
    assert other == one
    assert hash(other) == hash(one)
    assert simulate(other, Costs.uniform(4)).makespan_s == simulate(one, Costs.uniform(4)).makespan_s
