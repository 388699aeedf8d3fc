"""Tests of the costs and the communication of replicas, against ring formulas worked out by hand."""

import pytest

from pipesched import Costs, Link, Links, schedules, simulate
from pipesched.errors import ScheduleError
from pipesched.program.actions import Kind
from pipesched.program.completion import Completion
from pipesched.simulation.communication import communication
from pipesched.simulation.replica_memory import ModelStates
from pipesched.simulation.replication import ReplicaCosts, Replication

INSIDE, BETWEEN = Link(0, 100.0), Link(0, 10.0)
LINKS = Links.of_hosts(2, 4, inside=INSIDE, between=BETWEEN)
BUCKETS = [[100, 100], [300]]


def stages(**fields):
    return Costs.uniform(2, **{"forward_s": 4, "input_grad_s": 4, "weight_grad_s": 4, "update_s": 8} | fields)


def of_two(costs=None, **replication):
    own = ReplicaCosts(Replication(num_replicas=2, **replication), 2, LINKS)
    return own.added(costs or stages(), (0, 1), BUCKETS)


def test_ranks_are_numbered_pipeline_by_pipeline_or_stage_by_stage():
    pipelines, replicas = Replication(num_replicas=3), Replication(num_replicas=3, consecutive="replicas")
    assert [list(row) for row in pipelines.rows(2)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(row) for row in replicas.rows(2)] == [[0, 3], [1, 4], [2, 5]]
    assert list(pipelines.mesh(2).items()) == [("dp", 3), ("pp", 2)]
    assert list(replicas.mesh(2).items()) == [("pp", 2), ("dp", 3)]


@pytest.mark.parametrize(("consecutive", "speed"), [("stages", 10), ("replicas", 100)])
def test_sums_use_the_links_between_the_ranks_of_a_stage(consecutive, speed):
    """A ring of two sends half of the bytes in each of two halves: n bytes take n / speed."""
    costs = of_two(consecutive=consecutive)
    assert costs.reduce_s == ((100 / speed, 100 / speed), (300 / speed,))
    assert costs.reduce_bytes == ((100, 100), (300,))


@pytest.mark.parametrize(("consecutive", "link"), [("stages", INSIDE), ("replicas", BETWEEN)])
def test_messages_use_the_links_between_the_ranks_of_a_pipeline(consecutive, link):
    own = ReplicaCosts(Replication(num_replicas=2, consecutive=consecutive), 2, LINKS).pipeline_links()
    assert own.link(0, 1) == link


def test_the_slowest_replica_counts_where_replicas_have_different_links():
    """Hosts of three ranks: the second of three pipelines of two ranks crosses hosts."""
    links = Links.of_hosts(3, 6, inside=INSIDE, between=BETWEEN)
    own = ReplicaCosts(Replication(num_replicas=3), 2, links).pipeline_links()
    assert own.link(0, 1).bytes_per_s == own.link(1, 0).bytes_per_s == 10


def test_zero_divides_states_and_updates_and_gathers_weights():
    whole = stages(optimizer_bytes=101, update_transient_bytes=7)
    none, states, both = (of_two(whole, zero=zero) for zero in (0, 1, 2))
    assert none.gather_s == (0, 0)
    assert states.reduce_s == none.reduce_s
    assert both.reduce_s == ((5, 5), (15,))  # a reduce-scatter is half of an all-reduce
    assert states.gather_s == both.gather_s == (10, 15)
    assert [own.optimizer_bytes for own in (none, states, both)] == [(101, 101), (51, 51), (51, 51)]
    assert [own.update_s for own in (none, states, both)] == [(8, 8), (4, 4), (4, 4)]
    assert both.update_transient_bytes == (4, 4)


def test_one_replica_adds_no_sums():
    costs = ReplicaCosts(Replication(), 2, LINKS).added(stages(), (0, 1), BUCKETS)
    assert costs.reduce_s == ((), ())
    assert not any(map(len, costs.reduce_bytes))


def test_bytes_sent_are_those_of_a_ring():
    """The table in docs/howto/replicas.md: 2(n-1)/n, 3(n-1)/n and 2(n-1)/n of the bytes."""
    sent = [Replication(num_replicas=4, zero=zero).sent_bytes(100) for zero in (0, 1, 2)]
    assert sent == [(150, 0), (150, 75), (75, 75)]


def test_each_replica_holds_all_weights_and_gradients_but_its_part_of_the_states():
    """Mixed-precision Adam: 2 + 2 + 12 bytes a parameter (Rajbhandari et al. 2020)."""
    held = [Replication(num_replicas=4, zero=zero).held(ModelStates(2, 2, 12)).total_bytes for zero in (0, 1, 2)]
    assert held == [16, 7, 7]


def test_the_update_lasts_until_the_weights_are_gathered():
    costs = of_two(zero=2)
    assert costs.times(Kind.UPDATE) == (14, 19)
    trace = simulate(Completion(updates=True, buckets=(2, 1)).complete(schedules.get("1f1b").program(2, 1)), costs)
    assert trace.makespan_s == max(24 + 5 + 14, 16 + 15 + 19)


def test_communication_is_reported_for_each_axis():
    """Rank 1's sum takes 30 s behind the 8 s of rank 0's backward, and delays its update."""
    costs = of_two()
    program = Completion(updates=True, buckets=(2, 1)).complete(schedules.get("1f1b").program(2, 1))
    pipeline, replicas = communication(program, costs, Replication(num_replicas=2))
    assert (pipeline.axis, pipeline.size, pipeline.seconds, pipeline.hidden) == ("pipeline", 2, 0, None)
    assert (replicas.axis, replicas.size, replicas.sent_bytes, replicas.seconds) == ("replicas", 2, 300, 30)
    step_s = simulate(program, costs).makespan_s
    assert replicas.exposed_s == step_s - (24 + 8)
    assert replicas.hidden == 1 - replicas.exposed_s / 30


def test_messages_are_reported_with_their_link():
    costs = stages(output_bytes=50, links=Links(inside=Link(1, 10.0)))
    (pipeline,) = communication(schedules.get("gpipe").program(2, 3), costs, None)
    assert (pipeline.sent_bytes, pipeline.seconds) == (150, 3 * (1 + 5))
    assert pipeline.exposed_s == 12  # the first output and the last gradient; the others are hidden


def test_costs_with_gathers_survive_json():
    costs = of_two(zero=2)
    assert Costs.from_dict(costs.to_dict()) == costs
    assert "gather_s" not in stages().to_dict()
    assert costs.scaled(2).gather_s == (20, 30)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_replicas": 0}, "num_replicas must be a whole number, at least 1; got 0; pass 1 or more"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3; got 4"),
        ({"consecutive": "hosts"}, "consecutive must be 'stages' or 'replicas'; got 'hosts'"),
    ],
)
def test_a_wrong_replication_is_refused(fields, words):
    with pytest.raises(ScheduleError, match=words):
        Replication(**fields)
