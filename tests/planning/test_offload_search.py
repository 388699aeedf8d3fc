"""Searches that may let activations wait on the host: where a limit of memory asks for it, and where that is faster."""

import copy
import json
from dataclasses import replace
from itertools import combinations, product
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipesched
from pipesched import Pipeline, Plan, schedules
from pipesched.errors import MemoryLimitError, PartitionError
from pipesched.pipeline.auto_plan import on_devices
from pipesched.planning.candidates import Candidate
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.pins import Pins
from pipesched.planning.report.report import Report
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan
from pipesched.simulation.overheads import Machine
from pipesched.simulation.profile import Profile
from pipesched.simulation.simulator import step_time
from pipesched.testing import reference_step
from tests.support.synthetic_profiles import profile

WORDS = (None, "recompute", "offload")


def search(times, ranks, count, schedule, limit=None, *, host=None, on_host=False, layers=None, **asked):
    """For one schedule on all ranks. host: bytes a second that are copied there."""
    machine = Machine(host_bytes_per_s=host, on_host=on_host)
    known = replace(profile(times, **(layers or {})), machine=machine)
    pins = Pins(list(known.layers))
    limits = None if limit is None else (limit,) * ranks
    return SearchRequest(
        known, pins, ranks, count, (count,), schedules.get(schedule), memory_limit_bytes=limits, all_ranks=True, **asked
    )


def words(plan):
    return set() if isinstance(plan.checkpoint, str) else {*plan.checkpoint.values()}


def shortest(asked, allowed=WORDS):
    """The shortest simulated step of all cuts with all choices that keep the limits."""
    layers, (count,) = list(asked.pins.layers), asked.num_microbatches
    candidate = Candidate(schedule=asked.schedule, num_ranks=asked.num_ranks, num_microbatches=count, splits=False)
    found = inf
    for starts in combinations(range(1, len(layers)), candidate.num_stages - 1):
        ends = (*starts, len(layers))
        stages = tuple(tuple(layers[begin:end]) for begin, end in zip((0, *starts), ends, strict=True))
        for chosen in product(allowed, repeat=len(layers)):
            keep = {layer: word for layer, word in zip(layers, chosen, strict=True) if word}
            costs = asked.profile.costs(stages, 1, keep=keep)
            one = EvaluatedCandidate(
                candidate=candidate.recomputing(keep),
                stages=stages,
                costs=costs,
                limit_bytes=asked.memory_limit_bytes,
            )
            if not any(one.excess_bytes):
                found = min(found, step_time(one.runs, costs))
    return found


LARGE = {"activation_bytes": 100_000, "parameter_bytes": 10}  # what beside is held is small


@settings(max_examples=3)
@given(
    times=st.lists(st.integers(1, 4).map(float), min_size=4, max_size=4),
    shape=st.sampled_from([(2, 8, "gpipe"), (3, 6, "1f1b")]),
    output_bytes=st.sampled_from([100, 10_000]),
    host=st.sampled_from([2e4, 5e4, 1e5]),
    share=st.sampled_from([0.4, 0.6, 0.8]),
)
def test_the_step_is_near_the_shortest_of_all_cuts_and_choices(times, shape, output_bytes, host, share):
    asked = search(times, *shape, host=host, layers={**LARGE, "output_bytes": output_bytes})
    limit = int(share * max(one.total_bytes for one in find_plan(asked).memory()))
    asked = replace(asked, memory_limit_bytes=(limit,) * shape[0])
    best = shortest(asked)
    if best == inf:
        with pytest.raises(MemoryLimitError):
            find_plan(asked)
        return
    plan = find_plan(asked)
    assert max(one.total_bytes for one in plan.memory()) <= limit
    assert plan.predicted().makespan_s <= 1.25 * best


def with_large_inputs(**asked):
    """A layer a rank. What a layer is given is as large as what it saves: to recompute from it spares nothing."""
    layers = {**LARGE, "output_bytes": 100_000}
    made = search([1.0] * 8, 8, 16, "1f1b", layers=layers, **asked)
    made.profile.graphs[1].nodes["layer0"]["input_bytes"] = made.profile.graphs[1].nodes["layer7"]["output_bytes"] = 10
    limits = (1_150_000, 1_050_000, 950_000, 850_000, 750_000, 650_000, 500_000, 350_000)
    return replace(made, memory_limit_bytes=limits)


def test_a_limit_that_only_offloading_meets_is_met():
    asked = with_large_inputs(host=1e5)
    with pytest.raises(
        MemoryLimitError,
        match=r"the smallest limit for a plan is .*; the given limit is enough with offload=True; raise",
    ):
        find_plan(replace(asked, offload=False))
    plan = find_plan(asked)
    assert "offload" in words(plan)
    held = [one.total_bytes for one in plan.memory()]
    assert all(own <= limit for own, limit in zip(held, asked.memory_limit_bytes, strict=True))
    assert "offload" in plan.alternatives[0].checkpoint
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.to_dict() == plan.to_dict()
    assert again.predicted().makespan_s == plan.predicted().makespan_s
    text = Report(plan).text(200)
    assert "offloaded" in text
    assert "FETCH" in text


def test_the_error_says_what_hinders_offloading():
    asked = with_large_inputs()
    unknown = r"; the given limit is enough with offload=True and a profile with host_bytes_per_s; raise"
    with pytest.raises(MemoryLimitError, match=unknown):
        find_plan(asked)
    machine = Machine(host_bytes_per_s=1e5)
    known = replace(asked, profile=replace(asked.profile, machine=machine), checkpoint="always")
    with pytest.raises(
        MemoryLimitError, match=r"; the given limit is enough with offload=True, if checkpoint= is left out; raise"
    ):
        find_plan(known)
    on_host = replace(machine, on_host=True)  # where it gives no memory back nobody is told to try
    with pytest.raises(MemoryLimitError, match=r"^(?!.*offload)"):
        find_plan(replace(asked, profile=replace(asked.profile, machine=on_host)))
    with pytest.raises(MemoryLimitError, match=r"^(?!.*offload)"):
        find_plan(replace(known, checkpoint=None, memory_limit_bytes=(10_000,) * 8))


@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 4).map(lambda time: time / 1e3), min_size=4, max_size=8),
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"]),
    st.sampled_from([0.4, 0.6, 0.8]),
)
def test_a_slow_host_gets_nothing_where_recomputing_fits(times, schedule, share):
    layers = {"activation_bytes": 10_000_000, "output_bytes": 1_000_000}
    asked = search(times, 2, 8, schedule, host=1e6, layers=layers)
    limit = int(share * max(one.total_bytes for one in find_plan(asked).memory()))
    asked = replace(asked, memory_limit_bytes=(limit,) * 2)
    try:
        without = find_plan(replace(asked, offload=False))
    except MemoryLimitError:
        return
    plan = find_plan(asked)
    assert "offload" not in words(plan)
    assert plan.predicted().makespan_s <= 1.01 * without.predicted().makespan_s


def test_a_fast_host_spares_recomputing():
    asked = search([1.0] * 8, 2, 8, "gpipe", 1_800_000, host=1e6, layers=LARGE)
    plan, without = find_plan(asked), find_plan(replace(asked, offload=False))
    assert words(plan) == {"offload"}
    assert words(without) == {"recompute"}
    assert plan.predicted().makespan_s < 0.9 * without.predicted().makespan_s
    trace = plan.predicted()
    assert {str(span.action.kind) for span in trace.spans if span.lane == "copy"} >= {"OFFLOAD", "FETCH"}


# ---- whether it is on the table -------------------------------------------------------------------------------------


def test_copies_are_searched_where_they_give_memory_back():
    asked = search([1.0] * 4, 2, 8, "gpipe", 10**9, host=1e6)
    assert asked.may_offload
    assert not replace(asked, offload=False).may_offload
    assert not search([1.0] * 4, 2, 8, "gpipe", 10**9).may_offload
    on_host = search([1.0] * 4, 2, 8, "gpipe", 10**9, host=1e6, on_host=True)
    assert not on_host.may_offload
    assert replace(on_host, offload=True).may_offload
    with pytest.raises(
        PartitionError, match=r"the machine of this profile has no host_bytes_per_s; measure the model again"
    ):
        search([1.0] * 4, 2, 8, "gpipe", 10**9, offload=True)
    with pytest.raises(PartitionError, match=r"'auto', True or False; got 'never'; choose one"):
        search([1.0] * 4, 2, 8, "gpipe", offload="never")


def test_the_profile_states_whether_the_devices_are_the_hosts_own():
    cpu, made_up = [torch.device("cpu")], profile([1.0], (1,))
    assert on_devices(made_up, cpu, "auto").machine == Machine(on_host=True)
    forced = on_devices(made_up, cpu, offload=True).machine
    assert forced.on_host
    assert 1e7 < forced.host_bytes_per_s < 1e13
    given = replace(made_up, machine=Machine(host_bytes_per_s=5.0))
    assert on_devices(given, cpu, offload=True).machine == Machine(host_bytes_per_s=5.0, on_host=True)


def test_a_profile_knows_how_fast_its_device_copies(tmp_path):
    found = pipesched.profile(nn.Linear(4, 4), torch.randn(2, 4), rows=[2])
    assert found.machine.on_host
    assert 1e7 < found.machine.host_bytes_per_s < 1e13
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").machine == found.machine
    older = found.to_dict()
    del older["machine"]["host_bytes_per_s"], older["machine"]["on_host"]
    assert Profile.from_dict(older).machine == Machine(found.machine.name)
    with pytest.raises(pipesched.errors.ScheduleError, match=r"above 0, .* or None .* host_bytes_per_s is 0"):
        Machine(host_bytes_per_s=0)


# ---- what runs ------------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.1))))


def measured(module, x, machine):
    """A second a Linear; what layers save is much, and what they pass on little."""
    graph = pipesched.graph_of(module, x, measured=False)
    for name, node in graph.nodes(data=True):
        forward_s = 1.0 if node["parameters"] else 0.01
        times = {"input_grad_s": forward_s, "weight_grad_s": forward_s, "backward_s": 2 * forward_s}
        sizes = {"input_bytes": 10, "output_bytes": 10, "weight_grad_bytes": 0, "activation_bytes": 100_000}
        graph.add_node(name, forward_s=forward_s, **times, **sizes)
    return Profile({len(x): graph}, machine=machine)


def test_a_plan_with_copies_is_saved_and_runs_with_the_loops_bits(tmp_path):
    own, plain = model(), copy.deepcopy(model())
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    known = measured(own, x[:2], Machine(host_bytes_per_s=1e6))
    given = {"loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * 2, "seed": 3}
    asked = {"schedule": "gpipe", "num_microbatches": 8}
    limited = pipesched.Search(profile=known, memory_limit_bytes=1_800_000)
    with Pipeline(own, x[:2], **given, **asked, search=limited) as pipe:
        assert words(pipe.plan) == {"recompute"}  # on a CPU nothing is offloaded unasked
    with Pipeline(own, x[:2], **given, **asked, search=replace(limited, offload=True)) as pipe:
        plan = pipe.plan
        assert "offload" in words(plan)
        assert "OFFLOAD" in {str(span.action.kind) for span in pipe.predicted.spans}
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.checkpoint == plan.checkpoint
    with Pipeline(own, x[:2], **given, plan=again) as pipe:
        loss = pipe.step(x, target=y)
        assert {"OFFLOAD", "FETCH"} <= {str(span.action.kind) for span in pipe.trace.spans}
    expected = reference_step(
        plain, x, target=y, loss_fn=nn.functional.mse_loss, num_microbatches=plan.program.num_microbatches, seed=3
    )
    assert torch.equal(loss, expected)
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
