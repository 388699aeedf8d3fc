"""What ranks take beside the work of their stages, and what they take from each other."""

import json

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Costs, Program, lower, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.actions import Kind
from pipesched.program.dependencies import StageGraph
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Machine, Overheads
from pipesched.simulation.profile import Profile
from tests.support.random_programs import costs_for, programs, quick

TWO = "microbatches 1\nrank 0: 0F0 0I0 0W0\nrank 1: 1F0 1B0"


def times(text, costs):
    return {str(span.action): (span.start_s, span.end_s) for span in simulate(Program.parse(text), costs).spans}


def test_a_rank_takes_time_for_its_actions_and_for_the_two_ends_of_each_message():
    overheads = Overheads(1, send=Link(10), receive=Link(90, 2), link=Link(1000))
    assert times(TWO, Costs.uniform(2, output_bytes=20, overheads=overheads)) == {
        "0F0": (0, 12), "1F0": (1012, 1114), "1B0": (1114, 1127), "0I0": (2127, 2229), "0W0": (2229, 2231),
    }  # fmt: skip


def test_links_that_are_known_stand_for_the_one_of_the_overheads():
    costs = Costs.uniform(2, overheads=Overheads(link=Link(1000)), links=Links(Link(7)))
    assert times(TWO, costs)["1F0"] == (8, 9)


def test_inside_a_rank_there_are_no_messages():
    program = Program.parse("microbatches 1\nplacement 0 0\nrank 0: 0F0 1F0 1B0 0B0")
    overheads = Overheads(send=Link(10), receive=Link(100), link=Link(1000))
    assert simulate(program, Costs.uniform(2, overheads=overheads)).makespan_s == 6


@quick
@given(st.data())
def test_a_plain_and_a_lowered_program_take_equal_time(data):
    program, overheads = data.draw(programs()), Overheads(1, 2, Link(2), Link(3, 4), Link(5))
    costs = Costs.from_dict(data.draw(costs_for(program)).to_dict() | {"overheads": overheads.to_dict()})
    plain, lowered = simulate(program, costs), simulate(lower(program), costs)
    assert lowered.by_rank == plain.by_rank


def aside(num_ranks, counts=None):
    """Ranks side by side, which exchange nothing: forwards of so many micro-batches each."""
    counts = counts or [1] * num_ranks
    orders = [[Action(rank, Kind.F, at) for at in range(count)] for rank, count in enumerate(counts)]
    routes = tuple(tuple(rank for rank, count in enumerate(counts) if at < count) for at in range(max(counts)))
    graph = StageGraph.of(num_ranks, [])
    return Program(
        orders, tuple(range(num_ranks)), max(counts), graph=graph, forward_only=True, routes=routes, name="aside"
    )


def ends(program, costs):
    return {str(span.action): span.end_s for span in simulate(program, costs).spans}


def test_ranks_that_compute_at_once_hinder_each_other_as_long_as_they_do():
    costs = Costs((2, 3), (0, 0), (0, 0), overheads=Overheads(crowding=(1, 1.5)))
    found = ends(aside(2, [2, 1]), costs)  # both until 4.5, when rank 1 has ended: then rank 0 is alone
    assert found == pytest.approx({"0F0": 3, "0F1": 5.5, "1F0": 4.5}, rel=1e-3)


def test_a_waiting_layer_slows_no_other_rank_and_is_slowed_only_while_it_computes():
    crowding = Overheads(crowding=(1, 2))
    waits = Costs((4, 4), (0, 0), (0, 0), waiting_s=(0, 4), overheads=crowding)
    assert ends(aside(2), waits) == {"0F0": 4, "1F0": 4}
    half = Costs((4, 4), (0, 0), (0, 0), waiting_s=(2, 2), overheads=crowding)
    assert ends(aside(2), half) == {"0F0": 4, "1F0": 4}  # two halves are one core
    most = Costs((4, 4), (0, 0), (0, 0), waiting_s=(2, 0), overheads=crowding)
    assert ends(aside(2), most) == pytest.approx({"0F0": 5, "1F0": 5 + 2 / 3}, rel=1e-3)  # one and a half compute
    assert Costs((1,), (1,), (1,), (2,), waiting_s=(1.5,)).shares == (0.5,)


def test_an_action_that_waits_ends_later_by_the_waking_time():
    costs = Costs((4, 4), (0, 0), (4, 4), waiting_s=(8, 2), overheads=Overheads(1, waking_s=2))
    assert ends(aside(2), costs) == {"0F0": 7, "1F0": 5.5}


def test_weight_gradients_go_on_without_waking():
    orders = [[Action(0, kind, 0) for kind in (Kind.F, Kind.I, Kind.W)]]
    costs = Costs((4,), (4,), (4,), waiting_s=(12,), overheads=Overheads(1, waking_s=2))
    assert [span.end_s for span in simulate(Program(orders, (0,), 1), costs).spans] == [7, 14, 19]


def test_hosts_are_crowded_each_by_itself():
    apart = Costs.uniform(2, links=Links(hosts=(0, 1)), overheads=Overheads(crowding=(1, 2)))
    assert ends(aside(2), apart) == {"0F0": 1, "1F0": 1}


def test_more_ranks_than_cores_take_turns():
    assert ends(aside(6), Costs.uniform(6, overheads=Overheads(crowding=(1, 1))))["3F0"] == pytest.approx(3)


def test_ranks_on_one_core_take_as_long_as_their_whole_work():
    """Also if the simulation alternates between two makespans unless the slowdown changes gradually."""
    seconds = (1.0, 1.6, 2.2)
    costs = Costs(seconds, seconds, seconds, overheads=Overheads(crowding=(1,)))
    program = schedules.get("1f1b").program(3, 4)
    assert simulate(program, costs).makespan_s == pytest.approx(3 * 4 * sum(seconds), rel=1e-3)


@quick
@given(st.data())
def test_crowding_costs_time_but_no_more_than_it_says(data):
    program, factor = data.draw(programs()), data.draw(st.floats(1, 2))
    alone = data.draw(costs_for(program))
    crowding = (1.0,) + (factor,) * program.num_ranks
    crowded = Costs.from_dict(alone.to_dict() | {"overheads": Overheads(crowding=crowding).to_dict()})
    least, most = simulate(program, alone).makespan_s, simulate(program, alone.scaled(factor)).makespan_s
    assert least * 0.999 <= simulate(program, crowded).makespan_s <= most * 1.001


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"action_s": -1}, "action_s of overheads is -1"),
        ({"crowding": (1, float("nan"))}, "crowding of overheads, entry 1 is nan"),
        ({"crowding": (1.1, 1.2)}, "begin with 1"),
        ({"crowding": (1, 1.2, 1.1)}, "not decrease"),
        ({"send": 1}, "must have the form that to_dict writes"),
    ],
)
def test_what_are_no_overheads_is_named(wrong, said):
    with pytest.raises(ScheduleError, match=said):
        Overheads.from_dict(wrong)


def test_costs_take_overheads_alone():
    with pytest.raises(ScheduleError, match="overheads= must be of type Overheads"):
        Costs.uniform(2, overheads=3)


# ---- what a profile knows of its machine ---------------------------------------------------------------------------


def profile(machine, crowded_s=0):
    layer = dict.fromkeys(LayerCosts().figures(), 4) | {"waiting_s": 2, "crowded_s": crowded_s, "parameters": ()}
    graph = nx.DiGraph([("a", "b", {"bytes": 8})], parameters={})
    graph.add_nodes_from([("a", layer), ("b", layer)])
    return Profile({2: graph}, machine=machine)


def test_costs_of_a_profile_have_what_its_machine_adds():
    machine = Machine("cpu", Links(Link(5)), threads=Overheads(1), processes=Overheads(2, crowding=(1, 1.5)))
    own = Profile.from_dict(json.loads(json.dumps(profile(machine).to_dict())))
    assert own.machine == machine
    threads, processes = (own.costs([["a"], ["b"]], 2, ranks_are=what) for what in ("threads", "processes"))
    assert (threads.overheads, threads.links) == (Overheads(1), None)
    assert (processes.overheads, processes.links) == (Overheads(2, crowding=(1, 1.5)), Links(Link(5)))
    assert processes.shares == (0.75, 0.75)
    recomputed = own.costs([["a", "b"]], 2, keep={"a": "recompute"})
    assert recomputed.shares == (0.75,)
    assert profile(Machine()).costs([["a", "b"]], 2).overheads is None


def test_layers_that_hinder_each_other_more_than_others_do_add_to_what_their_machine_says():
    machine = Machine("cpu", threads=Overheads(1), processes=Overheads(2, crowding=(1, 1.1, 1.4)))
    own = profile(machine, crowded_s=2)  # of the 8 s that a layer takes
    threads, processes = (own.costs([["a"], ["b"]], 2, ranks_are=what) for what in ("threads", "processes"))
    assert threads.overheads == Overheads(1, crowding=(1, 1.25))
    assert processes.overheads == Overheads(2, crowding=(1, 1.25, 1.5))
    assert profile(Machine(), crowded_s=2).costs([["a", "b"]], 2).overheads is None


def test_measured_crowding_never_lowers_the_known_crowding():
    known = Overheads(crowding=(1, 1.3, 1.4))
    assert known.beside(1.1).crowding == (1, 1.3, 1.4)
    assert known.beside(1.25).crowding == (1, 1.3, 1.5)


def test_measured_actions_have_their_crowd_in_them():
    costs = Costs.uniform(2, overheads=Overheads(1, crowding=(1, 1.5)))
    trace = simulate(Program.parse(TWO), costs)
    assert measured_costs([trace], 2, costs).overheads == Overheads(1)


def test_actions_and_messages_of_ranks_on_cpus_are_assumed_to_take_longer():
    on_gpus, on_cpus = (Machine(on_host=on_host).assuming("processes", 2).processes for on_host in (False, True))
    assert on_gpus.action_s < on_cpus.action_s
    assert on_gpus.send.time_s(1 << 20) < on_cpus.send.time_s(1 << 20)
    measured = Machine(on_host=True, processes=Overheads(1))
    assert measured.assuming("processes", 2).processes == Overheads(1)
