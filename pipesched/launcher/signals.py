"""Signals of the launcher: turns them into bytes of a pipe, which the launcher's loop reads."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["SignalPipe"]

#: Signals that stop the job.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalPipe:
    """Catches the signals that stop a job, and SIGCHLD, while its with block runs.

    A signal that the launcher's own parent has set to be ignored, as nohup does, stays ignored.
    """

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe()
        for each in (self.descriptor, self._end):
            os.set_blocking(each, False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        self._wakeup_before = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOPPING):
            if number is signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _noted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._end)

    def stopping(self) -> list[signal.Signals]:
        """Return the signals to stop that have arrived since the last call."""
        try:
            arrived = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in arrived if number in STOPPING]


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the number of the signal to the pipe."""
