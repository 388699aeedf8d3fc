"""Collective lane: a thread that runs a rank's collectives one after another, while the rank computes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch

from pipesched.runtime.transport.ports import ConnectionLostError

__all__ = ["CollectiveLane", "LaneJob"]

_LOOK_S = 0.05  # the interval at which a waiting rank checks whether another rank has failed


class LaneJob:
    """A job of the collective lane. Callers can wait until the job has run."""

    def __init__(self, job: Callable[[], None], device: torch.device) -> None:
        self._job = job
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._begun = _event(device)
        self._ended: Any = None
        #: The times at which the job started and ended, as returned by the lane's clock.
        self.span: tuple[Any, Any] | None = None

    def run(self, stream: Any, now: Callable[[], Any]) -> None:
        """Run the job in the lane's thread, on the lane's stream if there is one."""
        try:
            with _entered(stream, self._begun):
                start = now()
                self._job()
                self.span = start, now()
                self._ended = None if stream is None else stream.record_event()
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
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)


class CollectiveLane:
    """Runs jobs in the order in which they are started, in a thread that stops when the lane is closed.

    Args:
        device: the rank's device. On a GPU the jobs run on a separate stream.
        now: the clock of the rank's executor.

    """

    def __init__(self, device: torch.device, now: Callable[[], Any]) -> None:
        self._device = device
        self._queue: SimpleQueue[LaneJob | None] = SimpleQueue()
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        thread = threading.Thread(
            target=_run, args=(self._queue, stream, now), name="pipesched-collectives", daemon=True
        )
        thread.start()
        self.close = finalize(self, self._queue.put, None)

    def start(self, job: Callable[[], None]) -> LaneJob:
        """Queue a job, which runs after all earlier jobs."""
        ticket = LaneJob(job, self._device)
        self._queue.put(ticket)
        return ticket


def _run(queue: "SimpleQueue[LaneJob | None]", stream: Any, now: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    while (ticket := queue.get()) is not None:
        ticket.run(stream, now)
        ticket = None  # release the job's buffers now, instead of at the next job


def _event(device: torch.device) -> Any:
    """Return an event that marks the end of the current stream's work so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def _entered(stream: Any, begun: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.wait_event(begun)
        yield
