"""Forked process: disables a parent's executors in a child created by os.fork, such as a DataLoader worker.

In the child, an executor has no threads and shares the parent's connections. Therefore the executor is disabled in the
child without waiting for threads or closing connections. Using it in the child raises an error.
"""

import ctypes
import os
from typing import Any, Protocol
from weakref import WeakSet

from pipesched.errors import ExecutionError

__all__ = ["Forked", "end_in_children", "forget"]


class _Executor(Protocol):
    """An executor that can be disabled."""

    def end_in_child(self) -> None:
        """Disable the executor. Called in a child process right after the fork."""


class Forked:
    """Detects whether this process is a forked child of the process that created the object."""

    def __init__(self) -> None:
        self._made_in = os.getpid()
        self.here = False

    def check(self) -> None:
        """Raise ExecutionError in a forked child process."""
        if self.here:
            raise ExecutionError(
                f"a pipeline may only be used in the process that made it, because that process holds the pipeline's "
                f"threads and connections; process {self._made_in} made this pipeline, but process {os.getpid()}, a "
                f"fork of process {self._made_in} (as DataLoader workers are), used it; use the pipeline in process "
                f"{self._made_in}"
            )


def forget(end: Any) -> None:
    """Disable a finalizer in this process, and keep the object that it would finalize alive until the process exits.

    Destroying a gloo object would wait for threads that this process does not have.
    """
    if (held := end.detach()) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


_executors: "WeakSet[_Executor]" = WeakSet()


def end_in_children(executor: _Executor) -> None:
    """Register an executor, so that its ``end_in_child`` is called in each forked child process."""
    _executors.add(executor)


def _after_fork() -> None:
    for executor in list(_executors):
        executor.end_in_child()


os.register_at_fork(after_in_child=_after_fork)
