"""The tests of this folder run in a process that has simulated devices (see `device_process`)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated import build
from tests.simulated.device_process import ENVIRONMENT, DeviceProcess

_HERE = Path(__file__).parent
_HAS_DEVICES = ENVIRONMENT in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests where the backend cannot be compiled; give the first one time to compile it."""
    lacks = build.missing()
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(120 if _HAS_DEVICES else 600))
            if lacks is not None:
                item.add_marker(pytest.mark.skip(reason=lacks))


@pytest.fixture(scope="session")
def device_process() -> Iterator[DeviceProcess]:
    process = DeviceProcess(_HERE)
    yield process
    process.close()


if _HAS_DEVICES:
    from tests.simulated.accelerator import Accelerator, start
    from tests.simulated.rank_devices import simulated_ranks
    from tests.support.rank_processes import Ranks

    @pytest.fixture
    def ranks() -> Ranks:
        """Four processes that serve as ranks, each with its own simulated devices."""
        return simulated_ranks()

    @pytest.fixture(autouse=True)
    def sim() -> Iterator[Accelerator]:
        """The simulation, with nothing remembered of earlier tests."""
        accelerator = start()
        accelerator.judge.forget()
        yield accelerator
        accelerator.judge.forget()

else:

    @pytest.fixture
    def ranks() -> None:
        """Stands for the ranks of the other process."""

    @pytest.fixture(autouse=True)
    def sim(device_process: DeviceProcess) -> DeviceProcess:
        """Stands for the simulation in the process that has none: tests are sent on."""
        return device_process

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
        """Run the test in the other process."""
        outcome, text = pyfuncitem.funcargs["sim"].run(pyfuncitem.nodeid)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)
        if outcome == "skipped":
            pytest.skip(text)
        return True
