"""Heartbeat: a rank that works for longer than the others wait for a message tells them that it still does."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipesched.errors import ExecutionError

__all__ = ["beating"]

_STILL = 10  # times the timeout: one call may take long where layers are measured for the first time
_Places = dict[int, tuple[int, int]]


@contextmanager
def beating(beat: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """Call ``beat`` in a thread, four times in ``timeout_s``, while this is entered.

    It is called no more once every other thread has stood in the same place of its code for ten times ``timeout_s``: a
    layer hangs, and the others' own timeout ends their wait.
    """
    ended = threading.Event()

    def run() -> None:
        places, since_s = _places(), time.monotonic()
        with suppress(ExecutionError):  # of another rank: the caller meets it, too
            while not ended.wait(timeout_s / 4):
                if (now := _places()) != places:
                    places, since_s = now, time.monotonic()
                elif time.monotonic() - since_s > _STILL * timeout_s:
                    return
                beat()

    thread = threading.Thread(target=run, name="pipesched heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _places() -> _Places:
    """Where each thread but this one is: its frame, and the instruction in it."""
    own = threading.get_ident()
    return {thread: (id(frame), frame.f_lasti) for thread, frame in sys._current_frames().items() if thread != own}
