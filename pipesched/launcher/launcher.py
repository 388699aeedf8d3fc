"""The launcher's loop: passes on output and signals, and decides what the end of a rank means for the others."""

import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipesched.launcher.job_store import JobStore
from pipesched.launcher.output import Screen
from pipesched.launcher.rank_end import RankEnd, all_ends, going_on, names_of
from pipesched.launcher.rank_process import RankProcess
from pipesched.launcher.signals import SignalPipe
from pipesched.units import counted

__all__ = ["Launcher"]


@dataclass
class _Stop:
    """Why and until when the job is stopped. ``by_signal``: by a signal to the launcher, not by losses."""

    reason: str
    kill_at_s: float
    by_signal: bool
    killed: bool = False


class Launcher:
    """Runs the ranks of a job on this host.

    A rank that fails or is killed is lost. The others go on, unless more than ``max_losses`` ranks are lost: then the
    launcher stops them. A signal to the launcher stops all ranks. To stop a rank, the launcher sends SIGTERM and, after
    ``grace_s`` seconds, SIGKILL.

    Args:
        ranks: the ranks, not started yet.
        screen: the launcher's own output, to which the ranks' output goes.
        store: the store of the job, if this host has it.
        max_losses: how many ranks may be lost; None: all but one.
        grace_s: seconds between SIGTERM and SIGKILL.
        other_hosts: whether ranks on other hosts use the store, too.

    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        screen: Screen,
        store: JobStore | None,
        *,
        max_losses: int | None,
        grace_s: float,
        other_hosts: bool = False,
    ) -> None:
        self._ranks = ranks
        self._screen = screen
        self._store = store
        self._max_losses = max_losses
        self._grace_s = grace_s
        self._other_hosts = other_hosts and store is not None
        self._running: dict[int, RankProcess] = {}
        self._ends: dict[int, RankEnd] = {}
        self._lost = 0
        self._stop: _Stop | None = None
        self._store_error: BaseException | None = None

    def run(self) -> int:
        """Run all ranks until they have ended, and return the launcher's exit code."""
        with SignalPipe() as signals:
            serving = threading.Thread(target=self._serve, name="store")
            try:
                for rank in self._ranks:
                    rank.start()
                    self._running[rank.rank] = rank
                serving.start()
                while self._running:
                    self._turn(signals)
                for rank in self._ranks:
                    rank.close_pipes()
                code = self._conclude()
                self._wait_for_other_hosts(signals)
                self._flush(signals)
                return code
            finally:
                for rank in self._running.values():
                    rank.kill()
                    rank.wait()
                if serving.ident:
                    serving.join()  # Python must not exit within an import
                if self._store:
                    self._store.close()

    def _serve(self) -> None:
        try:
            if self._store:
                self._store.serve()
        except BaseException as error:  # raised in the loop
            self._store_error = error

    def _turn(self, signals: SignalPipe, longest_s: float | None = None) -> None:
        """Wait until something happens, and react to it."""
        self._exchange(signals, longest_s)
        if self._store_error:
            raise self._store_error
        for number in signals.stopping():
            self._stop_by(number.name)
        for rank in [*self._running.values()]:
            if end := rank.collect():
                self._ended(rank, end)
        if self._stop and self._running and not self._stop.killed and time.monotonic() >= self._stop.kill_at_s:
            names = names_of([*self._running])
            self._kill(f"{names} did not end within {self._grace_s:g} s after SIGTERM")

    def _exchange(self, signals: SignalPipe, longest_s: float | None) -> None:
        """Wait for signals, output and the time to kill. Pass on output."""
        readable = [] if self._screen.full else [pipe for rank in self._ranks for pipe in rank.open_pipes()]
        pipes = {pipe.descriptor: pipe for pipe in readable}
        queues = {queue.descriptor: queue for queue in self._screen.queues}
        poll = select.poll()
        for descriptor in (signals.descriptor, *pipes):
            poll.register(descriptor, select.POLLIN)
        for descriptor in queues:
            poll.register(descriptor, select.POLLOUT)
        times = [1.0] if longest_s is None else [longest_s]
        if self._stop and self._running and not self._stop.killed:
            times.append(max(0.0, self._stop.kill_at_s - time.monotonic()))
        for descriptor, _ in poll.poll(1000 * min(times)):
            if descriptor in pipes:
                pipes[descriptor].read()
            elif descriptor in queues:
                self._screen.write(queues[descriptor])

    def _ended(self, rank: RankProcess, end: RankEnd) -> None:
        del self._running[rank.rank]
        self._ends[rank.rank] = end
        if not end.lost or self._stop:
            return
        self._lost += 1
        what = all_ends({rank.rank: end})
        if self._max_losses is None or self._lost <= self._max_losses:
            self._screen.say(f"{what}; {going_on(len(self._running))}")
            return
        limit = f"{counted(self._lost, 'rank')} lost, and --max-losses is {self._max_losses}"
        self._screen.say(f"{what}; {limit}; the other ranks are stopped")
        self._terminate(limit, by_signal=False)

    def _stop_by(self, name: str) -> None:
        """React to a signal to the launcher: first SIGTERM to all ranks, with a second signal SIGKILL."""
        if self._stop and self._stop.by_signal:
            if not self._stop.killed:
                self._kill(f"a second signal, {name}, has arrived")
        else:
            self._screen.say(
                f"got {name}; the ranks get SIGTERM, and SIGKILL after {self._grace_s:g} s or a second {name}"
            )
            self._terminate(f"stopped by {name}", by_signal=True)

    def _terminate(self, reason: str, *, by_signal: bool) -> None:
        self._stop = _Stop(reason, time.monotonic() + self._grace_s, by_signal)
        for rank in self._running.values():
            rank.terminate()

    def _kill(self, why: str) -> None:
        assert self._stop
        self._stop.killed = True
        if self._running:
            self._screen.say(f"{why}; {names_of([*self._running])} {'is' if len(self._running) == 1 else 'are'} killed")
        for rank in self._running.values():
            rank.kill()

    def _conclude(self) -> int:
        """Say what each rank did, and return the exit code."""
        good = sum(not end.lost for end in self._ends.values())
        total = counted(len(self._ends), "rank")
        if self._stop and (good < len(self._ends) or not self._stop.by_signal):
            verdict, code = f"the job failed ({self._stop.reason})", 1
        elif self._stop:
            verdict, code = f"the job ended ({self._stop.reason})", 0
        elif not good:
            verdict, code = "the job failed (no rank ended with exit code 0)", 1
        else:
            verdict, code = f"the job finished with {good} of {total}", 0
        self._screen.say(f"{verdict}: {all_ends(self._ends)}")
        return code

    def _wait_for_other_hosts(self, signals: SignalPipe) -> None:
        """Keep the store until the ranks of other hosts have ended, or a signal arrives."""
        told = False
        while self._other_hosts and not self._stop and self._store and self._store.has_ranks():
            if not told:
                self._screen.say("the store stays until the ranks of the other hosts have ended")
                told = True
            self._turn(signals, 0.5)

    def _flush(self, signals: SignalPipe) -> None:
        """Write all output. If the job was stopped, wait for a slow reader for a second only."""
        begun_s = time.monotonic()
        while self._screen.queues and not (self._stop and time.monotonic() - begun_s > 1):
            self._turn(signals)
