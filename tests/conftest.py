"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
from models import every_product_deferred  # noqa: F401
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four processes that serve as ranks for a whole test file."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
