"""Models that are too small to gain from a pipeline: one device runs them, and that is said; and what else is said of
a plan's sizes.
"""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipesched
from pipesched import Costs, Distributed, Pipeline, Plan, Profile, Search, graph_of
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import too_small
from pipesched.profiling import layer_profiler as profiler
from pipesched.simulation.overheads import Machine, Overheads
from pipesched.testing import reference_step
from tests.support import synthetic_profiles as profile_graphs
from tests.support.jobs import unused as jobs
from tests.support.rank_processes import Ranks

SAID = (
    r"the model is too small to gain from a pipeline: one device takes [\d.]+ [mu]?s per step, "
    r"and the best plan for several devices takes [\d.]+ [mu]?s"
)


def profile(layer_s: float, machine: Machine | None = None) -> Profile:
    """Eight layers that take so long forward, and twice as long backward."""
    return replace(profile_graphs.profile([layer_s / 4] * 8, (4,)), machine=machine or Machine())


def tuned(own: Profile, num_ranks: int = 8, **options: Any) -> Plan:
    return pipesched.tune(own, num_ranks=num_ranks, batch_size=128, num_microbatches=32, **options)


# ---- overheads that nobody measured ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_are", ["threads", "processes"])
def test_tiny_layers_are_left_on_one_device(ranks_are: Any) -> None:
    """Of 8 us a layer: a step of 32 micro-batches takes 6 ms, and what eight ranks tell each other more than that."""
    with pytest.warns(UserWarning, match=SAID) as said:
        plan = tuned(profile(8e-6), ranks_are=ranks_are)
    assert plan.program.num_ranks == 1
    one, best = re.findall(r"([\d.]+) ms", str(said[0].message))
    assert float(one) < float(best)
    assert plan.alternatives[0].step_s == pytest.approx(float(one) / 1e3, rel=1e-3)


def test_large_layers_use_all_devices_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned(profile(8e-3)).program.num_ranks == 8


def test_measured_overheads_are_taken_as_they_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = tuned(profile(8e-6, Machine(threads=Overheads(action_s=1e-9))))
    assert plan.program.num_ranks == 8
    assert plan.costs is not None
    assert plan.costs.overheads == Overheads(action_s=1e-9)


def test_a_message_between_two_ranks_costs_150_us_an_action() -> None:
    plan = tuned(profile(8e-3))
    assert plan.costs is not None
    usual = plan.costs.overheads
    assert usual is not None
    assert usual.action_s + usual.send.latency_s + usual.receive.latency_s == pytest.approx(150e-6)
    assert usual.crowding == (1.0,) * 8


def test_simulate_takes_costs_as_they_are() -> None:
    program = pipesched.schedules.get("1f1b").program(4, 8)
    assert pipesched.simulate(program, Costs.uniform(4)).makespan_s == (8 + 3) * 3
    own = profile(1.0)
    assert own.costs([list(own.layers)], 4).overheads is None


def test_a_model_that_one_device_has_no_room_for_is_cut() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned(profile(8e-6), memory_limit_bytes=12_000).program.num_ranks > 1


def test_all_ranks_are_used_where_that_is_asked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned(profile(8e-6), all_ranks=True).program.num_ranks == 8


# ---- pipelines -------------------------------------------------------------------------------------------------------


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))


def known(layer_s: float) -> Profile:
    """What the layers cost, of a made-up machine: no clock decides."""
    graph = graph_of(linears(), torch.randn(4, 8))
    nodes = profile(layer_s).graphs[4].nodes
    for number, (_, node) in enumerate(graph.nodes(data=True)):
        node.update({name: value for name, value in nodes[f"layer{number}"].items() if name.endswith("_s")})
    return Profile({4: graph}, machine=Machine(on_host=True))


def test_eight_small_linears_run_on_one_device() -> None:
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match=SAID):
        pipe = Pipeline(
            linears(), x, loss_fn=functional.mse_loss, devices=["cpu"] * 8, search=Search(profile=known(8e-6))
        )
    with pipe:
        assert pipe.plan.program.num_ranks == 1
        assert pipe.num_microbatches == 32
        assert "7 devices of 8 unused" in repr(pipe)
        assert any(other.num_ranks > 1 for other in pipe.plan.alternatives)
        x = x.repeat(32, 1)
        assert torch.equal(
            pipe.step(x, target=x),
            reference_step(linears(), x, target=x, loss_fn=functional.mse_loss, num_microbatches=32),
        )


@pytest.mark.usefixtures("thorough")
def test_a_search_knows_how_layers_crowd_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share an interpreter: layers that take three times as long beside others are better off alone."""
    monkeypatch.setattr(profiler, "crowd", lambda *_: [3.0])
    with pytest.warns(UserWarning, match=SAID):
        pipe = Pipeline(linears(), torch.randn(4, 8), loss_fn=functional.mse_loss, devices=["cpu"] * 2)
    with pipe:
        assert pipe.plan.program.num_ranks == 1
        assert pipe.predicted.costs is not None
        assert pipe.predicted.costs.overheads.slower(torch.tensor([2.0]).numpy()) == pytest.approx([3.0])


def test_given_schedules_stages_and_boundaries_are_kept_for_small_models() -> None:
    x = torch.randn(8, 8)
    for choices in ({"schedule": "1f1b"}, {"num_stages": 2}, {"boundaries": [4]}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe = Pipeline(linears(), x, loss_fn=functional.mse_loss, devices=["cpu"] * 2, **choices)
        with pipe:
            assert pipe.num_stages == 2


# ---- over a mesh -----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("options", [{}, {"distributed": Distributed(inputs="first")}, {"cut": True}], ids=str)
def test_ranks_of_a_mesh_that_are_not_used_wait_in_each_step(ranks: Ranks, options: dict[str, Any]) -> None:
    found = ranks.run(3, jobs.trains, options, timeout_s=150)
    used = 2 if "cut" in options else 1
    assert [one["ranks"] for one in found] == [used] * 3
    assert sum(one["parameters"] for one in found) == 6
    assert found[2]["parameters"] == found[2]["state"] == 0
    assert f"{3 - used} device{'s' * (used < 2)} of 3 unused" in found[0]["says"]


# ---- the size of a micro-batch ---------------------------------------------------------------------------------------


def test_the_first_step_of_other_micro_batches_than_the_sample_says_so_once() -> None:
    x = torch.randn(64, 8)
    pipe = Pipeline(linears(), x[:8], loss_fn=functional.mse_loss, devices=["cpu"] * 2, num_stages=2)
    with pipe:
        match = (
            r"micro-batches of 8 rows \(from the rows of the sample\), .* micro-batches of 4 rows \(32 rows in 8 "
            r"micro-batches\), .* pass a sample of 4 rows, or search=Search\(batch_size=32\), to Pipeline"
        )
        with pytest.warns(UserWarning, match=match):
            pipe.step(x[:32], target=x[:32])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(x[:32], target=x[:32])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("choices", [{"search": Search(batch_size=32)}, {"num_microbatches": 4}, {"schedule": "1f1b"}])
def test_nothing_is_said_of_the_size_that_was_planned_for(choices: dict[str, Any]) -> None:
    x = torch.randn(32, 8)
    choices = {"num_stages": 2, **choices}
    pipe = Pipeline(linears(), x[:8], loss_fn=functional.mse_loss, devices=["cpu"] * 2, **choices)
    with pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(x, target=x)
        pipe.step(x[:6], target=x[:6])


def stepped(x: torch.Tensor, sample: torch.Tensor, **choices: Any) -> list[str]:
    """What two steps on ``x`` say of sizes."""
    with Pipeline(linears(), sample, loss_fn=functional.mse_loss, devices=["cpu"] * 2, **choices) as pipe:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            pipe.step(x, target=x)
            pipe.step(x, target=x)
        return [str(one.message) for one in said]


def planned(rows: int, num_microbatches: int = 4) -> Plan:
    return pipesched.tune(
        known(8e-3), num_ranks=2, batch_size=rows * num_microbatches, num_microbatches=num_microbatches, num_stages=2
    )


def test_a_sample_that_is_the_whole_batch_is_noticed() -> None:
    x = torch.randn(64, 8)
    (said,) = stepped(x, x, num_microbatches=4, num_stages=2)
    assert said == (
        "the first step must have micro-batches of the planned size; the plan was found for micro-batches of 64 rows "
        "(from the rows of the sample), but the first step has micro-batches of 16 rows (64 rows in 4 micro-batches), "
        "so predicted times and memory are for the wrong size; pass a sample of 16 rows, or "
        "search=Search(batch_size=64), to Pipeline"
    )


def test_another_batch_size_than_that_of_the_search_is_noticed() -> None:
    x = torch.randn(64, 8)
    search = Search(batch_size=32, profile=known(8e-3))
    (said,) = stepped(x, x[:8], num_microbatches=4, num_stages=2, search=search)
    assert "micro-batches of 8 rows (from batch_size), but the first step has micro-batches of 16 rows" in said
    assert said.endswith("; pass search=Search(batch_size=64) to Pipeline")


def test_a_plan_for_other_micro_batches_is_noticed_whatever_the_sample_is() -> None:
    x = torch.randn(64, 8)
    for sample in (x, x[:16]):
        (said,) = stepped(x, sample, plan=planned(64))
        assert "for micro-batches of 64 rows (from plan=), but the first step has micro-batches of 16 rows" in said
        assert said.endswith("; make a plan with pipesched.tune(..., batch_size=64, num_microbatches=4)")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [64, 61, 68])
def test_nothing_is_said_of_a_plan_for_about_the_size_that_runs(rows: int) -> None:
    x = torch.randn(rows, 8)
    assert stepped(x, x, plan=planned(16)) == []


def test_a_size_is_noticed_once_even_if_the_first_step_fails_or_follows_a_forward() -> None:
    x = torch.randn(64, 8)
    failing = [RuntimeError("no")]

    def loss_fn(output: Any, target: Any) -> Any:
        if failing:
            raise failing.pop()
        return functional.mse_loss(output, target)

    with (
        Pipeline(linears(), x, loss_fn=loss_fn, devices=["cpu"] * 2, plan=planned(64)) as pipe,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        pipe.forward(x)
        with pytest.raises(RuntimeError, match="no"):
            pipe.step(x, target=x)
        pipe.step(x, target=x)
    assert len([one for one in said if "the planned size" in str(one.message)]) == 1


def test_a_plan_keeps_the_rows_of_its_micro_batches(tmp_path: Path) -> None:
    plan = planned(16)
    plan.save(tmp_path / "plan.json")
    assert plan.microbatch_rows == Plan.load(tmp_path / "plan.json").microbatch_rows == 16
    edited = plan.to_dict() | {"stages": [list(plan.stages[0][:-1]), [plan.stages[0][-1], *plan.stages[1]]]}
    assert Plan.from_dict(edited).microbatch_rows is None
    with pytest.raises(pipesched.errors.ScheduleError, match="microbatch_rows must be a whole number"):
        Plan.from_dict(plan.to_dict() | {"microbatch_rows": 1.5})
    x = torch.randn(64, 8)
    with Pipeline(linears(), x, loss_fn=functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        assert pipe.plan.microbatch_rows == 64  # the layers were measured with the sample
        pipe.step(x, target=x)
        pipe.step(x, target=x)
        assert pipe.plan.microbatch_rows == 8  # measured in the first step


def test_a_report_says_which_predictions_are_for_other_micro_batches() -> None:
    x = torch.randn(64, 8)
    with Pipeline(linears(), x, loss_fn=functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        pipe.step(x, target=x)
        other = "micro-batches of 64 rows; the measured step has micro-batches of 8 rows"
        assert f"predicted times and memory are for {other}" in pipe.report().lines
        pipe.step(x, target=x)
        assert f"predicted memory is for {other}" in pipe.report().lines


def test_a_plan_is_only_said_to_be_too_small_where_it_uses_one_device() -> None:
    own = profile(8e-3)
    plan = tuned(own)
    search = SearchRequest.of(own, 8, 32, PlanRequest())
    assert not too_small(plan, search)
    one = replace(plan.alternatives[0], num_ranks=1, step_s=0.0209)
    several = replace(plan.alternatives[0], step_s=0.027)
    small = replace(plan, alternatives=(one, several))
    assert too_small(small, search) == (
        "the model is too small to gain from a pipeline: one device takes 20.9 ms per step, and the best plan for "
        "several devices takes 27 ms"
    )
    assert not too_small(small, replace(search, num_ranks=1))
    assert not too_small(small, replace(search, num_stages=1))
    assert not too_small(replace(small, alternatives=(one,)), search)
    unfit = replace(several, peak_bytes=3, limit_bytes=2)
    assert not too_small(replace(small, alternatives=(one, unfit)), search)
    faster = replace(several, step_s=0.0208)
    assert not too_small(replace(small, alternatives=(one, faster)), search)
