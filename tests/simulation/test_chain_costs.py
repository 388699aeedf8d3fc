"""Costs whose action times include the overheads of the ranks."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Costs, schedules, simulate
from pipesched.program.placement import loop
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.relaxation.chain_costs import chain_costs, with_overheads

times = st.integers(1, 9).map(Fraction)


@settings(max_examples=12)
@given(st.data(), st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-v", "zb-h1", "dualpipe-v"]))
def test_steps_take_the_same_time_with_overheads_inside_the_actions(data, name):
    num_ranks = data.draw(st.integers(1, 3))
    program = schedules.get(name).program(num_ranks, 2 * num_ranks)
    stages = program.num_stages

    def each(values):
        return data.draw(st.lists(values, min_size=stages, max_size=stages))

    costs = Costs(
        forward_s=each(times),
        input_grad_s=each(times),
        weight_grad_s=each(times),
        output_bytes=each(st.integers(0, 8)),
        waiting_s=each(st.sampled_from([0, Fraction(1, 2)])),
        links=data.draw(st.sampled_from([None, Links(inside=Link(latency_s=3, bytes_per_s=2))])),
        overheads=Overheads(
            action_s=data.draw(times),
            waking_s=data.draw(times),
            send=Link(latency_s=data.draw(times), bytes_per_s=4),
            receive=Link(latency_s=data.draw(times), bytes_per_s=2),
            link=Link(latency_s=data.draw(times)),
        ),
    )
    step_s = simulate(program, costs).makespan_s
    assert simulate(program, with_overheads(costs, program.placement)).makespan_s == pytest.approx(step_s)
    alone = chain_costs(costs, program.placement)
    assert alone.links is None
    assert lower_bound(alone, program.num_microbatches, placement=program.placement) <= step_s + 1e-9


def test_only_messages_between_ranks_take_time():
    ones = [1] * 4
    costs = Costs(forward_s=ones, input_grad_s=ones, weight_grad_s=ones, output_bytes=[10] * 4)
    costs = replace(costs, overheads=Overheads(action_s=1, send=Link(latency_s=10), receive=Link(latency_s=100)))
    inside = with_overheads(costs, (0, 1, 1, 0))
    assert inside.overheads is None
    assert inside.forward_s == (12, 102, 12, 102)
    assert inside.backward_s == (103, 13, 103, 13)
    assert inside.weight_grad_s == (2,) * 4
    assert with_overheads(costs, loop(2, 2)).forward_s == (12, 112, 112, 102)
    assert with_overheads(inside, (0, 1, 1, 0)) == inside
