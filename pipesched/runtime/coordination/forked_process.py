"""Forked process: a child process, made by os.fork as a DataLoader makes its workers, has copies of its parent's
executors.

They have no threads there, and share the parent's connections. So in the child an executor ends without a word to
anybody, and whoever uses it is told.
"""

import ctypes
import os
from typing import Any, Protocol
from weakref import WeakSet

from pipesched.errors import ExecutionError

__all__ = ["Forked", "end_in_children", "forget"]


class _Executor(Protocol):
    """What runs ranks."""

    def end_in_child(self) -> None:
        """In a child process, right after the fork."""


class Forked:
    """Whether this is a child of the process that made it."""

    def __init__(self) -> None:
        self._made_in = os.getpid()
        self.here = False

    def check(self) -> None:
        """Raise ExecutionError in a child."""
        if self.here:
            raise ExecutionError(
                f"a pipeline runs in the process that made it, where its threads and connections are; process "
                f"{self._made_in} made it, and this is process {os.getpid()}, forked from it, as a DataLoader's worker "
                f"is; use the pipeline in its own process"
            )


def forget(end: Any) -> None:
    """Never call a finalizer in this process, and keep what it holds: gloo waits for its threads as it is destroyed."""
    if (held := end.detach()) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


_executors: "WeakSet[_Executor]" = WeakSet()


def end_in_children(executor: _Executor) -> None:
    """Call its ``end_in_child`` in each child process."""
    _executors.add(executor)


def _after_fork() -> None:
    for executor in list(_executors):
        executor.end_in_child()


os.register_at_fork(after_in_child=_after_fork)
