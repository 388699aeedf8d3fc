"""REDUCE: sums of gradients over replicas, as actions that follow the last gradient of their stage."""

import random
from itertools import pairwise

import pytest

from pipesched import Action, Costs, Kind, Program, lower, schedules, simulate, validate
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.program.lowering import add_norms, add_recompute, add_reductions, add_updates
from pipesched.program.reductions import early_stages
from tests.support.random_programs import fitting

SHARED = {"chimera", "dualpipe"}
ASYNCHRONOUS = {"pipedream", "pipedream-2bw"}
NAMES = [name for name in schedules.names() if name not in SHARED | ASYNCHRONOUS]
TWO_RANKS = (
    "microbatches 1\n"
    "rank 0: 0F0 0B0 0REDUCE0 0REDUCE1 0NORM0 0UPDATE0\n"
    "rank 1: 1F0 1I0 1W0 1REDUCE0 1REDUCE1 1NORM0 1UPDATE0\n"
)


def plain(name, num_ranks=3, num_microbatches=4):
    return schedules.get(name).program(num_ranks, num_microbatches)


@pytest.mark.parametrize("name", NAMES)
def test_the_reductions_of_a_stage_follow_its_last_gradient(name):
    for num_ranks in range(1, 7):
        for m in (1, 1 + num_ranks, 8):
            program = add_reductions(plain(name, fitting(name, num_ranks), m), 2)
            validate(program)
            assert Program.parse(str(program)) == program
            assert program.buckets == (2,) * program.num_stages
            for stage in range(program.num_stages):
                rank, first = program.place(Action(stage, Kind.REDUCE, 0))
                assert program.place(Action(stage, Kind.REDUCE, 1)) == (rank, first + 1)
                order = program.orders[rank]
                gradients = [i for i, a in enumerate(order) if a.stage == stage and a.kind in (Kind.B, Kind.W)]
                joined = program.orders.rank(rank).joined[gradients[-1]]
                assert first == gradients[-1] + 1 + joined


@pytest.mark.parametrize("name", NAMES)
def test_norms_updates_and_messages_are_added_before_or_after_reductions(name):
    program = plain(name)
    buckets = [1 + stage % 3 for stage in range(program.num_stages)]
    whole = add_norms(add_updates(add_reductions(program, buckets)))
    validate(whole)
    validate(lower(whole))
    assert add_reductions(add_norms(add_updates(program)), buckets) == whole
    assert add_norms(add_reductions(add_updates(program), buckets)) == whole
    recomputed = add_recompute(whole, "always")
    assert add_reductions(add_recompute(add_norms(add_updates(program)), "always"), buckets) == recomputed
    validate(add_reductions(lower(program), buckets))
    assert add_reductions(whole, 7) is whole


def test_norms_wait_for_reductions_only_once_their_rank_has_computed_all_gradients():
    plain = add_norms(add_updates(schedules.get("interleaved-1f1b").program(2, 2)))
    program = add_norms(add_updates(add_reductions(schedules.get("interleaved-1f1b").program(2, 2), 1)))
    assert " ".join(map(str, program.orders[0][-8:])) == "2REDUCE0 0B0 0B1 0REDUCE0 2NORM0 0NORM0 0UPDATE0 2UPDATE0"
    costs = Costs.uniform(4, reduce_s=2)
    assert simulate(program, costs).makespan_s == simulate(plain, costs).makespan_s + 2


def test_a_norm_and_an_update_need_all_reductions_of_their_stage():
    program = add_norms(add_updates(add_reductions(plain("1f1b"), [2, 5, 0])))  # more buckets than micro-batches
    reductions = {stage: [Action(stage, Kind.REDUCE, b) for b in range(count)] for stage, count in enumerate([2, 5, 0])}
    norms = [Action(stage, Kind.NORM, 0) for stage in range(3)]
    rows = list(program.columns)
    needed = {(rows[a], rows[b]) for a, b in zip(*program.requirements, strict=True)}
    for stage, own in reductions.items():
        assert list(program.needs(Action(stage, Kind.NORM, 0))) == own
        assert list(program.needs(Action(stage, Kind.UPDATE, 0))) == own + norms
        assert {need for action, need in needed if action == Action(stage, Kind.UPDATE, 0)} == {*own, *norms}
        assert {need for action, need in needed if action == Action(stage, Kind.NORM, 0)} == set(own)


@pytest.mark.parametrize("name", sorted(SHARED))
def test_weights_on_several_ranks_are_not_reduced_by_the_program(name):
    program = plain(name, 4, 4)
    assert add_reductions(program, 2) is program
    order = (*program.orders[0], Action(program.orders[0][-1].stage, Kind.REDUCE, 0))
    with pytest.raises(ScheduleError, match="the 8 stages of this program share 4 sets of weights; remove the REDUCEs"):
        validate(program.with_orders([order, *program.orders[1:]]))


def test_programs_without_gradients_are_not_changed():
    program = plain("1f1b").forward()
    assert add_reductions(program, 2) == program
    with pytest.raises(ScheduleError, match=r"rank 0, position 4: .* got 0REDUCE0, but stage 0 runs no B and no W"):
        validate(program.with_orders([(*program.orders[0], Action(0, Kind.REDUCE, 0)), *program.orders[1:]]))


@pytest.mark.parametrize("name", sorted(ASYNCHRONOUS))
def test_asynchronous_schedules_are_refused(name):
    program = schedules.get(name).program(2, 4, steps=2)
    with pytest.raises(ScheduleError, match=r"rank 0: .* stage 0 has \d+ UPDATEs; choose a schedule that updates once"):
        add_reductions(program, 1)


@pytest.mark.parametrize("buckets", [-1, 1.5, True, "2", [1, 2], [1, 2, -1], [1, 2, None], {0: 1}, None])
def test_a_wrong_number_of_buckets_is_refused(buckets):
    with pytest.raises(PipeschedError, match=r"one number for each of 3 stages; got .*; for example, pass buckets=4"):
        add_reductions(plain("1f1b"), buckets)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0REDUCE0 ", "", "rank 0, position 2: the REDUCEs .* got 0REDUCE1, but stage 0 has only 1 REDUCE. Renumber"),
        ("0REDUCE1", "0REDUCE7", "got 0REDUCE7, but stage 0 has only 2 REDUCEs"),
        ("0REDUCE1", "0REDUCE0", "0REDUCE0 must run exactly once; it occurs 2 times"),
        ("0REDUCE0 0REDUCE1", "0REDUCE1 0REDUCE0", "position 3: .* ascending order; 0REDUCE0 comes after 0REDUCE1, at"),
        ("0B0 0REDUCE0", "0REDUCE0 0B0", "position 1: a REDUCE must .*; 0REDUCE0 comes before 0B0, at position 2"),
        ("1W0 1REDUCE0", "1REDUCE0 1W0", "1REDUCE0 comes before 1W0, at position 3. Move 1REDUCE0 after 1W0"),
        ("0REDUCE1 0NORM0", "0NORM0 0REDUCE1", "0NORM0 needs 0REDUCE1 before it on this rank, but 0REDUCE1 is at"),
        ("0REDUCE1 0NORM0 0UPDATE0", "0NORM0 0UPDATE0 0REDUCE1", "0NORM0 needs 0REDUCE1 before it"),
        ("1F0", "0REDUCE2 1F0", "0REDUCE2 belongs to rank 0"),
        ("0REDUCE1 ", "2REDUCE0 ", "2REDUCE0 is outside the program's 2 stages"),
    ],
)
def test_wrong_reductions_are_refused(old, new, message):
    validate(Program.parse(TWO_RANKS))
    with pytest.raises(ScheduleError, match=message):
        validate(Program.parse(TWO_RANKS.replace(old, new)))


@pytest.mark.parametrize("name", NAMES)
def test_every_misplaced_reduction_is_found(name):
    """Two neighbours swapped, or one REDUCE dropped, repeated or moved: wrong, unless nothing that matters changed."""
    rng = random.Random(name)
    program = add_norms(add_updates(add_reductions(plain(name), 3)))
    for stage in range(program.num_stages):
        rank, first = program.place(Action(stage, Kind.REDUCE, 0))
        order = list(program.orders[rank])
        own = [i for i, a in enumerate(order) if a.stage == stage and a.kind is not Kind.F]
        at = rng.choice([i for i in own if order[i].kind is Kind.REDUCE])
        last = max(i for i in own if order[i].kind in (Kind.B, Kind.W))
        norm = order.index(Action(stage, Kind.NORM, 0))
        for wrong in (
            *(swapped(order, a, b) for a, b in pairwise([last, *range(first, first + 3)])),
            swapped(order, first + 2, norm),
            moved(order, at, rng.randint(0, last)),
            moved(order, at, rng.randint(norm, len(order) - 1)),
            [*order[:at], order[at], *order[at:]],
            order[:first] + order[first + 1 :],
        ):
            orders = [*program.orders]
            orders[rank] = tuple(wrong)
            with pytest.raises(ScheduleError, match="REDUCE"):
                validate(program.with_orders(orders))


def test_a_dropped_last_bucket_shows_in_the_number_of_buckets():
    program = add_reductions(plain("1f1b"), 2)
    fewer = program.with_orders([order[:-1] for order in program.orders[:1]] + [*program.orders[1:]])
    validate(fewer)
    assert (program.buckets, fewer.buckets) == ((2, 2, 2), (1, 2, 2))


def swapped(order, a, b):
    changed = list(order)
    changed[a], changed[b] = changed[b], changed[a]
    return changed


def moved(order, at, to):
    rest = order[:at] + order[at + 1 :]
    return [*rest[:to], order[at], *rest[to:]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("1f1b", {0}), ("interleaved-1f1b", {0}), ("dualpipe-v", set()), ("zb-h1", set()), ("gpipe", {0})],
)
def test_only_reductions_behind_the_last_whole_backward_of_a_first_stage_start_early(name, expected):
    program = plain(name, 4, 8)
    assert early_stages(program) == frozenset()
    for made in (add_reductions(program, 2), lower(add_norms(add_updates(add_reductions(program, 2))))):
        assert early_stages(made) == expected


def test_a_reduction_that_the_order_delays_does_not_start_early():
    program = Program.parse("microbatches 1\nplacement 0 0\nrank 0: 0F0 1F0 1B0 1REDUCE0 0B0 0REDUCE0")
    later = Program.parse("microbatches 1\nplacement 0 0\nedges\nrank 0: 0F0 1F0 0B0 1B0 1REDUCE0 0REDUCE0")
    validate(later)
    assert (early_stages(program), early_stages(later)) == ({0}, {1})
