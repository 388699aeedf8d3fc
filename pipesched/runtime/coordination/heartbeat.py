"""Heartbeat: a rank that works for longer than the others wait for a message tells them that it still does."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipesched.errors import ExecutionError

__all__ = ["beating"]

_AT_MOST_S = 1.0  # between two beats


@contextmanager
def beating(beat: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """Call ``beat`` in a thread, eight times in ``timeout_s`` and once a second at least, while this is entered.

    It is called only if the thread that entered has run since: a layer that hangs ends the beats, and the others' own
    timeout ends their wait.
    """
    ended = threading.Event()
    pause_s = min(timeout_s / 8, _AT_MOST_S)
    clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None

    def run() -> None:
        ran_ns = -1
        with suppress(ExecutionError):  # of another rank: the caller meets it, too
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
