"""Fixtures of all tests."""

import os
from collections import Counter
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run every case of tests that are marked one_in")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked ``one_in(n)``, keep about one case in n, spread evenly over its parameters' values."""
    if config.getoption("exhaustive") or any("[" in name for name in config.args):
        return
    seen: Counter[str] = Counter()
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        mark = item.get_closest_marker("one_in")
        test = item.nodeid.partition("[")[0]
        chosen[mark is None or seen[test] * 0.618034 % 1 < 1 / mark.args[0]].append(item)
        seen[test] += 1
    items[:] = chosen[True]
    config.hook.pytest_deselected(items=chosen[False])


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
