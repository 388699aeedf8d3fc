"""UNSHARD and RESHARD: weights that are split across replicas, gathered before their uses and freed afterwards."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Action, Kind, Program, lower, schedules, validate
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.program.dependencies import WEIGHT_USES
from pipesched.program.gathers import check_collectives
from pipesched.program.lowering import add_gathers, add_norms, add_recompute, add_reductions, add_updates
from pipesched.program.reductions import early_stages
from tests.support.random_programs import fitting, programs, quick

SHARED = {"chimera", "dualpipe"}
ASYNCHRONOUS = {"pipedream", "pipedream-2bw"}
NAMES = [name for name in schedules.names() if name not in SHARED | ASYNCHRONOUS]
TWO_RANKS = (
    "microbatches 2\n"
    "rank 0: 0UNSHARD0 0F0 0F1 0RESHARD0 0UNSHARD1 0B0 0B1 0RESHARD1 0REDUCE0 0UPDATE0\n"
    "rank 1: 1UNSHARD0 1F0 1I0 1F1 1I1 1W0 1W1 1RESHARD0 1REDUCE0 1UPDATE0\n"
)
RULE = "the UNSHARDs and RESHARDs of a stage must alternate, in ascending order"


def plain(name, num_ranks=3, num_microbatches=4):
    return schedules.get(name).program(num_ranks, num_microbatches)


def check_gathered_around_uses(program, prefetch=None):
    """Read every order action by action; return the number of gathers of each stage."""
    gathers = [0] * program.num_stages
    for rank in range(program.num_ranks):
        held = set()
        since = {}  # the compute actions since the UNSHARD of a stage, until the first use
        columns = program.orders.rank(rank)
        for action, joined in zip(columns, columns.joined.tolist(), strict=True):
            if action.kind is Kind.UNSHARD:
                assert action.stage not in held
                assert action.microbatch == gathers[action.stage]
                held.add(action.stage)
                since[action.stage] = 0
            elif action.kind is Kind.RESHARD:
                assert action.microbatch == gathers[action.stage]
                assert action.stage not in since  # the weights were used
                gathers[action.stage] += 1
                held.remove(action.stage)
            elif action.kind in WEIGHT_USES:
                assert action.stage in held
                assert since.pop(action.stage, 0) <= (len(program.columns) if prefetch is None else prefetch)
                since = {stage: count + (not joined) for stage, count in since.items()}
        assert not held
    return gathers


@pytest.mark.parametrize("name", NAMES)
def test_uses_run_between_a_gather_and_its_end(name):
    for num_ranks, m in ((1, 1), (2, 5), (4, 4)):
        program = plain(name, fitting(name, num_ranks), m)
        for prefetch in (0, 1, 3):
            once = add_gathers(program, prefetch=prefetch)
            often = add_gathers(program, keep=False, prefetch=prefetch)
            for made in (once, often):
                validate(made)
                assert made.exact == program.exact
            assert check_gathered_around_uses(once, prefetch) == [1] * program.num_stages
            counts = check_gathered_around_uses(often, prefetch)
            assert (max(counts) > 1) <= (max(map(len, map(program.chunks, range(program.num_ranks)))) > 1)
        assert Program.parse(str(often)) == often
        assert add_gathers(often) is often


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [True, False])
def test_gathers_and_other_passes_can_run_in_any_order(name, keep):
    def gathered(program):
        return add_gathers(program, keep=keep)

    program = plain(name)
    whole = gathered(add_norms(add_updates(add_reductions(program, 2))))
    validate(whole)
    validate(lower(whole))
    assert add_norms(add_updates(add_reductions(gathered(program), 2))) == whole
    assert add_reductions(add_norms(gathered(add_updates(program))), 2) == whole
    assert add_reductions(gathered(add_norms(add_updates(program))), 2) == whole
    for recomputed in (gathered(add_recompute(program, "always")), add_recompute(gathered(program), "always")):
        validate(recomputed)
        check_gathered_around_uses(recomputed)
    validate(gathered(lower(program)))
    assert early_stages(add_reductions(gathered(program), 2)) == early_stages(add_reductions(program, 2))


def test_the_orders_of_interleaved_1f1b():
    program = plain("interleaved-1f1b", 2, 2)
    text = str(add_reductions(add_gathers(program), 1)).splitlines()[-2:]
    assert text == [
        "rank 0: 0UNSHARD0 0F0 2UNSHARD0 0F1 2F0 2F1 2B0 2B1 2RESHARD0 2REDUCE0 0B0 0B1 0RESHARD0 0REDUCE0",
        "rank 1: 1UNSHARD0 1F0 3UNSHARD0 1F1 3F0 3B0 3F1 3B1 3RESHARD0 3REDUCE0 1B0 1B1 1RESHARD0 1REDUCE0",
    ]
    text = str(add_gathers(program, keep=False)).splitlines()[-2:]
    assert text == [
        "rank 0: 0UNSHARD0 0F0 2UNSHARD0 0F1 0RESHARD0 2F0 2F1 2B0 0UNSHARD1 2B1 2RESHARD0 0B0 0B1 0RESHARD1",
        "rank 1: 1UNSHARD0 1F0 3UNSHARD0 1F1 1RESHARD0 3F0 3B0 3F1 1UNSHARD1 3B1 3RESHARD0 1B0 1B1 1RESHARD1",
    ]
    assert str(add_gathers(program, stages={2})).count("UNSHARD") == 1


def test_an_overlapping_pair_needs_the_weights_of_both_stages():
    text = "microbatches 2\nplacement 0 0\nrank 0: 0F0 1F0 1B0 0F1&0B0 1F1 1B1 0B1\n"
    program = add_gathers(Program.parse(text), keep=False, prefetch=0)
    validate(program)
    assert str(program).splitlines()[-1] == (
        "rank 0: 0UNSHARD0 0F0 0RESHARD0 1UNSHARD0 1F0 1B0 1RESHARD0 0UNSHARD1 0F1&0B0 0RESHARD1 "
        "1UNSHARD1 1F1 1B1 1RESHARD1 0UNSHARD2 0B1 0RESHARD2"
    )


@settings(quick, max_examples=30)
@given(programs(), st.booleans(), st.integers(0, 3))
def test_gathers_of_random_programs(program, keep, prefetch):
    made = add_gathers(program, keep=keep, prefetch=prefetch)
    validate(made)
    check_gathered_around_uses(made, prefetch)
    rows = list(made.columns)
    needed = {(rows[a], rows[b]) for a, b in zip(*made.requirements, strict=True)}
    assert needed == {(action, need) for action in rows for need in made.needs(action)}


def test_an_evaluation_gathers_too():
    program = add_gathers(plain("1f1b", 2, 2).forward())
    validate(program)
    assert str(program.orders[1][-1]) == "1RESHARD0"


@pytest.mark.parametrize("name", sorted(SHARED))
def test_weights_on_several_ranks_are_not_gathered(name):
    program = plain(name, 4, 4)
    assert add_gathers(program) is program
    order = (Action(program.orders[0][0].stage, Kind.UNSHARD, 0), *program.orders[0])
    with pytest.raises(
        ScheduleError, match="the 8 stages of this program share 4 sets of weights; remove the UNSHARDs and RESHARDs"
    ):
        validate(program.with_orders([order, *program.orders[1:]]))


@pytest.mark.parametrize("name", sorted(ASYNCHRONOUS))
def test_asynchronous_schedules_are_refused(name):
    program = schedules.get(name).program(2, 4, steps=2)
    with pytest.raises(ScheduleError, match=r"rank 0: .* stage 0 has \d+ UPDATEs; choose a schedule that updates once"):
        add_gathers(program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch must be a whole number of actions, at least 0; got -1"),
        ({"prefetch": 1.5}, r"prefetch must be .* got 1\.5"),
        ({"stages": [3]}, r"stages must be a list of stages, 0\.\.2, or None for all; got \[3\]"),
        ({"stages": 1}, "stages must be a list of stages"),
        ({"stages": ["0"]}, "stages must be a list of stages"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(PipeschedError, match=message):
        add_gathers(plain("1f1b"), **options)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "0UNSHARD0 0F0",
            "0F0 0UNSHARD0",
            "0F0 needs 0UNSHARD0 before it on this rank, but 0UNSHARD0 is at position 1",
        ),
        ("0UNSHARD1 0B0", "0B0 0UNSHARD1", "position 4: 0B0 needs 0UNSHARD1 before it on this rank"),
        ("0B1 0RESHARD1", "0RESHARD1 0B1", "position 7: 0B1 needs 0UNSHARD2, which no rank runs. Add 0UNSHARD2"),
        ("1W1 1RESHARD0", "1RESHARD0 1W1", "1W1 needs 1UNSHARD1, which no rank runs"),
        ("0RESHARD1 0REDUCE0 0UPDATE0", "0REDUCE0 0UPDATE0 0RESHARD1", "0UPDATE0 needs 0RESHARD1 before it"),
        ("0RESHARD0 0UNSHARD1", "0UNSHARD1 0RESHARD0", f"position 3: {RULE}; 0UNSHARD1 comes before 0RESHARD0"),
        ("0RESHARD0 0UNSHARD1", "0UNSHARD1", "got 0RESHARD1, but stage 0 has only 1 RESHARD. Renumber"),
        ("0RESHARD1 ", "", f"position 4: {RULE}; 0UNSHARD1 has no 0RESHARD1. Add 0RESHARD1 after the last action"),
        ("1RESHARD0 ", "", f"position 0: {RULE}; 1UNSHARD0 has no 1RESHARD0"),
        ("1UNSHARD0 ", "", "1RESHARD0 needs 1UNSHARD0, which no rank runs. Add 1UNSHARD0"),
        ("0UNSHARD1", "0UNSHARD7", "the UNSHARDs of a stage must be numbered from 0 without a gap; got 0UNSHARD7"),
        ("0UNSHARD1", "0UNSHARD0", "0UNSHARD0 must run exactly once; it occurs 2 times"),
        ("1F0", "0UNSHARD2 1F0", "0UNSHARD2 belongs to rank 0"),
    ],
)
def test_wrong_gathers_are_refused(old, new, message):
    validate(Program.parse(TWO_RANKS))
    with pytest.raises(ScheduleError, match=message):
        validate(Program.parse(TWO_RANKS.replace(old, new, 1)))


@settings(quick, max_examples=40)
@given(programs(), st.booleans(), st.data())
def test_every_action_moved_out_of_its_gather_is_found(program, keep, data):
    """Move one UNSHARD, RESHARD or use elsewhere: an error, unless every use still runs between a pair of them."""
    made = add_gathers(program, keep=keep, prefetch=0)
    places = [(rank, at) for rank, order in enumerate(made.orders) for at in range(len(order))]
    rank, at = data.draw(st.sampled_from(places))
    order = list(made.orders[rank])
    action = order.pop(at)
    order.insert(data.draw(st.integers(0, len(order))), action)
    orders = list(made.orders)
    orders[rank] = tuple(order)
    changed = made.with_orders(orders)
    try:
        validate(changed)
    except ScheduleError:
        return
    uses = (*WEIGHT_USES, Kind.UNSHARD, Kind.RESHARD)
    for stage in range(program.num_stages):
        held = False
        for one in (one for one in changed.orders[program.placement[stage]] if one.stage == stage and one.kind in uses):
            if one.kind in WEIGHT_USES:
                assert held
            else:
                assert held == (one.kind is Kind.RESHARD)
                held = not held


def test_a_program_without_gathers_has_no_dependency_on_them():
    program = plain("zb-h1")
    assert not program.has_gathers
    assert not program.index.has_gathers.any()
    assert len(add_gathers(program).requirements.row) == len(program.requirements.row) + len(program.columns) + 3
    assert replace(add_gathers(program), orders=program.orders) == program


def test_a_given_program_must_have_the_collectives_of_its_pipeline():
    program = schedules.get("1f1b").program(2, 4)
    for made, gathers, words in (
        (add_gathers(program), False, "'1f1b' is 2, but this pipeline splits no weights; pass"),
        (add_gathers(program, stages=[0]), True, "each stage with weights must have one; stage 1 of program '1f1b'"),
        (
            add_reductions(program, 1),
            False,
            "must have one REDUCE for each layer .* on stage 0 of program '1f1b' is 1, but must be 3",
        ),
    ):
        with pytest.raises(ScheduleError, match=words):
            check_collectives(made, [3, 3], gathers=gathers)
    check_collectives(program, [3, 3], gathers=True)
    check_collectives(add_reductions(add_gathers(program, stages=[0]), [3, 0]), [3, 0], gathers=True)
