"""Virtual clock: the host's clock of a pipeline reads the virtual time of the simulation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from pipesched.runtime.executors import device_streams, threads
from tests.simulated.accelerator import Accelerator

__all__ = ["virtual_clock"]


@contextmanager
def virtual_clock(accelerator: Accelerator) -> Iterator[None]:
    """Within the ``with`` block, traces have virtual times, which are the same in each run."""

    def now() -> float:
        return float(accelerator.judge.host_time_s(accelerator.backend.host_thread()))

    virtual = SimpleNamespace(perf_counter=now)
    device_streams.time = threads.time = virtual
    try:
        yield
    finally:
        device_streams.time = threads.time = time
