import pytest
from hypothesis import given

from pipesched import Action, Program, lower
from pipesched.program.dependencies import StageGraph, chain, needs
from pipesched.program.lowering import add_recompute
from pipesched.program.traversal import walk
from tests.support.random_programs import programs, quick

SKIP = StageGraph.of(3, [(0, 1), (1, 2), (0, 2)])


def needed(action, present="", graph=None):
    """What an action needs, in text form."""
    present = {Action.parse(text) for text in present.split()}
    return " ".join(map(str, needs(Action.parse(action), graph or chain(3), present)))


@pytest.mark.parametrize(
    ("action", "present", "expected"),
    [
        ("0F1", "", ""),
        ("1F1", "", "0F1"),
        ("1F1", "1RECV_F1<0", "1RECV_F1<0"),
        ("2B1", "", "2F1"),
        ("1B1", "", "1F1 2B1"),
        ("1B1", "2I1", "1F1 2I1"),
        ("1I1", "2B1", "1F1 2B1"),
        ("1I1", "1R1", "1R1 2B1"),
        ("1B1", "1RECV_B1<2 2B1", "1F1 1RECV_B1<2"),
        ("1W1", "", "1I1"),
        ("1R1", "", "1F1"),
        ("0SEND_F1>1", "", "0F1"),
        ("1RECV_F1<0", "", "0SEND_F1>1"),
        ("1SEND_B1>0", "", "1B1"),
        ("1SEND_B1>0", "1I1", "1I1"),
        ("0RECV_B1<1", "", "1SEND_B1>0"),
    ],
)
def test_needs_on_a_chain(action, present, expected):
    assert needed(action, present) == expected


@pytest.mark.parametrize(
    ("action", "present", "expected"),
    [
        ("2F0", "", "0F0 1F0"),
        ("2F0", "2RECV_F0<0", "2RECV_F0<0 1F0"),
        ("0B0", "", "0F0 1B0 2B0"),
        ("0B0", "1I0 0RECV_B0<2", "0F0 1I0 0RECV_B0<2"),
    ],
)
def test_needs_over_a_skip_connection(action, present, expected):
    assert needed(action, present, SKIP) == expected


def test_a_stage_graph_lists_producers_and_consumers_ascending():
    assert SKIP.producers == ((), (0,), (0, 1))
    assert SKIP.consumers == ((1, 2), (2,), ())
    assert SKIP.edges == ((0, 1), (0, 2), (1, 2))


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_a_chain_is_the_graph_of_neighbours(num_stages):
    assert chain(num_stages) == StageGraph.of(num_stages, [(s, s + 1) for s in range(num_stages - 1)])


@quick
@given(programs())
def test_what_all_actions_need_at_once_is_what_each_needs(program):
    for variant in (program, lower(program), lower(add_recompute(program, "always"))):
        rows = list(variant.columns)
        expected = {(action, need) for action in rows for need in variant.needs(action)}
        assert {(rows[a], rows[b]) for a, b in zip(*variant.requirements, strict=True)} == expected


@quick
@given(programs())
def test_the_walk_runs_a_valid_program_to_its_end_with_every_need_first(program):
    walked = walk(program)
    assert walked.reached == [len(order) for order in program.orders]
    assert None not in walked.ends


def test_the_walk_ends_where_ranks_wait_for_each_other():
    program = Program.parse("microbatches 2\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1")
    ran = [str(a) for a, end in zip(program.columns, walk(program).ends, strict=True) if end is not None]
    assert ran == ["0F0", "1F0"]
