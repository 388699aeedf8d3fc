"""Collective lane: a thread that runs a rank's collectives one after another, while the rank computes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch

from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream
from pipesched.runtime.transport.ports import ConnectionLostError

__all__ = ["CollectiveLane", "LaneJob"]

_LOOK_S = 0.05  # the interval at which a waiting rank checks whether another rank has failed


class LaneJob:
    """A job of the collective lane. Callers can wait until the job has run."""

    def __init__(self, job: Callable[[], None], device: torch.device) -> None:
        self._job = job
        self._device = device
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._begun = event_on(current_stream(device)) if is_accelerator(device) else None
        #: The times at which the job started and ended: seconds on a CPU, otherwise events.
        self.span: tuple[Any, Any] | None = None

    def run(self, stream: torch.Stream | None) -> None:
        """Run the job in the lane's thread, on the lane's stream if there is one."""
        try:
            with _entered(stream, self._begun):
                start = _now(stream)
                self._job()
                self.span = start, _now(stream)
        except BaseException as error:  # raised by wait()
            self._error = error
        self._done.set()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the job has run. Raises ConnectionLostError if the job failed.

        While waiting, repeatedly calls ``check``, which may raise an exception.
        """
        while not self._done.wait(_LOOK_S):
            check()
        if self._error is not None:
            check()
            raise ConnectionLostError(f"a collective over replicas failed ({self._error})") from self._error
        if self._begun is not None and self.span is not None:
            current_stream(self._device).wait_event(self.span[1])


class CollectiveLane:
    """Runs jobs in the order in which they are started, in a thread that stops when the lane is closed.

    Args:
        device: the rank's device. On an accelerator the jobs run on a separate stream.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: SimpleQueue[LaneJob | None] = SimpleQueue()
        stream = new_stream(device) if is_accelerator(device) else None
        name = "pipesched-collectives"
        self.thread = threading.Thread(target=_run, args=(self._queue, stream), name=name, daemon=True)
        self.thread.start()
        self.close = finalize(self, self._queue.put, None)

    def start(self, job: Callable[[], None]) -> LaneJob:
        """Queue a job, which runs after all earlier jobs."""
        ticket = LaneJob(job, self._device)
        self._queue.put(ticket)
        return ticket


def _run(queue: "SimpleQueue[LaneJob | None]", stream: torch.Stream | None) -> None:
    torch.set_num_threads(1)
    while (ticket := queue.get()) is not None:
        ticket.run(stream)
        ticket = None  # release the job's buffers now, instead of at the next job


def _now(stream: torch.Stream | None) -> Any:
    return time.perf_counter() if stream is None else event_on(stream, timed=True)


@contextmanager
def _entered(stream: torch.Stream | None, begun: torch.Event | None) -> Iterator[None]:
    if stream is None or begun is None:
        yield
        return
    with on_stream(stream):
        stream.wait_event(begun)
        yield
