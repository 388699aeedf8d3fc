"""Measured overheads: known ones are found on a virtual clock; over real ranks, all ranks get the same."""

import pytest

from pipesched import Costs, simulate
from pipesched.profiling.overhead_probe import Ran, find_overheads
from pipesched.program.actions import Kind
from pipesched.simulation.links import Link
from pipesched.simulation.overheads import Overheads


def virtual(overheads):
    """Runs programs on the simulator's clock, with ranks that have these overheads."""

    def run(program, parts, rows, *, waits=False):
        zeros, sizes = [0] * len(parts), [rows * 1024] * len(parts)
        waiting = [2 * part * waits for part in parts]
        costs = Costs(parts, parts, zeros, output_bytes=sizes, waiting_s=waiting, overheads=overheads)
        trace, size = simulate(program, costs), rows * 1024
        work_s = {}
        for span in trace.spans:
            stage, kind, _, _ = span.action
            forward = kind is Kind.F
            ends = program.graph.producers[stage], program.graph.consumers[stage]
            taken, given = ends if forward else reversed(ends)
            beside = overheads.action_s + overheads.waking_s * waits
            beside += len(taken) * (overheads.receive.latency_s + size * overheads.receive.byte_s)
            beside += len(given) * (overheads.send.latency_s + size * overheads.send.byte_s)
            alone = parts[stage] + beside
            work_s[span.action] = span.end_s - span.start_s - beside * (span.end_s - span.start_s) / alone
        return Ran(trace, work_s)

    return run


def same(found, known):
    assert (found.action_s, found.waking_s) == pytest.approx((known.action_s, known.waking_s))
    for name in ("send", "receive", "link"):
        one, other = getattr(found, name), getattr(known, name)
        assert (one.latency_s, one.byte_s) == pytest.approx((other.latency_s, other.byte_s), abs=1e-9)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_the_probe_finds_the_known_overheads(num_ranks):
    known = Overheads(0.01, 0.005, Link(0.02, 1e8), Link(0.03, 2e8), Link(0.04, 3e8))
    same(find_overheads(num_ranks, 4, virtual(known)), known)


def test_how_ranks_slow_each_other_is_found_up_to_the_cores():
    known = Overheads(crowding=(1, 1.25, 1.5, 2))
    assert find_overheads(5, 4, virtual(known)).crowding == pytest.approx(known.crowding, rel=1e-3)
    assert find_overheads(5, 3, virtual(known)).crowding == pytest.approx(known.crowding[:3], rel=1e-3)


def test_one_rank_has_no_messages():
    assert find_overheads(1, 2, virtual(Overheads(0.5, 0.25))) == Overheads(0.5, 0.25)
