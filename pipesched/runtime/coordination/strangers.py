"""Strangers: limits the connections of a process that have not proved yet that they come from a rank.

All listeners of a process share one limit, because each connection takes one of the process's file descriptors. When
the limit is reached, the oldest of these connections is closed, whichever listener has accepted it.
"""

import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["STRANGERS", "Strangers"]

_SHARE = 4  # strangers may use one in this many file descriptors
_MOST = 256  # limit for processes with many file descriptors


class Strangers:
    """The connections of this process that may come from anyone, oldest first.

    Listeners change their collections of strangers only while they hold ``lock``, because any listener may close a
    stranger of another one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._dismissals: dict[socket.socket, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._dismissals)

    def accepted(self, listener: socket.socket) -> socket.socket | None:
        """Accept the next connection on a listener. Returns None if there is none, or no file descriptor is left.

        In the second case, closes the oldest stranger, so that the next call succeeds. Raises OSError if there is no
        stranger to close.
        """
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):  # accepted by another thread, or closed
            return None
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._dismiss_oldest():
                raise
            return None

    def admit(self, connection: socket.socket, dismiss: Callable[[], None]) -> None:
        """Add a new stranger. ``dismiss`` closes the connection, and makes its listener forget it."""
        with self.lock:
            while len(self._dismissals) >= self.most:
                self._dismiss_oldest()
            self._dismissals[connection] = dismiss

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection that has proved who it is, or has been closed."""
        with self.lock:
            self._dismissals.pop(connection, None)

    @property
    def most(self) -> int:
        """The maximum number of strangers."""
        try:
            from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
        except ImportError:  # not a POSIX system
            return _MOST
        limit = getrlimit(RLIMIT_NOFILE)[0]
        return _MOST if limit == RLIM_INFINITY else max(1, min(_MOST, limit // _SHARE))

    def _dismiss_oldest(self) -> bool:
        with self.lock:
            oldest = next(iter(self._dismissals), None)
            if oldest is None:
                return False
            dismiss = self._dismissals.pop(oldest)
            with suppress(OSError, KeyError, ValueError):  # the listener is being closed
                dismiss()
            return True

    def forget(self) -> None:
        """Forget all connections without closing them: in a child process, they belong to the parent process."""
        self.lock = threading.RLock()
        self._dismissals = {}


#: The strangers of this process.
STRANGERS = Strangers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STRANGERS.forget)
