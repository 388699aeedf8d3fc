"""Progress: counts the finished parts of a thread's work, so that others can tell slow work from work that is stuck.

A finished layer call, a finished step of a search, and bytes that were read or written are parts. Processor time is
not: code that polls in a loop uses processor time, too.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Progress", "advance", "progress_here", "work_for"]


class Progress:
    """The progress of one thread. Any thread may read it."""

    def __init__(self) -> None:
        #: The number of parts that the thread has finished.
        self.num_parts = 0
        self._last_s = time.monotonic()
        self._num_bounded = 0

    def advance(self) -> None:
        """Record that the thread has finished a part."""
        self.num_parts += 1
        self._last_s = time.monotonic()

    def has_advanced(self, num_parts: int) -> bool:
        """Return whether the thread has finished a part since it had finished ``num_parts``, or runs a bounded call."""
        return self.num_parts != num_parts or self._num_bounded > 0

    @property
    def idle_s(self) -> float:
        """The seconds since the thread finished its last part; 0 during a bounded call."""
        return 0.0 if self._num_bounded else time.monotonic() - self._last_s

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """A context for a call that is certain to end, such as a solver with a limit. The call counts as progress."""
        self._num_bounded += 1
        try:
            yield
        finally:
            self._num_bounded -= 1
            self.advance()


class _Here(threading.local):
    def __init__(self) -> None:
        self.progress = Progress()


_HERE = _Here()


def progress_here() -> Progress:
    """Return the progress of the calling thread."""
    return _HERE.progress


def work_for(progress: Progress) -> None:
    """From now on, the parts that the calling thread finishes count as progress of another thread."""
    _HERE.progress = progress


def advance() -> None:
    """Record that the calling thread has finished a part of its work."""
    _HERE.progress.advance()
