"""Rows over a mesh: lists that travel as messages, the end of the data, and optimizers that know names."""

import copy
from typing import Any

import pytest
import torch

from pipesched import Pipeline, Search
from pipesched.errors import InputError
from tests.support.jobs import rows as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_lists_are_split_over_a_mesh(ranks: Ranks, inputs: str) -> None:
    ranks.run(2, jobs.trains, inputs)


def test_rank_0_splits_lists_for_all_replicas(ranks: Ranks) -> None:
    ranks.run(4, jobs.trains, "first", 2)


def test_all_ranks_stop_when_the_data_ends(ranks: Ranks) -> None:
    first, other = ranks.run(2, jobs.loops, "ends")
    assert first == other
    assert len(first) == 3


def test_all_ranks_stop_when_rank_0_leaves_the_loop(ranks: Ranks) -> None:
    first, other = ranks.run(2, jobs.loops, "breaks")
    assert first == other
    assert len(first) == 2


def test_an_error_of_the_loader_reaches_all_ranks(ranks: Ranks) -> None:
    first, other = ranks.run(2, jobs.loops, "fails")
    assert first.startswith("RuntimeError: the disk is full")
    assert other.startswith("ExecutionError")
    assert "the disk is full" in other


def test_a_rank_that_leaves_the_loop_alone_is_named(ranks: Ranks) -> None:
    results = ranks.run(2, jobs.loops, "leaves")
    assert any("rank 0 runs batches(), but this rank evaluate()" in text for text in results), results


def test_a_loader_on_another_rank_is_refused(ranks: Ranks) -> None:
    results = ranks.run(2, jobs.loops, "swapped")
    assert any("must pass a loader to batches(), and the other ranks must pass None" in text for text in results)


def test_in_one_process_the_loop_is_a_loop_over_the_loader() -> None:
    options: dict[str, Any] = {"loss_fn": jobs.loss_fn, "schedule": "1f1b", "devices": ["cpu"] * 2}
    with Pipeline(jobs.scaled(), jobs.batch(2), num_microbatches=2, **options) as pipe:
        assert list(pipe.batches([1, 2])) == [1, 2]
        with pytest.raises(InputError, match="must get a loader on each rank that passes batches"):
            next(pipe.batches())


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("zero", "replicas"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_weight_decay_by_name(ranks: Ranks, zero: int, replicas: int) -> None:
    ranks.run(2 * replicas, jobs.decays, zero, replicas)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"schedule": "auto", "search": Search(memory_limit_bytes=1 << 30)}])
def test_weight_decay_by_name_in_one_process(options: dict[str, Any]) -> None:
    expected = jobs.scaled()
    optimizer = jobs.decayed(jobs.Named(expected))
    batch, target = jobs.batch(12), jobs.Y[:12]
    model = copy.deepcopy(expected)
    given: dict[str, Any] = {"loss_fn": jobs.loss_fn, "devices": ["cpu"] * 2, "schedule": "1f1b", **options}
    with Pipeline(model, jobs.batch(2), optimizer=jobs.decayed, num_microbatches=1, **given) as pipe:
        for _ in range(2):
            pipe.step(**batch, target=list(target))
            jobs.loss_fn(expected(**batch), list(target)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for own, due in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, due)


def test_a_model_on_the_meta_device_has_names() -> None:
    seen: list[str] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        seen.extend(name for name, _ in params.named())
        return torch.optim.AdamW(params.named(), lr=0.1)

    with torch.device("meta"):
        model = jobs.Scaled()
    options: dict[str, Any] = {"loss_fn": jobs.loss_fn, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    with Pipeline(model, jobs.batch(2), optimizer=optimizer, num_microbatches=2, **options) as pipe:
        pipe.step(**jobs.batch(6), target=list(jobs.Y[:6]))
        names = [
            name for one in pipe.optimizers.values() for group in one.param_groups for name in group["param_names"]
        ]
    assert seen == names == [name for name, _ in model.named_parameters()]
