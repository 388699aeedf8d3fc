"""A process that was forked from one with a pipeline is told that the pipeline is not its own."""

import re
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from pipesched import Pipeline
from tests.support.forking import in_child
from tests.support.jobs import forked as jobs
from tests.support.models import mixed_model
from tests.support.rank_processes import Ranks

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # of Python 3.12, in processes with threads
]

X, Y = jobs.X, jobs.Y
SAID = re.compile(
    r"ExecutionError: a pipeline may only be used in the process that made it, because that process holds the "
    r"pipeline's threads and connections; process (\d+) made this pipeline, but process \d+, a fork of process \1 "
    r"\(as DataLoader workers are\), used it; use the pipeline in process \1"
)


def pipeline(schedule: str) -> Pipeline:
    optimizer = (lambda params: torch.optim.SGD(params, lr=0.1)) if schedule == "pipedream" else None
    return Pipeline(
        mixed_model(),
        X[:4],
        devices=["cpu"] * 2,
        loss_fn=functional.cross_entropy,
        num_microbatches=4,
        boundaries=[5],
        schedule=schedule,
        optimizer=optimizer,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_using_the_pipeline_in_a_forked_child_is_an_error(schedule: str) -> None:
    with pipeline(schedule) as pipe:
        pipe.step(X, target=Y)
        assert SAID.fullmatch(in_child(lambda: pipe.step(X, target=Y)))
        assert SAID.fullmatch(in_child(lambda: pipe.evaluate(X, target=Y)))
        closing, leaving = in_child(pipe.close), in_child(lambda: jobs.leave(pipe))
        if schedule == "1f1b":
            assert (closing, leaving) == ("nothing", 'KeyError("the child\'s own")')
        else:  # steps are under way there
            assert SAID.fullmatch(closing)
            assert SAID.fullmatch(in_child(pipe.flush))
            assert leaving.startswith("KeyError")
        assert in_child(lambda: jobs.dropped(pipe)) == "nothing"
        pipe.step(X, target=Y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_using_the_pipeline_in_a_process_of_a_data_loader_is_an_error(schedule: str) -> None:
    class Rows(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return pipe.evaluate(X, target=Y)

    with pipeline(schedule) as pipe:
        pipe.step(X, target=Y)
        with pytest.raises(Exception, match="a pipeline may only be used in the process that made it"):
            list(DataLoader(Rows(), num_workers=1, multiprocessing_context="fork", timeout=60))
        pipe.step(X, target=Y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_forked_child_of_a_rank_gets_an_error_and_harms_no_rank(ranks: Ranks, schedule: str) -> None:
    for rank, found in enumerate(ranks.run(2, jobs.children_of_a_rank, schedule, timeout_s=200)):
        for name in ("step", "evaluate", "gather", *(["loss"] if rank == 0 and schedule == "1f1b" else [])):
            assert SAID.fullmatch(found[name]), (name, found[name])
        assert SAID.fullmatch(found["close"]) if schedule == "pipedream" else found["close"] == "nothing"
        assert found["leave"].startswith("KeyError")
        assert found["drop"] == "nothing"
