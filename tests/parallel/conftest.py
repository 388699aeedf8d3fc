"""Eight ranks for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start eight processes that serve as ranks for all tests of a file."""
    ranks = Ranks(8)
    yield ranks
    ranks.close()
