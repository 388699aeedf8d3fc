"""Small models of transformers, divided by "auto" or by names, train in a pipeline as in one process.

The gradients are clipped, the rows have different numbers of labels, some micro-batches have padding, an embedding is
frozen, and the heads of GPT-2, BERT and T5 are tied.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import trained_transformers as jobs
from tests.support.jobs.trained_transformers import Case, largest_difference
from tests.support.rank_processes import Ranks, preload

pytest.importorskip("transformers", reason="needs transformers: pip install pipesched[zoo]")
preload("tests.support.divided_transformers")  # importing transformers takes seconds

LIMIT = 1e-5
CASES = [
    *(Case(name) for name in ("gpt2", "llama", "bert", "t5")),
    *(Case(name, by_names=True) for name in ("gpt2", "bert")),
    *(Case(name, dropout=0.1) for name in ("gpt2", "llama", "bert", "t5")),
]


def name_of(case: Case) -> str:
    return f"{case.name} {'by names' if case.by_names else 'auto'}{' with dropout' if case.dropout else ''}"


def check(ranks: Ranks, case: Case, steps: int, timeout_s: float) -> None:
    """Train, and compare with one process."""
    mesh: Any = case.mesh
    results = ranks.run(mesh[0] * mesh[1] * mesh[2], jobs.trained, case, range(steps), timeout_s=timeout_s)
    due = jobs.looped(case, range(steps))
    found = [(largest_difference(one.losses, due.losses), largest_difference(one.norms, due.norms)) for one in results]
    print(f"{name_of(case)}, {mesh}, {steps} steps: losses differ by {found[0][0]:.1e}, norms by {found[0][1]:.1e}")
    assert max(losses for losses, _ in found) <= LIMIT
    assert max(norms for _, norms in found) <= 30 * LIMIT
    assert min(due.norms) > jobs.CLIP
    assert sum(one.part for one in results) < 1.25 * mesh[0]
    assert all(one.losses == results[0].losses for one in results)


@pytest.mark.one_in(16)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_divided_models_train_as_one_process(four: Ranks, case: Case) -> None:
    check(four, case, 3, 100)


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_replicas_of_a_divided_model_train_as_one_process(eight: Ranks) -> None:
    check(eight, Case("gpt2", mesh=(2, 2, 2), dropout=0.1), 3, 100)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_divided_models_train_50_steps_as_one_process(four: Ranks, case: Case) -> None:
    check(four, case, 50, 600)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_replicas_of_a_divided_model_train_50_steps_as_one_process(eight: Ranks) -> None:
    check(eight, Case("gpt2", mesh=(2, 2, 2)), 50, 600)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_divided_model_resumes_on_other_layouts(four: Ranks, tmp_path: Path, name: str) -> None:
    """As two replicas without a tensor axis, as one rank without a mesh, and with a tensor axis again."""
    due = jobs.looped(Case(name), range(6))
    path = str(tmp_path / "split")
    first = four.run(4, jobs.trained, Case(name), range(3), None, path, timeout_s=100)[0]
    assert largest_difference(first.losses, due.losses[:3]) <= LIMIT
    assert largest_difference(jobs.plain_losses(Case(name), first.state), first_losses(name)) <= LIMIT
    whole = str(tmp_path / "whole")
    replicas = four.run(4, jobs.trained, Case(name, (2, 2, 1)), range(3, 6), path, whole, timeout_s=100)
    again = four.run(4, jobs.trained, Case(name, (1, 1, 4)), range(3, 6), path, timeout_s=100)
    alone = jobs.trained(None, Case(name, None), range(3, 6), path)
    for results in (*replicas, *again, alone):
        assert largest_difference(results.losses, due.losses[3:]) <= LIMIT


def first_losses(name: str) -> list[float]:
    """Return the losses of the whole model that was trained in plain PyTorch for three steps."""
    return jobs.plain_losses(Case(name), jobs.looped(Case(name), range(3)).state)
