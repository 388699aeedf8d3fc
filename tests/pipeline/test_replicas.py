"""Replicas of a pipeline train as one plain loop over the micro-batches of all of them."""

from functools import partial

import pytest
import torch

from tests.support.jobs import replicas as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "case",
    [
        jobs.Case("plain", (2, 2), "zb-h1", True, "all"),
        jobs.Case("tied", (2, 2), "interleaved-1f1b", True, "first"),
        jobs.Case("tied", (2, 2), "chimera", False, "all"),
        jobs.Case("plain", (4, 1), "dualpipe-v", False, "first"),
    ],
    ids=str,
)
def test_losses_gradients_weights_and_buffers_are_those_of_the_loop(ranks: Ranks, case: jobs.Case) -> None:
    """benchmarks/replicas.py runs all cases."""
    results = ranks.run(4, jobs.trained, case)
    assert jobs.differing(case, results) == []
    assert any(own.num_reductions for own in results) == (case.schedule != "chimera")  # whose sums come after the run


def test_replicas_that_would_not_stay_equal_are_refused_by_name(ranks: Ranks) -> None:
    of_ranks = ranks.run(4, jobs.refused)
    assert any("sparse" in found["sparse"] for found in of_ranks)
    for found in of_ranks:
        assert "InputError: with replicas, BatchNorm's running statistics must include" in found["BatchNorm"]
        assert "in layer '1'; pass numerics=Numerics(batch_norm='mini-batch')" in found["BatchNorm"]
        assert "ScheduleError: with replicas, a step must update the weights once" in found["updates"]
        assert "'pipedream' updates weights earlier" in found["updates"]
        assert "different mesh dimensions; got {'pipeline': 'pp', 'replicate': 'pp'}" in found["axes"]
        assert "the mesh dimension to which axes= maps 'shard'; parameter '" in found["shards"]
        assert "is divided among global ranks [0, 2]" in found["shards"] or "ranks [1, 3]" in found["shards"]
        assert "'replicate' is 'data', but the mesh has the dimensions ('dp', 'pp')" in found["names"]
        # A rank whose neighbour ends first may name the lost connection instead.
        assert "sparse" in found["sparse"] or "a failed rank stops all ranks" in found["sparse"]
        assert "rank 2 differs from rank 0: the ranks of the replicas is [[0, 2], [1, 3]]" in found["different axes"]
        assert "this model may write to '1.count'" in found["buffers"]


def test_replicas_start_with_the_weights_of_the_first(ranks: Ranks) -> None:
    assert ranks.run(4, jobs.starts_equal) == [True] * 4


def test_a_batch_that_does_not_fit_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for rank, (sizes, evaluated, rows, target) in enumerate(ranks.run(4, jobs.bad_batches)):
        assert "must have the same number of micro-batches; the replicas have [4, 3] micro-batches; pass" in sizes
        assert evaluated == sizes
        if rank < 2:
            assert "all replicas must pass a valid batch; replica 1 of 2 failed before the first action, with " in rows
            assert "needs a target" in target
        else:
            assert rows.startswith("InputError")
            assert target.startswith("InputError: loss_fn(output, target) needs a target")


@pytest.mark.parametrize(
    ("how", "updates", "tied"), [("skip", True, False), ("raise", False, False), ("skip", True, True)]
)
def test_a_loss_that_is_nan_in_one_replica_stops_all_replicas(
    ranks: Ranks, how: str, updates: bool, tied: bool
) -> None:
    for text, changed in ranks.run(4, partial(jobs.finds_nonfinite, updates=updates, tied=tied), how):
        assert "the loss for micro-batch 6 was the first value that was not finite" in text
        assert not changed


def test_a_weight_that_one_replica_uses_gets_its_gradient_in_all(ranks: Ranks) -> None:
    first = ["0.bias", "0.weight", "1.rare.bias", "1.rare.weight"]
    assert ranks.run(4, jobs.uses_some_weights) == [first, ["2.bias", "2.weight"]] * 2


def test_metrics_and_added_losses_are_those_of_all_replicas(ranks: Ranks) -> None:
    found = ranks.run(4, jobs.adds_and_measures)
    assert all(own == found[0] for own in found)
    assert found[0][0] == found[0][1]
    assert sorted(found[0][0]) == ["added_loss", "error", "largest", "z"]


def test_an_overflow_in_one_replica_skips_the_update_in_all(ranks: Ranks) -> None:
    assert ranks.run(4, jobs.overflows) == [[(1024.0, True), (512.0, False), (512.0, True)]] * 4


def test_replicas_of_sharded_stages(ranks: Ranks) -> None:
    ranks.run(4, jobs.sharded)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "schedule", "part"), [((2, 2, 1), "interleaved-1f1b", False), ((1, 2, 2), "zb-h1", True)]
)
def test_replicas_that_divide_weights_train_as_the_loop(
    ranks: Ranks, shape: tuple[int, int, int], schedule: str, part: bool
) -> None:
    for errors in ranks.run(4, partial(jobs.hybrid, part=part), shape, schedule):
        assert max(errors) <= 1e-6


@pytest.mark.smoke
def test_the_dimensions_of_a_mesh_are_recognised_or_named(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(4, jobs.grids)):
        assert found["by names"] == found["any names"] == ((0, 1), (2, 3))
        assert found["pipelines first"] == ((0, 2), (1, 3))
        assert found["two kinds of replicas"] == ((0,), (1,), (2,), (3,))
        assert found["one dimension"] == ((0, 1),)
        assert "this mesh has the dimensions ('a', 'b'); pass one dimension of the mesh" in found["unknown names"]
        assert found["one more dimension"] == ((0, 1), (2, 3))
        assert "this mesh has the dimensions ('dp', 'x', 'pp')" in found["unknown dimension"]
        assert "this mesh has 2 unnamed dimensions" in found["no names"]
        assert "axes= must map 'pipeline', and 'replicate' or 'shard' if there are replicas" in found["other axes"]
        assert "got 'pp'" in found["no mapping"]
        assert "mesh= must be a DeviceMesh" in found["no mesh"], rank


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_part_of_a_mesh_trains_where_torch_makes_its_groups(ranks: Ranks, shape: tuple[int, int]) -> None:
    """Before 2.14, torch named a group by the number of earlier groups of a process, which differs between ours."""
    case = jobs.Case("plain", shape, "1f1b", True, "all")
    results = ranks.run(4, jobs.trained_on_part, case)
    if torch.__version__ < (2, 14):
        assert all("waited 1 s for the group of ranks [" in found for found in results)
    else:
        assert jobs.differing(case, results) == []


def test_part_of_a_mesh_is_refused_after_some_processes_made_groups_alone(ranks: Ranks) -> None:
    for found in ranks.run(4, jobs.counts_groups_apart):
        assert "waited 1 s for the group of ranks [" in found
        assert "make all earlier process groups in every process" in found
