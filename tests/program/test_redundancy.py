"""MIRROR, KEEP and REPLAY: the pass that adds them, and the rules of validation."""

from dataclasses import replace

import pytest

from pipesched import Program, lower, schedules, validate
from pipesched.errors import ScheduleError
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.program.actions import Kind
from pipesched.program.completion import Completion
from pipesched.program.lowering import add_redundancy, add_updates
from pipesched.program.redundancy import REDUNDANT

SHARED = ("chimera", "dualpipe")
EVERY = [name for name in schedules.names() if name not in (*SHARED, "pipedream")]
TEXT = """\
microbatches 2
rank 0: 0MIRROR0 0KEEP0 1REPLAY0 0F0 0F1 0B0 0B1 0UPDATE0
rank 1: 1MIRROR0 1KEEP0 0REPLAY0 1F0 1B0 1F1 1B1 1UPDATE0
"""


def made(name="1f1b", num_ranks=2, num_microbatches=2, **own):
    return Completion(updates=True, redundancy=True, **own).complete(
        schedules.get(name).program(num_ranks, num_microbatches)
    )


def first(program, rank):
    return " ".join(str(action) for action in program.orders[rank] if action.kind in REDUNDANT)


def without(program):
    return replace(program, orders=program.orders.where(~program.columns.are(*REDUNDANT)))


def test_a_rank_sends_then_keeps_then_updates_the_copies_of_the_rank_before_it():
    assert made() == Program.parse(TEXT)
    assert [first(made(num_ranks=4), rank) for rank in range(4)] == [
        "0MIRROR0 0KEEP0 3REPLAY0",
        "1MIRROR0 1KEEP0 0REPLAY0",
        "2MIRROR0 2KEEP0 1REPLAY0",
        "3MIRROR0 3KEEP0 2REPLAY0",
    ]
    assert first(made("zb-v"), 0) == "0MIRROR0 3MIRROR0 0KEEP0 3KEEP0 1REPLAY0 2REPLAY0"


@pytest.mark.parametrize("name", EVERY)
def test_redundancy_comes_first_and_all_else_stays(name):
    plain = Completion(updates=True, norms=True, recompute="always")
    program = replace(plain, redundancy=True).lower(schedules.get(name).program(4, 8))
    validate(program)
    assert program.has_redundancy
    assert Program.parse(str(program)) == program
    assert program.exact == without(program).exact
    assert without(program) == plain.lower(schedules.get(name).program(4, 8))
    for order in program.orders:
        kinds = [REDUNDANT.index(action.kind) for action in order if action.kind in REDUNDANT]
        assert kinds == sorted(kinds)
        assert not any(action.kind in REDUNDANT for action in order[len(kinds) :])


def test_the_actions_can_be_added_before_and_after_messages():
    trained = add_updates(schedules.get("interleaved-1f1b").program(2, 4))
    assert lower(add_redundancy(trained)) == add_redundancy(lower(trained))
    assert add_redundancy(add_redundancy(trained)) == add_redundancy(trained)


@pytest.mark.parametrize("program", [made(buckets=(1, 1)), made(num_ranks=1)], ids=["replicas", "one rank"])
def test_a_rank_only_keeps_if_replicas_hold_its_weights_or_there_is_no_other_rank(program):
    validate(program)
    assert program.index.has(Kind.KEEP)
    assert not program.index.has(Kind.MIRROR, Kind.REPLAY)


def test_a_program_without_updates_gets_no_redundancy():
    plain = schedules.get("1f1b").program(2, 2)
    assert Completion(redundancy=True).complete(plain) == plain
    assert Completion(updates=True, redundancy=True).complete(plain.forward()) == plain.forward()


@pytest.mark.parametrize("name", SHARED)
def test_weights_of_several_stages_get_no_redundancy(name):
    plain = schedules.get(name).program(2, 2)
    assert add_redundancy(add_updates(plain)) == add_updates(plain)


def test_a_rank_without_stages_can_hold_copies():
    plain = Program.parse("microbatches 1\nplacement 0 0\nrank 0: 0F0 1F0 1B0 0B0\nrank 1:\n")
    program = add_redundancy(add_updates(plain))
    validate(program)
    assert first(program, 1) == "0REPLAY0 1REPLAY0"


def test_a_schedule_that_updates_several_times_is_refused():
    with pytest.raises(ScheduleError, match="updated once in a step; stage 0 has 8 UPDATEs; choose a schedule that"):
        made("pipedream", 2, 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0KEEP0 1REPLAY0 0F0", "0KEEP0 0F0 1REPLAY0", "position 3: a rank must run its MIRRORs first"),
        ("0KEEP0 1REPLAY0", "1REPLAY0 0KEEP0", "0KEEP0 comes after 1REPLAY0. Move 0KEEP0 before it"),
        ("0KEEP0 1REPLAY0", "1REPLAY0", "0MIRROR0 is of no use without 0KEEP0. Add 0KEEP0"),
        ("1REPLAY0 ", "", "1MIRROR0 is of no use without 1REPLAY0. Add 1REPLAY0"),
        ("0MIRROR0 ", "", "needs 0MIRROR0, which no rank runs. Add 0MIRROR0"),
        ("0KEEP0 1REPLAY0", "0KEEP0 0REPLAY0", "belongs to rank 1, which holds the copy of stage 0"),
        ("0MIRROR0 0KEEP0", "0KEEP0 0MIRROR0", "0KEEP0 needs 0MIRROR0 before it on this rank"),
        ("0KEEP0", "0KEEP0 0KEEP0", "0KEEP0 must run exactly once; it occurs 2 times"),
    ],
)
def test_wrong_redundancy_is_refused(old, new, message):
    assert old in TEXT
    with pytest.raises(ScheduleError, match=message):
        validate(Program.parse(TEXT.replace(old, new, 1)))


def test_redundancy_without_updates_is_refused():
    with pytest.raises(ScheduleError, match=r"got 0MIRROR0, but stage 0 has 0 UPDATEs\. Remove 0MIRROR0, or choose"):
        validate(Program.parse(TEXT.replace(" 0UPDATE0", "").replace(" 1UPDATE0", "")))


def test_an_action_of_another_number_is_refused():
    text = TEXT
    for kind in REDUNDANT:
        text = text.replace(f"{kind}0", f"{kind}1")
    with pytest.raises(ScheduleError, match="and is numbered 0; got 0MIRROR1, but stage 0 has 1 UPDATEs"):
        validate(Program.parse(text))


def test_an_update_waits_for_the_keep_of_its_stage_and_a_keep_for_every_mirror():
    program = made(num_ranks=3)
    needs = {str(action): [*map(str, program.needs(action))] for action in program.columns if action.stage == 1}
    assert needs["1UPDATE0"] == ["1KEEP0"]
    assert needs["1KEEP0"] == ["0MIRROR0", "1MIRROR0", "2MIRROR0"]
    assert needs["1REPLAY0"] == ["1MIRROR0"]
    assert needs["1MIRROR0"] == []
    assert not without(program).has_redundancy


def test_a_factory_of_programs_adds_redundancy_only_if_it_is_asked_to():
    request = PlanRequest(schedule="1f1b", num_microbatches=2)
    assert ProgramFactory(request, 2, updates=True, redundancy=True).full.without_messages == made()
    assert not ProgramFactory(request, 2, updates=True).full.without_messages.has_redundancy
    given = PlanRequest(schedule=made())
    with pytest.raises(ScheduleError, match=r"but this pipeline keeps no copies; pass the program without them"):
        ProgramFactory(given, 2, updates=True).check_updates()
    ProgramFactory(given, 2, updates=True, redundancy=True).check_updates()
