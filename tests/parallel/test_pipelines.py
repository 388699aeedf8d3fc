"""Pipelines of split layers: the same losses, norms and weights as one process, for every schedule and composition."""

from typing import Any

import pytest
import torch

from pipesched import Numerics, schedules
from tests.support.jobs import tensor_parallel as jobs
from tests.support.jobs.tensor_parallel import Case
from tests.support.rank_processes import Ranks

#: The largest relative difference from one process.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", LIMITS)
def test_split_layers_train_as_one_process_with_the_same_bits_for_every_schedule(
    four: Ranks, dtype: torch.dtype
) -> None:
    first: dict[str, torch.Tensor] = {}
    for schedule in ("1f1b", "zb-h1", "zb-v"):
        case = Case(schedule=schedule, dtype=dtype)
        results = four.run(4, jobs.trained, case, timeout_s=60)
        assert max(jobs.differences(case, results).values()) <= LIMITS[dtype]
        assert all((own.share > 0.01) == (schedule != "1f1b") for own in results), [own.share for own in results]
        found = {f"{rank % 2} {name}": own for rank, one in enumerate(results) for name, own in one.weights.items()}
        assert (found.keys(), len(found)) == ((first or found).keys(), 2 * 4 * 6)
        assert all(torch.equal(own, (first or found)[name]) for name, own in found.items())
        assert all(one.losses == results[0].losses and one.norms == results[0].norms for one in results)
        first = found


@pytest.mark.one_in(8)
@pytest.mark.parametrize("inputs", ["all", "first"])
@pytest.mark.parametrize("zero", range(4))
def test_replicas_of_split_layers_train_as_one_process(eight: Ranks, zero: int, inputs: str) -> None:
    case = Case(mesh=(2, 2, 2), zero=zero, inputs=inputs)
    results = eight.run(8, jobs.trained, case, timeout_s=60)
    assert max(jobs.differences(case, results).values()) <= LIMITS[case.dtype]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", jobs.OF_SEQUENCE)
def test_sequences_are_divided_inside_blocks_and_between_stages(four: Ranks, where: str) -> None:
    """The losses and norms have the same bits for each schedule."""
    for dtype, limit in LIMITS.items():
        every = [four.run(4, jobs.by_sequence, where, schedule, dtype, timeout_s=60) for schedule in ("1f1b", "zb-h1")]
        assert all(found == every[0][0] for results in every for found in results)
        assert every[0][0] == pytest.approx(jobs.whole_by_sequence(where, dtype), rel=limit)


# ---- schedules and options ------------------------------------------------------------------------------------------

#: The schedules whose stages share copies of weights, so that a step cannot update them.
COPIES = ("chimera", "dualpipe")


@pytest.mark.one_in(24)
@pytest.mark.parametrize("schedule", sorted(set(schedules.names()) - {*COPIES}))
def test_every_schedule_runs_split_layers(four: Ranks, schedule: str) -> None:
    """Also asynchronous schedules, which hold several versions of this rank's blocks."""
    case = Case(schedule=schedule, clip=None)
    whole = jobs.in_one_process(case)
    for split in four.run(4, jobs.of_schedule, case, timeout_s=60):
        assert len(split) == jobs.STEPS + (schedule in jobs.ASYNCHRONOUS)
        assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", COPIES)
def test_copies_of_split_layers_have_the_blocks_of_their_plane(four: Ranks, schedule: str) -> None:
    for found in four.run(4, jobs.gradients, Case(schedule=schedule, clip=None), timeout_s=60):
        assert max(found) <= 1e-5


def test_all_planes_follow_a_new_plan(four: Ranks) -> None:
    due = jobs.looped(torch.float32, 1, 0.5)
    for found in four.run(4, jobs.replanned, Case(), timeout_s=60):
        assert found.losses == pytest.approx(due.losses, rel=1e-5)


def test_options_that_split_layers_do_not_allow_are_refused_by_name(four: Ranks) -> None:
    for found in four.run(4, jobs.refused, timeout_s=60):
        assert "this pipeline has both options; split the layers in wrap= as well" in found["wrap="]
        assert "this pipeline has tensor_parallel= and compile=; leave one of the two out" in found["compile="]
        assert "this pipeline runs in one process, without mesh=; pass a mesh" in found["devices="]
        assert "the mesh of this pipeline has no dimension 'tp', and axes= names none" in found["no axis"]
        assert "each of 2 ranks of a tensor group holds other blocks of the weights" in found["redundancy="]
        assert "'nothing' matches none of" in found["no pattern"]
        assert "the input of '0.down', after '0.up', differs by" in found["sums"]
        assert "on rank 1 of 2" in found["sums"]
        assert "got 'column'; for example, pass {'blocks.*.up': 'column'" in found["no mapping"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_stage_may_begin_where_activations_are_divided(four: Ranks, boundary: int) -> None:
    """The first dropout of the stage then draws this rank's block of the mask."""
    assert max(four.run(4, jobs.cut_between, boundary)) <= 1e-5


OPTIONS: dict[str, dict[str, Any]] = {
    "always": {"checkpoint": "always"},
    "some": {"checkpoint": {"0": "recompute", "1": "recompute-cheap", "2": "offload"}},
    "tree": {"numerics": Numerics(reduction_order="tree")},
    "skip": {"numerics": Numerics(on_nonfinite="skip")},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_numerics_and_memory_work_with_split_layers(four: Ranks, schedule: str, option: str) -> None:
    due = jobs.looped(torch.float32, 1, None).losses
    for losses in four.run(4, jobs.with_options, schedule, OPTIONS[option], timeout_s=60):
        assert losses == pytest.approx(due, rel=1e-5)


# ---- the methods of a pipeline --------------------------------------------------------------------------------------


def test_every_plane_gets_the_results_of_a_call(four: Ranks) -> None:
    every = four.run(4, jobs.surface, timeout_s=60)
    for rank, found in enumerate(every):
        assert found["metrics"] == every[0]["metrics"]
        assert found["norm"] == every[0]["norm"] == pytest.approx(found["due norm"], rel=1e-5)
        assert found["ranks"] == [0, 1]
        assert found["plan"] == every[0]["plan"]
        assert f"stage {rank // 2} on rank {rank // 2}" in found["text"]
        assert "8 micro-batches, 2 planes" in found["text"]
        assert found["memory"] == every[0]["memory"]
        assert max(found["outputs"], found["forward"]) < 1e-5
        assert found["one rank"] == (rank < 2)
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-5)


def test_the_ranks_of_a_tensor_group_compare_their_batches(four: Ranks) -> None:
    assert all("has other values than this rank" in said for said in four.run(4, jobs.other_batches, "values"))
    assert any("has a different batch in this step" in said for said in four.run(4, jobs.other_batches, "rows"))


def test_all_planes_split_the_same_layers(four: Ranks) -> None:
    for said in four.run(4, jobs.other_styles):
        assert "rank 1 differs from rank 0: tensor_parallel= is" in said


def test_replicas_of_split_layers_become_one_pipeline(four: Ranks) -> None:
    for losses, due in four.run(4, jobs.other_replicas, timeout_s=60):
        assert losses == pytest.approx(due, rel=1e-5)


def test_predictions_contain_the_collectives_of_layers(four: Ranks) -> None:
    """A block has an all-reduce of two rounds in its F and in its I, and none in its W."""
    latency_s = 0.02
    forward, inputs, weights = four.run(4, jobs.costs, latency_s, timeout_s=60)[0]
    assert min(*forward, *inputs) >= 2 * 2 * latency_s
    assert 0 < max(weights) < latency_s
