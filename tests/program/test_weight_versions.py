"""Weights in the program: updates, versions, shared copies, routes; and pairs that overlap. Order only, no torch."""

from dataclasses import replace

import pytest

from pipesched import Costs, Program, lower, schedules, simulate, validate
from pipesched.errors import DeadlockError, ScheduleError
from pipesched.order import Order, Shape, schedule, v
from pipesched.program.lowering import add_recompute

UPDATES = "microbatches 2\nrank 0: 0F0 0F1 0B0 0UPDATE0 0B1 0UPDATE1\nrank 1: 1F0 1B0 1UPDATE0 1F1 1B1 1UPDATE1\n"


def parsed(*orders, header="microbatches 2"):
    return Program.parse(f"{header}\n" + "\n".join(f"rank {rank}: {order}" for rank, order in enumerate(orders)))


def refused(program, said, error=ScheduleError):
    with pytest.raises(error, match=said):
        validate(program)


# ---- updates and versions ----


def test_a_program_with_updates_is_valid_and_keeps_its_text_form():
    program = Program.parse(UPDATES)
    validate(program, exact=True)
    validate(lower(program))
    assert program.has_updates
    assert Program.parse(str(program)) == program
    versions = replace(program, versions=((), (0, 1)))
    assert "versions 1 : 0 1" in str(versions)
    assert Program.parse(str(versions)) == versions
    validate(versions)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("0F0 0F1 0B0 0B1 0UPDATE1", "updates must be numbered from 0.*got 0UPDATE1, expected 0UPDATE0"),
        ("0UPDATE0 0F0 0F1 0B0 0B1", "expected 0UPDATE0, after a backward"),
        ("0F0 0F1 0B0 0UPDATE0 0UPDATE1 0B1", "got 0UPDATE1, expected 0UPDATE1, after a backward"),
        ("0F0 0F1 0B0 0UPDATE0 0B1", "every gradient must be applied.*micro-batch 1 on stage 0. Add 0UPDATE1"),
        ("0F0 0F1 0I0 0W0 0UPDATE0 0I1 0W1", "Add 0UPDATE1"),
    ],
)
def test_every_gradient_is_applied_once_in_turn(order, said):
    refused(parsed(order), said)


def test_an_update_is_of_the_same_micro_batches_on_every_stage():
    program = parsed("0F0 0F1 0B0 0UPDATE0 0B1 0UPDATE1", "1F0 1B0 1F1 1B1 1UPDATE0")
    refused(
        program,
        "update 0 must apply the .* the gradients of micro-batch 0 on stage 0, but those of micro-batches 0, 1 on "
        "stage 1. Place 1UPDATE0 directly after the backward of micro-batch 0 on stage 1.",
    )


@pytest.mark.parametrize("versions", [((0, 1), ()), ((0, -1), ())])
def test_a_forward_uses_weights_that_its_stage_has_had(versions):
    refused(
        replace(Program.parse(UPDATES), versions=versions),
        r"rank 0, position 1: 0F1 uses weight version -?1, .* has only version 0\. Use",
    )


def test_versions_are_one_a_micro_batch_and_come_from_updates():
    refused(replace(Program.parse(UPDATES), versions=((0,), ())), "stage 0 has 1 version; pass a list of 2 versions")
    with pytest.raises(
        ScheduleError, match="versions must have one entry for each of the 2 stages; got a list of length 1"
    ):
        replace(Program.parse(UPDATES), versions=((0, 0),))
    refused(replace(schedules.get("1f1b").program(2, 2), versions=((0, 1), (0, 1))), "this program has no UPDATE")


@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize("p", range(1, 6))
def test_pipedream_holds_the_versions_that_its_paper_says(p, vertical_sync):
    """p - r of rank r (arXiv:1806.03377); with vertical sync p everywhere. Activations: p - r micro-batches."""
    for m in (2 * p, 3 * p + 1):
        program = schedules.get("pipedream").program(p, m, vertical_sync=vertical_sync)
        validate(program, exact=True, max_in_flight=[p - rank for rank in range(p)])
        held = simulate(program, Costs.uniform(p)).peak_versions
        assert held == {rank: p if vertical_sync else p - rank for rank in range(p)}


@pytest.mark.parametrize("p", range(2, 6))
def test_pipedream_2bw_holds_two_versions(p):
    """Two, for steps of at least p - 1 micro-batches (arXiv:2006.09503)."""
    for m in range(p - 1, 3 * p):
        trace = simulate(schedules.get("pipedream-2bw").program(p, m, steps=4), Costs.uniform(p))
        assert set(trace.peak_versions.values()) == {2}
        assert trace.peak_in_flight == tuple(min(p - rank, 4 * m) for rank in range(p))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_pay_their_bubble_once(name):
    """From step to step none: m(F + B) for each further one, on every rank."""
    p, m = 4, 8
    makespans = [simulate(schedules.get(name).program(p, m, steps=k), Costs.uniform(p)).makespan_s for k in (1, 2, 5)]
    assert makespans == [(k * m + p - 1) * 3 for k in (1, 2, 5)]


def test_updates_take_their_time():
    program = schedules.get("pipedream").program(1, 3)
    assert simulate(program, Costs.uniform(1, update_s=2)).makespan_s == 3 * (3 + 2)


def test_memory_of_older_versions_is_held_from_their_update_to_their_last_use():
    costs = Costs.uniform(2, weight_bytes=100, activation_bytes=1)
    trace = simulate(Program.parse(UPDATES), costs)
    assert trace.peak_bytes == (101, 1)
    changes = [held for _, held in trace.memory(0)]
    assert changes == [1, 2, 1, 101, 0]  # two activations, the first given back, the old version until 0B1's end
    assert simulate(add_recompute(Program.parse(UPDATES), "always"), costs).peak_versions == {0: 2, 1: 1}


def test_steps_are_for_schedules_that_update():
    with pytest.raises(ScheduleError, match="'1f1b' has none, and steps=2 was passed; pass steps=1"):
        schedules.get("1f1b").program(2, 4, steps=2)
    with pytest.raises(ScheduleError, match="whole number of steps, at least 1; got 0"):
        schedules.get("pipedream").program(2, 4, steps=0)


# ---- several chains over shared weights ----


@schedule("both-ways", placement=v, num_chains=2)
def both_ways(rank: int, shape: Shape) -> Order:
    """GPipe down one chain, then down the other."""
    order = Order(shape)
    for stage in sorted(shape.chunks(rank)):
        for _ in range(shape.num_microbatches):
            order.F(stage)
        for _ in range(shape.num_microbatches):
            order.B(stage)
    return order


def test_two_chains_share_weights_and_split_the_micro_batches():
    program = both_ways.program(2, 3)
    validate(program)
    validate(lower(program))
    assert program.placement == (0, 1, 1, 0)
    assert program.weights == (0, 1, 0, 1)
    assert program.num_weights == 2
    assert program.routes == ((0, 1), (0, 1), (2, 3))
    assert [" ".join(map(str, order)) for order in program.orders] == [
        "0F0 0F1 0B0 0B1 3F2 3B2",
        "1F0 1F1 1B0 1B1 2F2 2B2",
    ]
    assert Program.parse(str(program)) == program
    assert not program.exact
    with pytest.raises(ScheduleError, match="4 stages share 2 sets of weights"):
        validate(program, exact=True)


def test_a_micro_batch_runs_on_its_route_alone():
    program = both_ways.program(2, 2)
    refused(replace(program, routes=((0, 1), (0, 1))), "rank 0: stage 0 must run F and .*none of them. Add 0B1")
    refused(replace(program, routes=((0,), (2, 3))), "stage 0 but not its neighbour 1")
    refused(replace(program, routes=((0, 1), (7,))), "one route visits stage 7; correct the route")
    with pytest.raises(
        ScheduleError, match="routes must have one entry for each of the 2 micro-batches; got a list of length 1"
    ):
        replace(program, routes=((0, 1),))


def test_weights_that_are_shared_are_not_updated_inside():
    program = both_ways.program(1, 2)
    order = [*program.orders[0], *parsed("0UPDATE0").orders[0]]
    refused(
        program.with_orders([order]), "2 stages but 1 set of weights; remove the UPDATEs, and update the shared weights"
    )


# ---- pairs that overlap ----

PAIRS = ("0F0 0F1 0B0 0B1", "1F0 1F1&1B0 1B1")


def test_a_pair_that_overlaps_is_one_span_and_releases_both_at_its_end():
    spans = {str(s.action): (s.start_s, s.end_s) for s in simulate(parsed(*PAIRS), Costs.uniform(2)).spans}
    assert spans["1F1"] == spans["1B0"] == (2, 5)
    assert spans["0B0"] == (5, 7)
    trace = simulate(parsed(*PAIRS), Costs.uniform(2))
    assert trace.busy_s == (6, 6)
    assert trace.makespan_s == 9


def test_overlapping_takes_its_share_of_both_times():
    spans = {str(s.action): (s.start_s, s.end_s) for s in simulate(parsed(*PAIRS), Costs.uniform(2, overlap=0.5)).spans}
    assert spans["1F1"] == spans["1B0"] == (2, 3.5)


def test_a_lowered_pair_stays_together():
    program = lower(parsed(*PAIRS))
    validate(program)
    assert "1RECV_F1<0 1F1&1B0 1SEND_B0>0" in str(program)
    assert Program.parse(str(program)) == program
    costs = Costs.uniform(2, transfer_s=1)
    assert simulate(program, costs).by_rank == simulate(parsed(*PAIRS), costs).by_rank
    assert "1R0 1F1&1B0" in str(add_recompute(parsed(*PAIRS), "always"))


@pytest.mark.parametrize(
    "order",
    ["1F0&1B0 1F1 1B1", "1F0&1F1 1B0 1B1", "1F0 1F1 1B0&1B1", "1F0 1F1&1B0&1B1"],
)
def test_only_a_forward_and_the_backward_of_another_pair_may_overlap(order):
    said = "an F may overlap only with the next action, a B or I of another stage or micro-batch"
    refused(parsed("0F0 0F1 0B0 0B1", order), said)


def test_a_pair_waits_for_what_both_need():
    program = parsed("0F0 0F1&0B0 0B1", "1F0 1F1 1B0 1B1")
    refused(program, "0F1 waits for 1B0", DeadlockError)


def test_an_author_writes_pairs():
    @schedule("overlapped")
    def overlapped(rank, shape):
        order = Order(shape)
        for _ in range(shape.num_ranks - rank):
            order.F(rank)
        for _ in range(shape.num_microbatches):
            order.overlap(rank, rank)
        return order

    program = overlapped.program(2, 3)
    assert [line for line in str(program).splitlines() if line.startswith("rank")] == [
        "rank 0: 0F0 0F1 0F2&0B0 0B1 0B2",
        "rank 1: 1F0 1F1&1B0 1F2&1B1 1B2",
    ]


# ---- token slices ----


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("k", range(1, 5))
def test_seq1f1b_has_a_smaller_bubble_and_peak_by_its_slices(p, k):
    """(p-1)(F+B)/k and (p-1-r+k)/k, for slices of equal time; arXiv:2406.03488."""
    for m in range(1, 8):
        program = schedules.get("seq1f1b").program(p, m, slices_per_microbatch=k)
        validate(program)
        validate(lower(program))
        assert Program.parse(str(program)) == program
        trace = simulate(program, Costs.uniform(p))
        assert trace.makespan_s == 3 * (m * k + p - 1)
        assert trace.peak_in_flight == tuple(min(m * k, p - 1 - rank + k) for rank in range(p))


def test_slices_run_in_their_order():
    header = "microbatches 2\nslices 2"
    validate(parsed("0F0 0F1 0B1 0B0", header=header))
    refused(parsed("0F1 0F0 0B1 0B0", header=header), "0F1 runs too early.*first to the last")
    refused(parsed("0F0 0F1 0B0 0B1", header=header), "0B0 runs too early.*last to the first")
    refused(
        parsed("0F0 0F1 0F2 0B0 0B1 0B2", header="microbatches 3\nslices 2"),
        "3 slices in total, and slices_per_microbatch is 2",
    )
    validate(parsed("0F0 0F1 0B1 0B0", header=header).forward())
    assert not parsed("0F0 0F1 0B1 0B0", header=header).exact
    with pytest.raises(ScheduleError, match="cuts each micro-batch into 2 slices"):
        validate(parsed("0F0 0F1 0B1 0B0", header=header), exact=True)


def test_token_slices_are_found_by_name_and_not_among_the_names():
    assert "seq1f1b" not in schedules.names()
    assert schedules.get("seq1f1b").name == "seq1f1b"
