"""Models of transformers that "auto" divides train over stages and tensor ranks as in one process."""

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import Ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Start four processes that serve as ranks for all tests of this file."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def job(process_group, *args):
    from tests.support.jobs.divided_transformers import Training, difference

    return difference(process_group, Training(*args))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_models_train_as_in_one_process(four, name, attention):
    """With dropout, clipping, padding, labels that do not count and tied heads."""
    assert max(four.run(4, job, name, attention, timeout_s=100)) < 1e-5
