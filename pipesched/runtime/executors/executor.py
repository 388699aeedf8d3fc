"""Executor: the role that runs programs on the ranks of this process.

`ThreadExecutor` (`threads.py`) plays this role if the ranks are threads of one process, and `ProcessExecutor`
(`processes.py`) if each rank is a process.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from pipesched.program.actions import Action
from pipesched.runtime.executors.threads import RunSpec, Timeline
from pipesched.tensors.caller_context import Caller

__all__ = ["Executor", "SegmentedRun"]


class SegmentedRun(Protocol):
    """A run in which an executor receives the actions of each rank in parts, for example one step at a time."""

    @property
    def ahead(self) -> int:
        """The number of unfinished parts that may be queued while the caller continues."""

    def hand(self, orders: Sequence[tuple[Action, ...]]) -> Any:
        """Give each rank of this process the next part of its actions. Return a handle for ``finish``."""

    def finish(self, part: Any) -> Timeline:
        """Wait until the part with this handle has run, and return its timeline. Raises the error of a failed stage."""

    def abandon(self) -> None:
        """Stop all ranks."""


class Executor(Protocol):
    """Runs programs on the ranks of this process."""

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""

    @property
    def closed(self) -> bool:
        """Whether the executor is closed."""

    def start(self) -> None:
        """Start the ranks. Called after all checks that can be made before the ranks run."""

    def with_devices(self, devices: Sequence[torch.device]) -> "Executor":
        """Return an executor for the ranks on these devices, which hold the stages of the next plan."""

    def caller(self, *, grad: bool) -> Caller:
        """Return the calling thread's settings, such as autocast, with the grad mode set to ``grad``."""

    def run(
        self,
        run_spec: RunSpec,
        *,
        grad: bool,
        caller: Caller | None = None,
        looks: Sequence[Hashable] = (),
        values: bytes = b"",
    ) -> Timeline:
        """Run a lowered program on all ranks, and return the timeline of the ranks in this process.

        Args:
            run_spec: the program, its stages and its hooks; only the stages of this process are used.
            grad: whether grad mode is enabled.
            caller: the settings for layers that run in the program. Default: the settings of this thread.
            looks: the key of each micro-batch, as returned by ``look``, from which processes predict the layouts of
                messages.
            values: a digest of the values of the batch, which all processes must have. Default: not compared.

        """

    def begin(self, run_spec: RunSpec, caller: Caller, *, values: bytes = b"") -> SegmentedRun:
        """Begin a run that receives the actions of each rank in parts. No other run may start before ``end``.

        ``values`` is a digest of the values of the first batch, which all processes must have. Default: not compared.
        """

    def end(self, run: Any) -> None:
        """End a run that ``begin`` returned."""

    def check_open(self, call: str) -> None:
        """Raise ExecutionError after ``close``. ``call`` describes the call in the error message."""

    def check_outside(self, method: str) -> None:
        """Raise ExecutionError if the caller is inside a running step. The message names the called ``method``."""

    def abandon(self, what: str, error: BaseException) -> None:
        """Close the executor, and report a failure of this process to the other processes.

        If the failure of another process caused ``error``, raises an ExecutionError that names that process. ``what``
        names the call that failed.
        """

    def close(self) -> None:
        """Stop the threads of the ranks, or close their connections. Raises ExecutionError inside a running step."""
