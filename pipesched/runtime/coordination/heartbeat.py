"""Heartbeat: tells waiting ranks that a rank is still working, even if it computes for longer than the timeout."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipesched.errors import ExecutionError

__all__ = ["beating"]

_AT_MOST_S = 1.0  # the longest time between two beats


@contextmanager
def beating(beat: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """A context in which a thread calls ``beat`` every second, or every ``timeout_s / 8`` seconds if that is shorter.

    ``beat`` is called only if the thread that entered the context has used processor time since the last call. If a
    layer hangs, the heartbeat therefore stops, and the other ranks time out.
    """
    ended = threading.Event()
    pause_s = min(timeout_s / 8, _AT_MOST_S)
    clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None

    def run() -> None:
        ran_ns = -1
        with suppress(ExecutionError):  # another rank has failed; the caller will notice the failure as well
            while not ended.wait(pause_s):
                before_ns = ran_ns
                ran_ns = time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)
                if ran_ns != before_ns:
                    beat()

    thread = threading.Thread(target=run, name="pipesched heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
