from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Program, lower, schedules, simulate, validate
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_recompute, forward_then_backward, halves
from pipesched.program.traversal import walk
from tests.support.random_programs import fitting, programs, quick

SENDS = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}


def text(program):
    return [" ".join(map(str, order)) for order in program.orders]


def lowered(*orders, header="microbatches 2"):
    ranks = "\n".join(f"rank {rank}: {order}" for rank, order in enumerate(orders))
    return text(lower(Program.parse(f"{header}\n{ranks}")))


def channels(program, kinds):
    """The transfers of these kinds by (from rank, to rank, kind), each as (from stage, to stage, micro-batch)."""
    found = defaultdict(list)
    for order in program.orders:
        for stage, kind, microbatch, peer in order:
            if kind in kinds:
                ends = (stage, peer) if kind in SENDS else (peer, stage)
                key = (*(program.placement[end] for end in ends), kind.value[-1])
                found[key].append((*ends, microbatch))
    return dict(found)


def test_a_send_follows_its_producer_and_a_receive_stands_before_its_consumer():
    assert lowered("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1") == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0",
    ]


def test_the_input_gradient_is_sent_before_the_weight_gradient_runs():
    assert lowered("0F0 0I0 0W0", "1F0 1I0 1W0", header="microbatches 1") == [
        "0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0",
        "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0",
    ]


def test_a_message_used_early_brings_those_sent_before_it():
    assert lowered("0F0 0F1 0F2", "1F2 1F0 1F1", header="microbatches 3\nforward-only") == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1",
        "1RECV_F0<0 1RECV_F1<0 1RECV_F2<0 1F2 1F0 1F1",
    ]


def test_nothing_is_sent_inside_a_rank():
    inside = schedules.get("interleaved-1f1b").program(1, 3)
    assert lower(inside) == inside
    assert lowered("0F0 1F0 1B0 0B0", header="microbatches 1\nplacement 0 0") == ["0F0 1F0 1B0 0B0"]


def test_an_output_goes_straight_to_each_consumer():
    header = "microbatches 1\nplacement 0 1 2\nedges 0-1 0-2 1-2"
    assert lowered("0F0 0B0", "1F0 1B0", "2F0 2B0", header=header) == [
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<1 0RECV_B0<2 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0",
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>0 2SEND_B0>1",
    ]


def test_a_forward_only_program_sends_forwards_only():
    assert lowered("0F0 0F1", "1F0 1F1", header="microbatches 2\nforward-only") == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1F1",
    ]


def test_lowering_twice_is_lowering_once():
    once = lower(schedules.get("1f1b").program(3, 4))
    assert lower(once) == once


@quick
@given(programs(), st.sampled_from(["never", "always", "except_last"]))
def test_a_lowered_program_is_valid_and_keeps_every_compute_action_in_place(program, mode):
    plain = add_recompute(program, mode)
    low = lower(plain)
    validate(plain)
    validate(low)
    computes = [tuple(action for action in order if action.peer is None) for order in low.orders]
    assert plain.with_orders(computes) == plain
    assert (low.placement, low.graph, low.forward_only) == (program.placement, program.graph, program.forward_only)


@quick
@given(programs())
def test_each_channel_receives_what_it_sends_in_the_same_order(program):
    low = lower(program)
    sends = channels(low, SENDS.keys())
    assert sends == channels(low, SENDS.values())
    crossing = [edge for edge in program.graph.edges if program.placement[edge[0]] != program.placement[edge[1]]]
    directions = 1 if program.forward_only else 2
    assert sum(map(len, sends.values())) == len(crossing) * program.num_microbatches * directions


@quick
@given(programs())
def test_every_send_stands_directly_behind_its_producer_or_another_of_its_sends(program):
    for order in lower(program).orders:
        for before, action in pairwise(order):
            if action.kind in SENDS:
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)
                assert before.kind in (
                    {Kind.F, Kind.SEND_F} if action.kind is Kind.SEND_F else {Kind.B, Kind.I, Kind.SEND_B}
                )


def recomputes(program, mode):
    return [[str(a) for a in order if a.kind is Kind.R] for order in add_recompute(program, mode).orders]


def test_never_recomputes_nothing():
    program = schedules.get("1f1b").program(3, 4)
    assert add_recompute(program, "never") == program


@pytest.mark.parametrize("name", schedules.names())
def test_always_recomputes_every_pair_just_before_its_backward(name):
    program = schedules.get(name).program(fitting(name, 3), 4)
    recomputed = add_recompute(program, "always")
    assert sum(recomputed.columns.are(Kind.R)) == program.visits.sum()
    for rank, order in enumerate(recomputed.orders):
        joined = recomputed.orders.rank(rank).joined.tolist()
        for at, action in enumerate(order):
            if action.kind in {Kind.B, Kind.I}:
                before = at - 2 if joined[at - 1] else at - 1  # it stays together with the F that it overlaps with
                assert order[before] == Action(action.stage, Kind.R, action.microbatch)


@quick
@given(programs())
def test_except_last_spares_backwards_that_follow_their_forward_with_nothing_freed_in_between(program):
    spared = set()
    for order in program.orders:
        started = set()
        for action in order:
            pair = (action.stage, action.microbatch)
            if action.kind is Kind.F:
                started.add(pair)
                continue
            if pair in started:
                spared.add(pair)
            started.clear()
    pairs = {(a.stage, a.microbatch) for a in program.columns if a.kind in {Kind.B, Kind.I}}
    recomputed = {(a.stage, a.microbatch) for a in add_recompute(program, "except_last").columns if a.kind is Kind.R}
    assert recomputed == pairs - spared


@quick
@given(programs(), st.data())
def test_except_last_never_holds_more_than_always(program, data):
    def sizes(most):
        return data.draw(st.lists(st.integers(1, most), min_size=program.num_stages, max_size=program.num_stages))

    costs = Costs.uniform(program.num_stages)
    costs = replace(costs, input_bytes=sizes(3), activation_bytes=sizes(9), weight_grad_bytes=sizes(5))
    peaks = [simulate(add_recompute(program, mode), costs).peak_bytes for mode in ("except_last", "always")]
    assert all(spared <= all_again for spared, all_again in zip(*peaks, strict=True))


def test_1f1b_spares_the_last_rank_and_each_ranks_first_microbatch():
    assert recomputes(schedules.get("1f1b").program(3, 3), "except_last") == [["0R1", "0R2"], ["1R1", "1R2"], []]


def test_gpipe_spares_the_first_microbatch_whose_backward_comes_first():
    assert recomputes(schedules.get("gpipe").program(2, 3), "except_last") == [["0R1", "0R2"], ["1R1", "1R2"]]
    assert recomputes(schedules.get("gpipe").program(2, 1), "except_last") == [[], []]


def test_except_last_recomputes_where_a_weight_gradient_is_freed_before_the_backward():
    program = Program.parse("microbatches 2\nrank 0: 0F0 0I0 0F1 0W0 0I1 0W1")
    assert recomputes(program, "except_last") == [["0R1"]]


def test_a_recompute_that_the_schedule_wrote_stays_where_it_is():
    program = Program.parse("microbatches 2\nrank 0: 0F0 0F1 0R1 0R0 0B0 0B1")
    assert add_recompute(program, "always") == program


def test_evaluation_recomputes_nothing():
    forward = schedules.get("1f1b").program(2, 3).forward()
    assert add_recompute(forward, "always") == forward


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ScheduleError, match=r"one of never, always, except_last, or .*; got 'sometimes'"):
        add_recompute(schedules.get("1f1b").program(2, 3), "sometimes")


def test_all_forwards_then_all_backwards_keeps_both_orders_and_joins_split_backwards():
    program = schedules.get("zb-h1").program(2, 3)
    assert text(forward_then_backward(program)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


@quick
@given(programs())
def test_all_forwards_then_all_backwards_of_a_valid_program_is_valid(program):
    validate(forward_then_backward(program))


@quick
@given(programs())
def test_the_first_half_runs_alone_and_has_every_forward(program):
    low = lower(forward_then_backward(program))
    first, second = halves(low)
    assert low.orders == tuple(a + b for a, b in zip(first, second, strict=True))
    alone = low.with_orders(first)
    assert walk(alone).reached == [len(order) for order in first]
    assert not {action.kind for order in second for action in order} & {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert {action.kind for order in first for action in order} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
