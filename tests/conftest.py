"""Fixtures of all tests."""

import gc
import math
import os
from collections import defaultdict
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: test processes share the cores

import pytest
from hypothesis import settings

from tests.support import places
from tests.support.case_selection import spread
from tests.support.fake_cuda import cuda  # noqa: F401
from tests.support.models import every_product_deferred  # noqa: F401
from tests.support.quick_measurements import measure_quickly, thorough  # noqa: F401
from tests.support.rank_processes import Ranks

settings.register_profile("same", derandomize=True, deadline=None)  # a run of the tests is as the one before
settings.load_profile("same")
measure_quickly()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run also what marks one_in and exhaustive leave out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked ``one_in(n)``, keep one case in n, so that as many values of its parameters as possible occur.

    A test marked ``exhaustive`` is left out. It repeats, with a whole script or with ranks that are started in another
    way, a behaviour that a test which always runs checks as well.

    All run with ``--exhaustive``, and where a test is named on the command line.
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
    """Keep the garbage collector from going through torch and all tests each time: half a second."""
    gc.freeze()


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
