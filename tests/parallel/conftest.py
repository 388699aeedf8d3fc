"""Ranks for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import Ranks


@pytest.fixture(scope="module")
def ranks(eight: Ranks) -> Ranks:
    """Return eight processes that serve as ranks for all tests of a file."""
    return eight


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    """Start eight processes that serve as ranks for all tests of a file."""
    yield from _started(8)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Start four processes that serve as ranks for all tests of a file."""
    yield from _started(4)


@pytest.fixture(scope="module")
def ranks_of(four: Ranks, eight: Ranks) -> Iterator[dict[int, Ranks]]:
    """Return the ranks of a job, by their number. A grid makes process groups of all processes of a job."""
    nine = Ranks(9)
    yield {4: four, 8: eight, 9: nine}
    nine.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Start two processes that serve as ranks for all tests of a file."""
    yield from _started(2)


def _started(count: int) -> Iterator[Ranks]:
    ranks = Ranks(count)
    yield ranks
    ranks.close()
