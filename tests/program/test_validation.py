import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Program, lower, schedules, simulate, validate
from pipesched.errors import DeadlockError, MemoryLimitError, ScheduleError
from pipesched.program.action_arrays import Columns
from pipesched.program.liveness import peak_in_flight, peaks_of_stages
from pipesched.program.lowering import add_updates
from pipesched.units import counted
from tests.support.call_count import calls
from tests.support.random_programs import fitting, programs, quick

SKIP = "microbatches 1\nedges 0-1 0-2 1-2\n"


def program(*orders, microbatches=2, header=""):
    """A program from one text a rank."""
    ranks = "\n".join(f"rank {rank}: {order}" for rank, order in enumerate(orders))
    return Program.parse(f"microbatches {microbatches}\n{header}\n{ranks}")


def refused(wrong, *parts, error=ScheduleError, **options):
    """Assert that a program is refused with a message that has all parts; return the message."""
    with pytest.raises(error) as caught:
        validate(wrong, **options)
    message = str(caught.value)
    for part in parts:
        assert part in message
    return message


def marked(message):
    """The marked actions of the grid, by rank."""
    lines = [line for line in message.splitlines() if line.endswith("<-- here")]
    return {int(line.split()[1]): re.search(r">(\w+)<", line)[1] for line in lines}


@quick
@given(programs())
def test_a_program_whose_actions_can_run_in_its_order_is_valid(valid):
    validate(valid)


def test_a_stage_lies_on_a_rank_that_exists():
    refused(
        program("0F0 0B0", microbatches=1, header="placement 0 1"),
        "stage 1 is placed on rank 1",
        "but the program has 1 rank; correct the placement",
        "correct the placement",
    )


def test_an_action_lies_on_the_rank_of_its_stage():
    wrong = program("0F0 0F1 0B0 1B1 0B1", "1F0 1B0 1F1")
    message = refused(wrong, "rank 0, position 3: 1B1 belongs to rank 1, which holds stage 1. Move it to that rank.")
    assert marked(message) == {0: "1B1"}


@pytest.mark.parametrize("action", ["2F0", "0F2"])
def test_stage_and_microbatch_are_within_the_program(action):
    message = refused(
        program(f"0F0 {action} 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"),
        f"rank 0, position 1: {action} is outside the program's 2 stages and 2 micro-batches. "
        f"Number stages and micro-batches from 0.",
    )
    assert marked(message) == {0: action}


@pytest.mark.parametrize("action", [Action(-2, Kind.F, 0), Action(0, Kind.F, -1)])
def test_stage_and_microbatch_are_not_negative(action):
    valid = schedules.get("gpipe").program(2, 2)
    refused(valid.with_orders([(action, *valid.orders[0]), valid.orders[1]]), "outside the program's 2 stages")


@pytest.mark.parametrize("microbatches", [0, -1])
def test_a_program_has_at_least_one_microbatch(microbatches):
    refused(Program(((), ()), (0, 1), microbatches), str(microbatches))


@pytest.mark.parametrize(
    ("order", "has", "remedy"),
    [
        ("0F0 0B0 0F1", "it has 0F1", "Add 0B1."),
        ("0F0 0B0 0B1", "it has 0B1", "Add 0F1."),
        ("0F0 0B0", "it has none of them", "Add 0B1. Add 0F1."),
        ("0F0 0B0 0F1 0W1", "it has 0F1, 0W1", "Add 0I1."),
        ("0F0 0B0 0F1 0I1", "it has 0F1, 0I1", "Add 0W1."),
        ("0F0 0B0 0F1 0I1 0B1", "it has 0B1, 0F1, 0I1", "Remove 0I1."),
        ("0F0 0B0 0F1 0B1 0W1", "it has 0B1, 0F1, 0W1", "Remove 0W1."),
        ("0F0 0B0 0F1 0B1 0I1 0W1", "it has 0B1, 0F1, 0I1, 0W1", "Remove 0B1."),
    ],
)
def test_a_stage_runs_each_microbatch_forward_and_backward(order, has, remedy):
    refused(
        program(order),
        "rank 0: stage 0 must run F and either B or both I and W for each of 2 micro-batches",
        f"for micro-batch 1 {has}. {remedy}\n",
    )


def test_a_forward_only_program_has_no_backward():
    validate(program("0F0 0F1", header="forward-only"))
    refused(
        program("0F0 0F1 0B1", header="forward-only"), "stage 0 must run F for each", "it has 0B1, 0F1. Remove 0B1."
    )


def test_an_action_runs_once():
    message = refused(
        program("0F0 0F1 0F0 0B0 0F0 0B1"), "rank 0, position 0: 0F0 must run exactly once; it occurs 3 times. Remove"
    )
    assert marked(message) == {0: "0F0"}


def test_what_an_action_needs_comes_before_it_on_its_rank():
    message = refused(
        program("0F0 0B1 0B0 0F1"),
        "rank 0, position 1: 0B1 needs 0F1 before it on this rank, but 0F1 is at position 3. Move 0F1 earlier.",
    )
    assert marked(message) == {0: "0B1"}
    assert message.splitlines()[-1].split()[:8] == ["rank", "0", "|", "0F0", ">0B1<", "0B0", "0F1", "<--"]


@pytest.mark.parametrize(
    ("order", "needs"),
    [
        ("0F0 0W0 0I0", "0W0 needs 0I0"),
        ("0F0 0B0 0R0", "0B0 needs 0R0"),
        ("0R0 0F0 0B0", "0R0 needs 0F0"),
    ],
)
def test_every_rule_of_what_comes_before_what_holds_on_one_rank(order, needs):
    refused(program(order, microbatches=1), f"{needs} before it on this rank")


def test_what_an_action_needs_is_in_the_program():
    lowered = lower(schedules.get("1f1b").program(2, 1))
    without_send = [[a for a in order if a.kind is not Kind.SEND_F] for order in lowered.orders]
    message = refused(
        lowered.with_orders(without_send),
        "rank 1, position 0: 1RECV_F0<0 needs 0SEND_F0>1, which no rank runs. Add 0SEND_F0>1.",
    )
    assert "<-- here" in message


@pytest.mark.parametrize("kind", [Kind.RECV_F, Kind.RECV_B])
def test_a_send_has_a_receive(kind):
    lowered = lower(schedules.get("1f1b").program(2, 2))
    lost = next(action for action in lowered.columns if action.kind is kind)
    refused(lowered.with_orders([[a for a in order if a != lost] for order in lowered.orders]), str(lost))


def test_receives_stand_in_the_order_of_their_sends():
    right = "1RECV_F0<0 1RECV_F1<0 1F0 1F1"
    sender = "0F0 0SEND_F0>1 0F1 0SEND_F1>1"
    validate(program(sender, right, header="forward-only"))
    refused(program(sender, "1RECV_F1<0 1RECV_F0<0 1F0 1F1", header="forward-only"), "rank 1, position 0", "1RECV_F1<0")


def test_a_deadlock_is_named_as_a_cycle_with_every_waiting_rank():
    message = refused(
        program("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"),
        "deadlock: 2 of 3 ranks wait for each other in a cycle",
        "rank 0, position 1: 0B0 waits for 1B0",
        "rank 1, position 1: 1F1 waits for 0F1",
        "Move one of the awaited actions before the position where its rank waits.",
        "Also waiting: rank 2 at 2F1",
        error=DeadlockError,
    )
    assert marked(message) == {0: "0B0", 1: "1F1", 2: "2F1"}


def test_a_rank_that_waits_for_a_deadlock_is_not_part_of_its_cycle():
    refused(
        program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"),
        "deadlock: 2 of 3 ranks wait for each other in a cycle\n  rank 1, position 1: 1B0 waits for 2B0\n",
        "Also waiting: rank 0 at 0B0",
        error=DeadlockError,
    )


def test_a_deadlock_through_three_ranks():
    message = refused(
        program("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1", header="edges 0-1 0-2 1-2"),
        "deadlock: 3 of 3 ranks wait for each other in a cycle",
        "rank 0, position 1: 0B0 waits for 1B0",
        "rank 1, position 1: 1B0 waits for 2B0",
        "rank 2, position 1: 2F1 waits for 0F1",
        error=DeadlockError,
    )
    assert "Also waiting" not in message


def test_a_long_order_is_shown_around_the_mark():
    order = schedules.get("gpipe").program(1, 20).orders[0]
    message = refused(
        Program(((*order[:21], *order[20:]),), (0,), 20), "position 20: 0B0 must run exactly once; it occurs 2 times"
    )
    grid = next(line for line in message.splitlines() if line.startswith("rank 0 |"))
    assert grid.split("|")[1].split() == [
        *["...", "0F15", "0F16", "0F17", "0F18", "0F19"],
        *[">0B0<", "0B0", "0B1", "0B2", "0B3", "0B4", "...", "<--", "here"],
    ]


@pytest.mark.parametrize(
    ("name", "num_microbatches", "peaks"),
    [
        ("gpipe", 4, (4, 4, 4)),
        ("1f1b", 4, (3, 2, 1)),
        ("zb-h1", 4, (3, 3, 3)),
        ("interleaved-1f1b", 6, (8, 6, 4)),
    ],
)
def test_memory_limits_hold_at_the_peak_and_not_below(name, num_microbatches, peaks):
    checked = schedules.get(name).program(3, num_microbatches)
    assert tuple(map(peak_in_flight, checked.orders)) == peaks
    validate(checked, max_in_flight=peaks)
    validate(checked, max_in_flight=max(peaks))
    refused(checked, "but the limit is", error=MemoryLimitError, max_in_flight=max(peaks) - 1)
    for rank in range(3):
        limits = [peak - (rank == r) for r, peak in enumerate(peaks)]
        refused(checked, f"rank {rank}, position", error=MemoryLimitError, max_in_flight=limits)


def test_a_memory_limit_names_the_action_that_breaks_it():
    message = refused(
        schedules.get("gpipe").program(2, 3),
        "rank 1, position 2: 1F2 puts 3 micro-batches in flight, but the limit is 2 (the order's peak is 3). "
        "Run a backward before it, or raise the limit.",
        error=MemoryLimitError,
        max_in_flight=[3, 2],
    )
    assert marked(message) == {1: "1F2"}


@pytest.mark.parametrize("limits", [[3], [3, 3, 3], []])
def test_memory_limits_are_one_number_or_one_a_rank(limits):
    refused(
        schedules.get("1f1b").program(2, 3),
        f"must be one number, or a list with one for each rank; got a list of {counted(len(limits), 'number')} for 2 "
        "ranks; pass one number, or a list of 2 numbers",
        max_in_flight=limits,
    )


@pytest.mark.parametrize(
    ("order", "peak"),
    [
        ("", 0),
        ("0F0 0F1 0B0 0B1", 2),
        ("0F0 0B0 0F1 0B1", 1),
        ("0F0 0I0 0F1 0W0 0I1 0W1", 2),
        ("0F0 0I0 0W0 0F1 0I1 0W1", 1),
        ("0F0 0F1 0R0 0B0 0R1 0B1", 1),
        ("0F0 0F1 0R0 0R1 0B0 0B1", 2),
        ("0F0 0F1 0B1 0R0 0B0", 1),
    ],
)
def test_a_pair_is_in_flight_from_its_forward_or_recompute_to_its_backward_or_weight_gradient(order, peak):
    assert peak_in_flight(map(Action.parse, order.split())) == peak


@quick
@given(programs())
def test_the_peak_of_each_stage_is_that_of_its_own_actions(program):
    actions = [action for order in program.orders for action in order]
    own = [[action for action in actions if action.stage == stage] for stage in range(program.num_stages)]
    assert peaks_of_stages(program.columns, program.num_stages).tolist() == [*map(peak_in_flight, own)]


@pytest.mark.parametrize(("order", "peaks"), [("0F0 0B0", [1, 0, 0]), ("2F0 2F1 2B0 2B1", [0, 0, 2]), ("", [0, 0, 0])])
def test_a_stage_that_no_micro_batch_visits_has_the_peak_0(order, peaks):
    """Such as those of the second direction of chimera, if there is one micro-batch."""
    assert peaks_of_stages(Columns.of(map(Action.parse, order.split())), 3).tolist() == peaks


def test_exactness_is_demanded_only_on_request():
    inexact = program("0F0 0F1 0B1 0B0")
    validate(inexact)
    message = refused(
        inexact,
        "rank 0, position 3: an exact program",
        "0B0 comes after a later micro-batch",
        "validate without exact=True",
        exact=True,
    )
    assert marked(message) == {0: "0B0"}


def damaged(valid, rng):
    """The program with a few random swaps, and sometimes an action lost, repeated or on another rank."""
    orders = [list(order) for order in valid.orders]
    for damage in rng.choices(["swap", "lose", "repeat", "move"], weights=[8, 1, 1, 1], k=rng.randint(1, 3)):
        order = rng.choice([order for order in orders if order])
        i, j = rng.randrange(len(order)), rng.randrange(len(order))
        if damage == "swap":
            order[i], order[j] = order[j], order[i]
        elif damage == "repeat":
            order.insert(j, order[i])
        else:
            action = order.pop(i)
            if damage == "move":
                rng.choice(orders).insert(0, action)
    return valid.with_orders(orders)


@pytest.mark.parametrize("lowering", [lambda plain: plain, lower], ids=["plain", "lowered"])
@quick
@given(st.sampled_from(schedules.names()), st.integers(1, 4), st.integers(2, 5), st.integers(0, 10**6))
def test_a_damaged_program_is_refused_or_runs_to_its_end(lowering, name, num_ranks, num_microbatches, seed):
    valid = lowering(schedules.get(name).program(fitting(name, num_ranks), num_microbatches))
    changed = damaged(valid, random.Random(seed))
    try:
        validate(changed)
    except ScheduleError:
        return
    trace = simulate(changed, Costs.uniform(changed.num_stages))
    assert sorted(span.action for span in trace.spans) == sorted(action for order in changed.orders for action in order)


def test_where_there_are_transfers_all_that_ranks_need_is_transferred():
    lowered = lower(schedules.get("1f1b").program(2, 2))
    lost = Action.parse("0SEND_F1>1"), Action.parse("1RECV_F1<0")
    refused(
        lowered.with_orders([[a for a in order if a not in lost] for order in lowered.orders]),
        "1F1 needs a result of stage 0 on rank 0; the program has transfers, but none for this result",
        "Add 0SEND_F1>1 and 1RECV_F1<0",
    )


@pytest.mark.parametrize("limit", [1.5, "4", float("nan"), [4, 4.5]])
def test_a_memory_limit_is_a_whole_number(limit):
    refused(schedules.get("1f1b").program(2, 3), "pass whole numbers", max_in_flight=limit)


def test_overlaps_and_updates_of_many_actions_are_checked_at_once():
    overlapping = schedules.get("dualpipe-v").program(64, 256)
    many_chunks = add_updates(schedules.get("interleaved-1f1b").program(1, 16, chunks_per_rank=512))
    for program in (overlapping, many_chunks):
        assert calls(lambda program=program: validate(program)).total() < 4 * len(program.columns.stage)
    trace = simulate(many_chunks, Costs.uniform(512))
    assert trace.peak_versions == dict.fromkeys(range(512), 1)
