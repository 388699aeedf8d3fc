"""Records under ``pipesched.*``: few, at INFO and below but for failures, and quiet unless logging is configured."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Pipeline
from tests.support.jobs import agreement as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def test_plans_and_changes_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipesched")
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "boundaries": [2]}
    with Pipeline(model, x[:2], devices=["cpu"] * 2, schedule="1f1b", **options) as pipe:
        pipe.step(x, target=y)
        count = len(caplog.records)
        pipe.step(x, target=y)
        assert len(caplog.records) == count  # a step records nothing
        pipe.replan()
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert said[0] == (
        "pipesched.pipeline.construction",
        "made Pipeline(1f1b, 2 ranks, 2 stages, 4 micro-batches, checkpoint='never')",
    )
    assert said[-1][1].startswith("replanned before step 2: kept: the search for a better plan requires 3 measured")


def test_details_are_recorded_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pipesched")
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "boundaries": [1]}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Pipeline(model, x[:2], devices=["cpu"] * 2, schedule="1f1b", **options) as pipe:
        pipe.step(x, target=y)
        pipe.step(x[:3], target=y[:3])
    said = [record.getMessage() for record in caplog.records]
    assert "stage 1 on rank 1 (cpu): 1" in said
    assert said[-1] == "a step of 3 micro-batches needs new programs"


@pytest.mark.filterwarnings("ignore:the model is too small to gain")
def test_a_search_names_the_plan_that_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipesched")
    with Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), devices=["cpu"] * 2) as pipe:
        label = pipe.plan.alternatives[0].label
    assert f"chose a plan: {label}" in [record.getMessage() for record in caplog.records]


def test_failures_of_ranks_are_errors(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(2, jobs.records_of_a_failure)):
        assert f"INFO pipesched.runtime.connected_rank: rank {rank} of 2 is connected" in said
        assert "DEBUG pipesched.runtime.executors.channel_plan: the micro-batches have different shapes than" in said
        assert f"ERROR pipesched.runtime.connected_rank: rank {rank} of 2 stopped: rank 1 failed: Zero" in said


def test_nothing_is_printed_without_configuration() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("pipesched").handlers)
    assert logging.getLogger("pipesched").level == logging.NOTSET
