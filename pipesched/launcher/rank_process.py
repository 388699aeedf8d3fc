"""A rank as a process: started, signalled, and collected when it has ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipesched.errors import InputError
from pipesched.launcher.output import LineCutter, RankPipe, Screen
from pipesched.launcher.rank_end import RankEnd

__all__ = ["RankProcess"]

_END_WITH_PARENT = Path(__file__).with_name("end_with_parent.py")


class RankProcess:
    """A rank of the job. Its output goes to a screen, each line with the rank's number, or to a file.

    Attributes:
        rank: the number of the rank in the job.

    """

    def __init__(
        self,
        rank: int,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        screen: Screen,
        log: Path | None = None,
    ) -> None:
        self.rank = rank
        self._pipes: list[RankPipe] = []
        self._command = command
        self._environment = environment
        self._screen = screen
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    def start(self) -> None:
        """Start the process, in a session of its own: Ctrl-C in a terminal reaches the launcher only."""
        self._started_s = time.monotonic()
        try:
            if self._log is None:
                self._process = self._popen(subprocess.PIPE, subprocess.PIPE)
            else:
                with self._log.open("ab") as file:
                    self._process = self._popen(file.fileno(), subprocess.STDOUT)
        except OSError as error:
            raise InputError(
                f"each rank must start as a process; rank {self.rank} did not: {error.strerror} "
                f"({error.filename or self._command[0]}); check the path, or start fewer ranks on this host"
            ) from error
        outputs = ((self._process.stdout, self._screen.out), (self._process.stderr, self._screen.err))
        prefix = f"[rank {self.rank}] ".encode()
        self._pipes += [RankPipe(file, LineCutter(prefix), queue) for file, queue in outputs if file]

    def _popen(self, out: int, err: int) -> subprocess.Popen[bytes]:
        first = (sys.executable, "-I", "-S", str(_END_WITH_PARENT), str(os.getpid())) if sys.platform == "linux" else ()
        return subprocess.Popen(
            [*first, *self._command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            bufsize=0,
            start_new_session=True,
        )

    def terminate(self) -> None:
        """Send SIGTERM to the rank, but not to the processes that it has started, which it may need until it ends."""
        if self._process:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the rank and to the processes that it has started."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def collect(self) -> RankEnd | None:
        """Return how the rank ended, after passing on its output; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        for pipe in self.open_pipes():
            pipe.drain()
        return RankEnd(self._process.returncode, time.monotonic() - self._started_s)

    def wait(self) -> None:
        """Wait for the end of a rank that has been killed."""
        if self._process:
            self._process.wait()

    def open_pipes(self) -> list[RankPipe]:
        """Return the pipes of the rank's output that have not ended. A process that the rank started may hold them."""
        self._pipes = [pipe for pipe in self._pipes if not pipe.closed]
        return self._pipes

    def close_pipes(self) -> None:
        """Close the pipes of a rank that has ended."""
        for pipe in self.open_pipes():
            pipe.close()
