"""Functions of torch that would take the parameters of one rank for those of the model are refused."""

import warnings

import pytest
from torch.nn import functional

from pipesched import Pipeline
from tests.support.jobs import misuse as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

CLIPPING = "each rank of a mesh has the gradients of its own stages only; call pipe.clip_grad_norm_ on every rank"
AVERAGING = "call pipe.gather_model() on every rank before update_parameters(model), or average pipe.named_parameters()"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("norm", CLIPPING),
        ("norm of the model", CLIPPING),
        ("norm by keyword", CLIPPING),
        ("another norm", CLIPPING),
        ("average", AVERAGING),
        ("average with a decay", AVERAGING),
        ("values", ""),
        ("optimizer", ""),
        ("average of gathered weights", ""),
    ],
)
def test_what_needs_all_ranks_is_refused_on_every_rank(ranks: Ranks, name: str, text: str) -> None:
    for said in ranks.run(2, jobs.calls, name):
        assert text in said
        assert bool(said) == bool(text)


def test_in_one_process_the_same_calls_work() -> None:
    options = {"loss_fn": functional.mse_loss, "schedule": "1f1b", "num_microbatches": 4, "boundaries": [2]}
    with Pipeline(jobs.model(), jobs.X[:2], devices=["cpu"] * 2, **options) as pipe:
        pipe.step(jobs.X, target=jobs.Y)
        for call in jobs.of_torch(pipe).values():
            call()


def test_processes_that_train_by_themselves_are_warned(ranks: Ranks) -> None:
    for said in ranks.run(2, jobs.alone):
        assert len(said) == 1
        assert "processes makes a pipeline with devices= and trains the whole model by itself" in said[0]
        assert "pass mesh=" in said[0]


@pytest.mark.parametrize(("size", "warns"), [("2", True), ("1", False), ("", False), ("two", False)])
def test_a_launched_process_without_a_group_is_warned(size: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets WORLD_SIZE, also for scripts that never make a process group."""
    monkeypatch.setenv("WORLD_SIZE", size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"loss_fn": functional.mse_loss, "schedule": "1f1b", "boundaries": [2]}
        Pipeline(jobs.model(), jobs.X[:2], devices=["cpu"] * 2, **options).close()
    assert [("pass mesh=" in str(one.message)) for one in caught] == [True] * warns
