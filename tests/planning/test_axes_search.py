"""Tests of the division of ranks into pipelines and replicas."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipesched
from pipesched import Link, Links, Plan
from pipesched.errors import DeviceCountError, InputError, MemoryLimitError, PartitionError, ScheduleError
from pipesched.pipeline.checks.replica_checks import check_axes
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.report.report import Report
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import Tuner, find_plan, find_plan_of_replicas
from pipesched.simulation.replication import ReplicaCosts, Replication
from tests.support.jobs import axes
from tests.support.rank_processes import Ranks
from tests.support.synthetic_profiles import profile

FAST = Links(inside=Link(1e-6, 1e12))
LAYERS = profile([1e-3] * 8, (1, 2), parameter_bytes=10**6, activation_bytes=10)


def with_states(known, state_bytes):
    for graph in known.graphs.values():
        for _, node in graph.nodes(data=True):
            node["optimizer_bytes"] = state_bytes
    return known


def tuned(known=LAYERS, **options):
    return pipesched.tune(known, **{"num_ranks": 4, "batch_size": 16, "axes": "auto", "links": FAST} | options)


def test_ranks_become_replicas_if_memory_and_links_allow():
    """Replicas have no bubble."""
    plan = tuned()
    assert plan.mesh == {"dp": 4, "pp": 1}
    assert plan.replication.zero == 0
    assert "dp 4 x pp 1" in repr(plan)


def test_ranks_become_a_pipeline_if_sums_are_slow():
    plan = tuned(links=Links(inside=Link(1e-6, 1e8)))
    assert plan.mesh == {"dp": 1, "pp": 4}


def test_the_pipeline_is_only_as_deep_as_memory_requires():
    """A rank holds weights and copies of gradients: 16 MB without a pipeline, 8 MB in one of two ranks."""
    plan = tuned(memory_limit_bytes=10 * 10**6)
    assert plan.mesh == {"dp": 2, "pp": 2}
    assert max(own.total_bytes for own in plan.memory()) <= 10 * 10**6


def test_zero_divides_states_instead_of_a_deeper_pipeline():
    """Whole states of 24 MB exceed the limit; a quarter of them fits."""
    known = with_states(profile([1e-3] * 8, (1, 2), parameter_bytes=10**6, activation_bytes=10), 3 * 10**6)
    plan = tuned(known, memory_limit_bytes=26 * 10**6)
    assert plan.mesh == {"dp": 4, "pp": 1}
    assert plan.replication.zero == 2
    assert plan.memory()[0].optimizer == 6 * 10**6


#: A rank has 4 stages of 1 MB. Each has 10 layers, so the buffers in which its weights are gathered are small.
SMALL_LAYERS = profile([1e-4] * 80, (1, 2), parameter_bytes=10**5, activation_bytes=10**5)
CUT = {
    "schedule": "interleaved-1f1b",
    "num_stages": 8,
    "boundaries": list(range(10, 80, 10)),
    "num_microbatches": 4,
    "checkpoint": "never",
}


def largest(plan):
    return max(own.total_bytes for own in plan.memory())


def test_weights_are_divided_if_no_other_plan_fits():
    options = {"axes": {"pipeline": 2, "replicate": 2}, **CUT}
    limit = min(largest(tuned(SMALL_LAYERS, zero=zero, **options)) for zero in (0, 2, 3)) - 1
    plan = tuned(SMALL_LAYERS, memory_limit_bytes=limit, **options)
    assert (plan.replication.zero, plan.replication.gather_once) == (3, False)
    assert largest(plan) <= limit


def test_divided_weights_are_gathered_for_each_use_only_if_memory_requires_it():
    """Kept, a rank holds 4 MB of weights when its activations peak; freed, less."""
    request = PlanRequest(**CUT)
    replicas = ReplicaCosts(Replication(num_replicas=2, zero=3), 2, FAST)
    limits = {}
    for once in (True, False):
        search = SearchRequest.of(SMALL_LAYERS, 2, 8, request, replica_costs=replicas.gathering(once=once))
        limits[once] = largest(find_plan(search))
    assert limits[True] > limits[False]
    for limit, once in ((limits[True], True), (limits[True] - 1, False)):
        search = SearchRequest.of(SMALL_LAYERS, 2, 8, request, replica_costs=replicas, memory_limit_bytes=limit)
        chosen = find_plan_of_replicas(search)
        assert chosen.replication.gather_once is once
        assert ("weights gathered for each use" in str(Report(chosen))) is not once
        assert Plan.from_dict(json.loads(json.dumps(chosen.to_dict()))).replication == chosen.replication
    assert [own.axis for own in chosen.communication()] == ["pipeline", "replicas", "zero"]
    gathers = sum(map(chosen.completed.gathers.__getitem__, (0, 2, 4, 6)))
    assert chosen.communication()[2].sent_bytes == gathers * 10**6 // 2
    with pytest.raises(MemoryLimitError):
        find_plan_of_replicas(replace(search, memory_limit_bytes=(limits[False] // 2,) * 2))


@pytest.fixture(scope="module")
def plan():
    return tuned(axes={"pipeline": 2, "replicate": 2}, zero=2, num_microbatches=4)


def test_given_axes_and_zero_are_kept(plan):
    assert (plan.replication.num_replicas, plan.program.num_ranks, plan.replication.zero) == (2, 2, 2)


def test_weights_divided_between_steps_send_as_much_as_gathered_updates(plan):
    divided = tuned(axes={"pipeline": 2, "replicate": 2}, zero=3, num_microbatches=4)
    assert divided.replication.zero == 3
    sent = [{own.axis: own.sent_bytes for own in made.communication()} for made in (divided, plan)]
    for axis in ("replicas", "zero"):
        assert sent[0][axis] == sent[1][axis] > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_plan_runs_on_the_mesh_that_it_asks_for(ranks: Ranks, zero: int):
    """The ranks tune, each for itself; the results are those of the loop."""
    found = ranks.run(4, axes.runs_a_plan, zero)
    assert found == [found[0]] * 4
    assert found[0] == ({"dp": 2, "pp": 2}, zero)


def test_replicas_go_inside_a_host_if_sums_are_larger_than_messages():
    links = Links.of_hosts(2, 4, inside=Link(1e-6, 1e12), between=Link(1e-6, 1e8))
    plan = tuned(axes={"pipeline": 2, "replicate": 2}, links=links, zero=0)
    assert list(plan.mesh) == ["pp", "dp"]


def test_searches_that_share_cuts_find_what_each_finds_alone():
    solved = {}
    for zero in (0, 2, 3):
        replicas = ReplicaCosts(Replication(num_replicas=2, zero=zero), 2, FAST)
        options = {"replica_costs": replicas, "memory_limit_bytes": 16 * 10**6, "effort": 20_000}
        search = SearchRequest.of(SMALL_LAYERS, 2, 8, PlanRequest(), **options)
        found = [Tuner(search, solved=shared).search() for shared in (solved, None)]
        assert found[0].stages == found[1].stages
        assert found[0].step_s == found[1].step_s
    assert solved


def test_the_batch_is_that_of_all_replicas(plan):
    """16 rows are 2 replicas x 4 micro-batches x 2 rows, each of which takes 1 ms in each of 8 layers."""
    assert plan.program.num_microbatches == 4
    assert sum(plan.costs.forward_s) == pytest.approx(16e-3)


def test_the_plan_states_its_axes_in_every_form(plan):
    names = [own.axis for own in plan.communication()]
    assert names == ["pipeline", "replicas", "zero"]
    assert "replicas: 2 ranks, at most 1.91 MiB sent by a rank per step" in plan.explain()
    report = Report(plan).text()
    assert "2 replicas of 2 ranks (dp 2 x pp 2, zero 2)" in report
    assert "Communication" in report


def test_a_plan_with_axes_survives_json(plan):
    saved = json.loads(json.dumps(plan.to_dict()))
    again = Plan.from_dict(saved)
    assert again == plan
    assert again.predicted().makespan_s == plan.predicted().makespan_s
    assert plan.alternatives[0].step_s == plan.predicted().makespan_s
    with pytest.raises(ScheduleError, match="zero must be 0, 1, 2 or 3; got 7"):
        Plan.from_dict({**saved, "replication": {**saved["replication"], "zero": 7}})


def test_a_plan_without_axes_is_saved_as_before():
    plan = pipesched.tune(LAYERS, num_ranks=2, batch_size=16)
    assert plan.mesh is None
    assert "replication" not in plan.to_dict()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"axes": "all"}, PartitionError, "axes= must be 'auto', or a mapping .* got 'all'; for example, pass"),
        ({"axes": {"pipeline": 3, "replicate": 2}}, PartitionError, "must be the number of ranks; .* 4 ranks"),
        ({"axes": {"pipeline": 1, "replicate": 4}, "batch_size": 6}, PartitionError, "6 rows cannot .* among 4"),
        ({"zero": 5}, PartitionError, "zero= must be 'auto', 0, 1, 2 or 3; got 5"),
        ({"axes": None, "zero": 1}, InputError, "got zero=1 without axes="),
        ({"confirm": 2}, InputError, "only simulates plans for num_ranks= ranks, and runs none; got confirm=2"),
        ({"num_ranks": None, "devices": ["cpu"] * 4}, InputError, "got devices= or mesh=; pass num_ranks="),
        ({"memory_limit_bytes": [1] * 4}, PartitionError, "all ranks have the same memory limit"),
        ({"num_microbatches": 32}, PartitionError, "no division of 4 ranks meets these conditions for 16 rows with 32"),
        ({"memory_limit_bytes": 10**6}, MemoryLimitError, "no division of 4 ranks .* pp 4.*smallest limit for a plan"),
    ],
)
def test_wrong_requests_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        tuned(**options)


def test_a_pipeline_with_other_axes_refuses_the_plan(plan):
    check_axes(plan, 2, 2, 2)
    with pytest.raises(DeviceCountError, match=r"has 2 replicas of 2 ranks .* pipeline has 4 replicas of 2 ranks"):
        check_axes(plan, 2, 4, 2)
    with pytest.raises(InputError, match=r"the plan has zero=2, but the pipeline has zero=0; .*Distributed\(zero=2\)"):
        check_axes(plan, 2, 2, 0)


def test_one_process_refuses_a_plan_with_replicas(plan):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(DeviceCountError, match="but the pipeline has 1 replica of 2 ranks"):
        pipesched.Pipeline(model, torch.ones(2, 4), devices=["cpu"] * 2, plan=plan)
