"""A model over a mesh: each rank has the newest weights of its own stages, and gather_model brings them together."""

from typing import Any

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from pipesched.errors import InputError
from tests.support.jobs import gather as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(90)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("rank", "closed"), [(None, False), (0, True), (1, False)])
@pytest.mark.parametrize(("kind", "schedule"), [("row", "1f1b"), ("tied", "1f1b"), ("row", "zb-v"), ("row", "chimera")])
def test_the_gathered_model_is_the_loops(
    ranks: Ranks, kind: str, schedule: str, closed: bool, rank: int | None
) -> None:
    ranks.run(2, jobs.gathered, kind, schedule, rank, closed)


def test_three_ranks_gather(ranks: Ranks) -> None:
    ranks.run(3, jobs.gathered, "tied", "1f1b", None, False)


@pytest.mark.parametrize("kind", ["row", "tied"])
def test_reading_or_saving_a_stale_model_is_an_error(ranks: Ranks, kind: str) -> None:
    for rank, found in enumerate(ranks.run(2, jobs.readings, kind)):
        for name, text in found.items():
            rule = (
                "the model of a pipeline over a mesh must not be used while its weights are stale, because each rank "
                "trains only the weights of"
            )
            assert text.startswith(f"ExecutionError: {rule} its own stages; on "), name
            assert f"on rank {rank} " in text
            assert f"which rank {1 - rank} trains; call the pipeline's gather_model() on every rank" in text


def test_a_whole_state_makes_the_model_whole(ranks: Ranks) -> None:
    ranks.run(2, jobs.loaded)


def test_a_second_pipeline_works_or_is_refused_by_name(ranks: Ranks) -> None:
    for found in ranks.run(2, jobs.several):
        assert "a second pipeline; " not in found
        for name, text in found.items():
            assert text.startswith("ExecutionError"), name
            assert "over a mesh" in text, name  # a rank may read the other one's error before it makes its own
            assert "gather_model()" in text
        assert "another pipeline with a different placement of layers was used" in found["step"]
        assert "used in a second pipeline" in found["new"]


@pytest.mark.parametrize("kind", ["plain", "weighted"])
def test_one_loss_module_serves_several_pipelines(ranks: Ranks, kind: str) -> None:
    assert ranks.run(2, jobs.one_criterion, kind) == ["", ""]


def test_a_loss_module_with_trained_weights_is_stale_where_they_are_not_trained(ranks: Ranks) -> None:
    first, last = ranks.run(2, jobs.one_criterion, "own")
    assert "OwnLoss was called" in first
    assert last == ""


def test_gather_model_refuses_wrong_ranks_and_unequal_models(ranks: Ranks) -> None:
    for nowhere, unequal, adapted in ranks.run(2, jobs.wrong_ranks):
        assert nowhere.startswith(
            "InputError: the rank passed to gather_model must be a rank of the mesh, or None for all ranks; rank 0 of"
        )
        assert (
            "every rank must pass the same rank to gather_model; ranks 0 to 1 passed 1, None; pass the same" in unequal
        )
        assert "for gather_model; rank 0's model has no tensor '" in adapted
        assert "', which rank 1 sent; probably wrap= changed layers on some ranks only; use full_state" in adapted


def test_parts_without_contents_are_made_where_they_are_gathered(ranks: Ranks) -> None:
    for called, saved in ranks.run(2, jobs.without_contents):
        assert called.startswith("ExecutionError: the model of a pipeline over a mesh")
        assert saved.startswith("the model of a pipeline over a mesh"), "a warning"


def test_in_one_process_the_model_is_whole() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Pipeline(model, torch.ones(2, 2), devices=["cpu", "cpu"], schedule="1f1b", boundaries=[1]) as pipe:
        assert pipe.gather_model() is None
        assert pipe.gather_model(rank=0) is None
        with pytest.raises(InputError, match="must be a rank of the mesh, or None for all ranks; rank 0 of 1 passed 1"):
            pipe.gather_model(1)
