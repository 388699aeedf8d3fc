"""Fixtures of all tests."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: test processes share the cores

import pytest
from hypothesis import settings

from tests.support import places
from tests.support.fake_cuda import cuda  # noqa: F401
from tests.support.models import every_product_deferred  # noqa: F401
from tests.support.quick_measurements import measure_quickly, thorough  # noqa: F401
from tests.support.rank_processes import Ranks

settings.register_profile("same", derandomize=True, deadline=None)  # a run of the tests is as the one before
settings.load_profile("same")
measure_quickly()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four processes that serve as ranks for a whole test file."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(params=["in process", "mesh"])
def run(request: pytest.FixtureRequest) -> places.Run:
    """Runs a job with its ranks in this process, and again over processes."""
    return places.run_here if request.param == "in process" else request.getfixturevalue("ranks").run
