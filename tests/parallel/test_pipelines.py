"""Pipelines of split layers: the same losses, norms and weights as one process, for every schedule and composition."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.jobs import tensor_parallel as jobs
from tests.support.jobs.tensor_parallel import Case
from tests.support.rank_processes import Ranks

#: The largest relative difference from one process.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Start four processes that serve as ranks for all tests of this file."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    """Start eight processes that serve as ranks for all tests of this file."""
    ranks = Ranks(8)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("dtype", LIMITS)
def test_split_layers_train_as_one_process_with_the_same_bits_for_every_schedule(
    four: Ranks, dtype: torch.dtype
) -> None:
    first: dict[str, torch.Tensor] = {}
    for schedule in ("1f1b", "zb-h1", "zb-v"):
        case = Case(schedule=schedule, dtype=dtype)
        results = four.run(4, jobs.trained, case, timeout_s=60)
        assert max(jobs.differences(case, results).values()) <= LIMITS[dtype]
        assert all((own.share > 0.02) == (schedule != "1f1b") for own in results), [own.share for own in results]
        found = {f"{rank % 2} {name}": own for rank, one in enumerate(results) for name, own in one.weights.items()}
        assert (found.keys(), len(found)) == ((first or found).keys(), 2 * 4 * 6)
        assert all(torch.equal(own, (first or found)[name]) for name, own in found.items())
        assert all(one.losses == results[0].losses and one.norms == results[0].norms for one in results)
        first = found


@pytest.mark.parametrize("inputs", ["all", "first"])
@pytest.mark.parametrize("zero", range(4))
def test_replicas_of_split_layers_train_as_one_process(eight: Ranks, zero: int, inputs: str) -> None:
    case = Case(mesh=(2, 2, 2), zero=zero, inputs=inputs)
    results = eight.run(8, jobs.trained, case, timeout_s=60)
    assert max(jobs.differences(case, results).values()) <= LIMITS[case.dtype]
