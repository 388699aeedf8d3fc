"""Fixtures of all tests."""

import gc
import math
import os
from collections import defaultdict
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported, because test processes share the cores

import pytest
from hypothesis import settings

from tests.support import places
from tests.support.case_selection import spread
from tests.support.models import every_product_deferred  # noqa: F401
from tests.support.quick_measurements import measure_quickly, thorough  # noqa: F401
from tests.support.quick_searches import search_quickly, whole_searches  # noqa: F401
from tests.support.rank_processes import Ranks

settings.register_profile("same", derandomize=True, deadline=None)  # every run draws the same examples
settings.load_profile("same")
measure_quickly()
search_quickly()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run tests that one_in and exhaustive leave out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests by the marks ``one_in`` and ``exhaustive``.

    Of a test marked ``one_in(n)``, one case in n remains. The remaining cases cover as many values of each parameter as
    possible. A test marked ``exhaustive`` is deselected, because an unmarked test checks the same behaviour with less
    effort. Nothing is deselected with ``--exhaustive``, or if the command line names a single test.
    """
    if config.getoption("exhaustive") or any("::" in name for name in config.args):
        return
    left_out = {item for item in items if item.get_closest_marker("exhaustive")}
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for own in cases.values():
        count = math.ceil(len(own) / own[0].get_closest_marker("one_in").args[0])
        kept = spread([item.callspec.params for item in own], count)
        left_out.update(item for place, item in enumerate(own) if place not in kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Exclude torch and the collected tests from garbage collection: scanning them takes half a second each time."""
    gc.freeze()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start four processes that serve as ranks for all tests of a file."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(params=["in process", "mesh"])
def run(request: pytest.FixtureRequest) -> places.Run:
    """Return a function that runs a job, with all ranks in this process or with one process per rank."""
    return places.run_here if request.param == "in process" else request.getfixturevalue("ranks").run
