"""Planes: a mesh with a tensor axis is one job, whose processes follow one plan and are named in errors."""

import pytest

from tests.support.jobs import planes as jobs
from tests.support.rank_processes import Ranks


@pytest.fixture(scope="module")
def ranks(four: Ranks) -> Ranks:
    """Return four processes, on which the tests of this file run."""
    return four


def test_a_mesh_dimension_of_the_tensor_axis_makes_planes(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(4, jobs.grids)):
        rows, plane, peers, name, groups = found["pp tp"]
        assert rows == (((0, 2),), ((1, 3),))[rank % 2]
        assert plane == rank % 2
        assert peers == ((0, 1), (2, 3))[rank // 2]
        assert name == f"rank {rank} (replica 0, rank {rank // 2} of its pipeline, tensor rank {rank % 2})"
        assert groups == [[0, 1], [2, 3]]
        rows, plane, peers, *_ = found["tp pp"]
        assert (rows, plane, peers) == ((((0, 1),), ((2, 3),))[rank // 2], rank // 2, ((0, 2), (1, 3))[rank % 2])
        assert found["named"][:3] == (rows, plane, peers)
        rows, plane, peers, name, _ = found["dp tp"]
        assert (rows, peers) == ((((0,), (2,)), ((1,), (3,)))[rank % 2], ((0, 1), (2, 3))[rank // 2])
        assert name == f"rank {rank} (replica {rank // 2}, rank 0 of its pipeline, tensor rank {rank % 2})"
        assert found["ignored"][:3] == (((0, 1),), 0, (rank // 2,))
        assert found["one"][:3] == (((0, 1), (2, 3)), 0, (rank,))


def test_all_planes_are_arranged_alike(ranks: Ranks) -> None:
    for rank, (rows, peers, name, of_two, in_two) in enumerate(ranks.run(4, jobs.arranged)):
        assert rows == (((2, 0),), ((3, 1),))[rank % 2]
        assert peers == ((0, 1), (2, 3))[rank // 2]
        assert name == f"rank {rank} (replica 0, rank {1 - rank // 2} of its pipeline, tensor rank {rank % 2})"
        assert of_two == ((2,), (0,))
        assert in_two == (((2,), (0,)), ((3,), (1,)))[rank % 2]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("inputs", ["all", "first"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_layers_that_the_user_has_split_train_as_the_loop(ranks: Ranks, schedule: str, inputs: str) -> None:
    for found in ranks.run(4, jobs.by_hand, schedule, inputs, timeout_s=60):
        assert max(found.values()) <= 1e-6


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("by hand", "a layer called the collective 'allreduce_' of torch.distributed"),
        ("DTensor", "the weight '0.0.up.weight' is a DTensor, which is divided among processes"),
    ],
)
def test_layers_that_the_user_has_split_are_not_measured_by_one_rank(ranks: Ranks, how: str, found: str) -> None:
    for said in ranks.run(4, jobs.not_measured, how, timeout_s=60):
        assert found in said
        assert "pass schedule= and boundaries=" in said


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_layers_that_wrap_divides_train_as_the_loop(ranks: Ranks, schedule: str) -> None:
    assert max(ranks.run(4, jobs.wrapped, schedule, timeout_s=60)) <= 1e-6


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_layers_with_dtensors_train_as_the_loop(ranks: Ranks, schedule: str) -> None:
    assert max(ranks.run(4, jobs.dtensors, schedule, timeout_s=60)) <= 1e-6


@pytest.mark.parametrize("own_loss", [False, True])
def test_split_layers_of_a_captured_model_train_as_the_loop(ranks: Ranks, own_loss: bool) -> None:
    assert max(ranks.run(4, jobs.captured, own_loss, timeout_s=60)) <= 1e-6


def test_the_links_between_all_ranks_of_all_planes_are_measured(ranks: Ranks) -> None:
    for (pairs, _), (of_replicas, groups) in ranks.run(4, jobs.links, timeout_s=60):
        assert pairs == of_replicas == [(one, other) for one in range(4) for other in range(4) if one != other]
        assert groups == [(0, 2), (1, 3)]
