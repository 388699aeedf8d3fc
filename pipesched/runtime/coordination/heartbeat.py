"""Heartbeat: tells waiting ranks that a rank is still working, even if it computes for longer than the timeout."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipesched.errors import ExecutionError
from pipesched.progress import progress_here

__all__ = ["beating"]

_AT_MOST_S = 1.0  # the longest time between two beats


@contextmanager
def beating(beat: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """A context in which a thread calls ``beat`` every second, or every ``timeout_s / 8`` seconds if that is shorter.

    ``beat`` is called only if the thread that entered the context has finished a part of its work since the last call
    (`pipesched.progress`). If a layer hangs, the heartbeat therefore stops, and the other ranks time out.
    """
    ended = threading.Event()
    pause_s = min(timeout_s / 8, _AT_MOST_S)
    progress = progress_here()

    def run() -> None:
        told = progress.num_parts
        with suppress(ExecutionError):  # another rank has failed; the caller will notice the failure as well
            while not ended.wait(pause_s):
                if progress.has_advanced(told):
                    told = progress.num_parts
                    beat()

    thread = threading.Thread(target=run, name="pipesched heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
