"""Links: latency, bandwidth, hosts, and messages that wait for each other."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Costs, Program, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_recompute
from pipesched.simulation.links import Collectives, Link, Links
from pipesched.testing.fake_executor import run_virtual
from tests.support.random_programs import costs_for, programs, quick

TWO = "microbatches 2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"


def starts(trace):
    return {str(span.action): span.start_s for span in trace.spans}


def test_a_message_takes_the_latency_and_its_size_over_the_bandwidth():
    links = Links(Link(latency_s=3, bytes_per_s=0.5))
    trace = simulate(Program.parse(TWO), Costs.uniform(2, output_bytes=2, links=links))
    assert starts(trace) == {"0F0": 0, "0F1": 1, "1F0": 8, "1F1": 9, "1B0": 10, "1B1": 12, "0B0": 19, "0B1": 21}


def test_latencies_of_costs_and_links_add_up():
    program = schedules.get("1f1b").program(3, 5)
    both = Costs.uniform(3, transfer_s=2, links=Links(Link(latency_s=1)))
    assert simulate(program, both).makespan_s == simulate(program, Costs.uniform(3, transfer_s=3)).makespan_s


def test_links_of_a_host_differ_from_those_between_hosts_and_a_pair_from_both():
    links = Links.of_hosts(2, 4, inside=Link(1), between=Link(10), special={(2, 3): Link(5)})
    text = "microbatches 1\nforward-only\n" + "\n".join(f"rank {r}: {r}F0" for r in range(4))
    assert list(starts(simulate(Program.parse(text), Costs.uniform(4, links=links))).values()) == [0, 2, 13, 19]


def test_a_gradient_is_as_large_as_the_output_that_it_is_of():
    costs = Costs((1, 1), (1, 1), (1, 1), output_bytes=(4, 1000), links=Links(Link(bytes_per_s=1)))
    program = Program.parse("microbatches 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0")
    for form in (program, lower(program)):
        trace = simulate(form, costs)
        assert (starts(trace)["1F0"], starts(trace)["0B0"]) == (5, 12)


@quick
@given(st.data())
def test_plain_and_lowered_programs_take_the_same_time_over_any_links(data):
    program = data.draw(programs())
    links = Links.of_hosts(2, program.num_ranks, inside=Link(1, 4), between=Link(3, 0.5), special={(0, 1): Link(2, 1)})
    costs = data.draw(costs_for(program, output_bytes=tuple(range(program.num_stages)), links=links))
    assert simulate(lower(program), costs).by_rank == simulate(program, costs).by_rank


@quick
@given(st.data())
def test_contention_delays_and_never_hastens(data):
    program = data.draw(programs())
    figures = {"inside": Link(1, 2)}
    sizes = {"output_bytes": (4,) * program.num_stages}
    free = data.draw(costs_for(program, **sizes, links=Links(**figures)))
    contended = Costs.from_dict({**free.to_dict(), "links": Links(**figures, contended=True).to_dict()})
    assert simulate(program, contended).makespan_s >= simulate(program, free).makespan_s


def test_messages_of_a_contended_link_go_one_after_the_other_and_opposite_ways_do_not_meet():
    links = Links(Link(latency_s=1, bytes_per_s=0.25), contended=True)  # 4 s a message on the link, then 1 s
    trace = simulate(Program.parse(TWO), Costs.uniform(2, output_bytes=1, links=links))
    begins = starts(trace)
    assert (begins["0SEND_F0>1"], begins["0SEND_F1>1"]) == (1, 5)
    assert (begins["1F0"], begins["1F1"]) == (6, 10)
    assert (begins["1SEND_B0>0"], begins["1SEND_B1>0"]) == (13, 17)
    assert (begins["0B0"], begins["0B1"]) == (18, 22)


def test_transfers_overlap_compute():
    """While a message travels its sender computes on."""
    links = Links(Link(bytes_per_s=0.1), contended=True)
    trace = simulate(Program.parse(TWO), Costs.uniform(2, output_bytes=1, links=links))
    assert (starts(trace)["0F1"], starts(trace)["1F0"]) == (1, 11)


@quick
@given(st.data())
def test_links_without_figures_change_nothing(data):
    program = add_recompute(data.draw(programs()), "except_last")
    costs = data.draw(costs_for(program))
    linked = Costs.from_dict({**costs.to_dict(), "links": Links(contended=True).to_dict()})
    assert simulate(program, linked).by_rank == simulate(program, costs).by_rank


def test_the_fake_executor_and_the_simulator_agree_on_latency():
    program, costs = schedules.get("zb-h1").program(4, 8), Costs.uniform(4, transfer_s=2)
    assert run_virtual(program, costs).by_rank == simulate(program, costs).by_rank


def test_measured_collectives_come_before_the_ring():
    slow, fast = Link(1.0, 10.0), Link(0.5, None)
    measured = Collectives((2, 0), all_reduce=slow, reduce_scatter=fast, all_gather=slow)
    links = Links(inside=Link(1e-3, 1e6), collectives=(measured,))
    assert links.all_reduce_s(20, (0, 2)) == links.all_gather_s(20, [0, 2]) == 3
    assert links.reduce_scatter_s(20, (0, 2)) == 0.5
    assert links.all_reduce_s(20, (0, 1)) == Links(inside=Link(1e-3, 1e6)).all_reduce_s(20, (0, 1))
    assert Links.from_dict(json.loads(json.dumps(links.to_dict()))) == links
    assert links.among([2, 3, 0]).collectives == (replace(measured, ranks=(0, 2)),)
    assert not links.among([1, 2]).collectives
    assert "collectives" not in Links().to_dict()  # files stay as they were
    for wrong in ((measured, measured), (slow,)):
        with pytest.raises(ScheduleError, match="collectives must be a list of Collectives, one for each group"):
            Links(collectives=wrong)
    for ranks in ((), (1, 1), (-1,)):
        with pytest.raises(ScheduleError, match="ranks of Collectives must list each participating rank once"):
            replace(measured, ranks=ranks)


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_a_broadcast_goes_through_a_tree_or_piece_by_piece_along_a_ring(ranks, rounds):
    """A tree sends 100 bytes in each round (0.5 s and 10 s); a pipelined ring sends them once."""
    link = Link(0.5, 10.0)
    assert Links(inside=link, algorithm="tree").broadcast_s(100, range(ranks)) == rounds * 10.5
    assert Links(inside=link).broadcast_s(100, range(ranks)) == (ranks - 1) * 0.5 + (10 if ranks > 1 else 0)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_the_root_of_a_sum_receives_the_tensors_of_all_others_in_one_round(algorithm):
    links = Links(inside=Link(0.5, 10.0), algorithm=algorithm)
    assert [links.reduce_s(100, range(ranks)) for ranks in (1, 2, 4)] == [0, 10.5, 30.5]


def test_the_slowest_link_determines_broadcasts_and_sums():
    links = Links.of_hosts(2, 4, inside=Link(0.5, None), between=Link(1, 100))
    assert links.broadcast_s(100, (0, 1)) == 0.5
    assert links.broadcast_s(100, (0, 1, 2)) == 2 + 1
    assert links.reduce_s(100, (0, 2)) == 2
    for method in (links.broadcast_s, links.reduce_s):
        with pytest.raises(ScheduleError, match="no rank twice; got"):
            method(1, (0, 0))
        with pytest.raises(ScheduleError, match="num_bytes"):
            method(-1, (0, 1))


def test_measured_broadcasts_and_sums_come_before_the_links():
    slow, fast = Link(1.0, 10.0), Link(0.5, None)
    measured = Collectives((0, 1), slow, slow, slow, broadcast=fast, reduce=slow)
    links = Links(inside=Link(1e-3, 1e6), collectives=(measured, Collectives((0, 2), slow, slow, slow)))
    assert (links.broadcast_s(20, (1, 0)), links.reduce_s(20, (0, 1))) == (0.5, 3)
    assert links.broadcast_s(20, (0, 2)) == Links(inside=Link(1e-3, 1e6)).broadcast_s(20, (0, 2))
    assert links.faster(2).broadcast_s(20, (0, 1)) == 0.25
    assert links.faster(2).reduce_s(20, (0, 2)) == links.reduce_s(20, (0, 2)) / 2
    saved = json.loads(json.dumps(links.to_dict()))
    assert Links.from_dict(saved) == links
    assert [{*one} & {"broadcast", "reduce"} for one in saved["collectives"]] == [{"broadcast", "reduce"}, set()]


def test_links_come_back_from_json():
    links = Links.of_hosts(2, 4, inside=Link(1, 8), between=Link(2), special={(0, 3): Link(7)}, contended=True)
    assert Links.from_dict(json.loads(json.dumps(links.to_dict()))) == links


@pytest.mark.parametrize("wrong", [{"latency_s": -1}, {"latency_s": math.nan}, {"bytes_per_s": 0}, {"bytes_per_s": -2}])
def test_a_link_has_possible_figures(wrong):
    with pytest.raises(ScheduleError, match=r"of a link|bytes_per_s is 0"):
        Link(**wrong)


def test_hosts_are_of_all_ranks():
    with pytest.raises(ScheduleError, match="hosts has length 2, so rank 2 has no entry; add"):
        simulate(schedules.get("1f1b").program(3, 2), Costs.uniform(3, links=Links(hosts=(0, 1))))
    with pytest.raises(ScheduleError, match="at least one rank; got ranks_per_host=0"):
        Links.of_hosts(0, 4)


@pytest.mark.parametrize("contended", [False, True])
@quick
@given(data=st.data())
def test_the_fake_executor_and_the_simulator_agree_over_any_links(contended, data):
    program = data.draw(programs())
    links = Links(Link(1, 2), Link(3), hosts=(0, 0, 1, 1, 1), special={(0, 2): Link(5, 1)}, contended=contended)
    costs = data.draw(costs_for(program, output_bytes=[4] * program.num_stages, links=links))
    assert run_virtual(program, costs).makespan_s == simulate(program, costs).makespan_s


@pytest.mark.parametrize("values", [{}, {"inside": {"latency": 1}}, None])
def test_a_dict_that_is_no_links_is_refused(values):
    with pytest.raises(ScheduleError, match="links must have the fields inside, between"):
        Links.from_dict(values)


def test_a_link_of_another_type_is_refused():
    with pytest.raises(ScheduleError, match="a link must be a"):
        Links(special={(0, 1): 3})
