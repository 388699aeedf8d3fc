"""Completed programs: what runs stays as it is, and what is predicted is what runs."""

import json

import pytest

from pipesched import schedules
from pipesched.planning.candidates import synchronous
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.program.completion import UNCHANGED, Completion
from pipesched.simulation.links import Link, Links
from pipesched.simulation.replication import ReplicaCosts
from tests.support.completed_programs import DIGESTS, REPLICAS, cases, digest
from tests.support.synthetic_profiles import profile

WRITTEN = json.loads(DIGESTS.read_text())


@pytest.mark.one_in(36)
@pytest.mark.parametrize("updates", ["none", "optimizer", "clipping"])
@pytest.mark.parametrize("name", schedules.names())
def test_programs_that_run_stay_as_they_are(name, updates):
    own = [case for case in cases(name) if case.updates == updates]

    assert {str(case): digest(case) for case in own} == {str(case): WRITTEN[str(case)] for case in own}


def test_every_digest_belongs_to_a_case():
    assert {*WRITTEN} == {str(case) for name in schedules.names() for case in cases(name)}


def test_at_least_six_of_seven_cases_run():
    refused = [case for case, written in WRITTEN.items() if written.startswith("refused")]

    assert len(refused) < len(WRITTEN) / 7


LINKS = Links(Link(latency_s=0.25, bytes_per_s=1000))
UPDATES = {"none": UNCHANGED, "updates": Completion(updates=True), "norms": Completion(updates=True, norms=True)}


def planned(schedule, completion, replication, checkpoint) -> Plan:
    known = profile([1.0, 2, 1, 3, 1, 1, 2, 1], parameter_bytes=[64, 0, 64, 128, 64, 64, 256, 64])
    for at, node in enumerate(known.graphs[1].nodes.values()):
        node |= {"update_s": 1 + at % 3, "optimizer_bytes": 128, "update_transient_bytes": 32}
        node |= {"offload_bytes": 50, "offload_s": 0.5, "fetch_s": 0.5}
    replicas = None if replication is None else ReplicaCosts(replication, 2, LINKS)
    search = SearchRequest(
        known,
        Pins(list(known.layers)),
        2,
        6,
        (6,),
        schedule,
        checkpoint=checkpoint,
        links=LINKS,
        replica_costs=replicas,
        completion=completion,
        effort=2000,
    )
    return find_plan(search)


@pytest.mark.one_in(36)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", {"layer1": "offload", "layer4": "recompute"}])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("updates", UPDATES)
def test_the_step_that_a_search_compares_is_predicted_and_runs(updates, replicas, checkpoint):
    for schedule in synchronous():
        plan = planned(schedule, UPDATES[updates], REPLICAS[replicas], checkpoint)
        chosen = plan.alternatives[0]

        assert chosen.step_s == plan.predicted().makespan_s
        assert chosen.peak_bytes == max(memory.total_bytes for memory in plan.memory())
        assert running(plan, replicas=REPLICAS[replicas]) == plan.completed
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).completed == plan.completed


def running(plan, replicas):
    """Return the program that a pipeline with this plan runs, before messages are added."""
    request = PlanRequest().pinned(plan, [name for layers in plan.stages for name in layers])
    own = plan.completion
    factory = ProgramFactory(request, plan.program.num_ranks, updates=own.updates, norms=own.norms)
    factory.connect(plan.program.graph.edges, plan.stages)
    if replicas is not None:
        buckets = [[name for name in reversed(layers) if name != "layer1"] for layers in plan.stages]
        factory.replicate(buckets, replicas.gather_once if replicas.zero == 3 else None)
    return factory.full.without_messages
