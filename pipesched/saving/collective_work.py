"""Collective work: runs in all processes of a pipeline, and raises an error in all of them if it fails in one.

Work fails not only with an exception, but also if it makes no progress for the timeout of the pipeline
(`pipesched.progress`), for example because a network file system does not respond.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from pipesched.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError, PipeschedError
from pipesched.progress import Progress, work_for
from pipesched.runtime.coordination.rank_activity import user_line
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.rank_host import RankHost
from pipesched.tensors.caller_context import Caller
from pipesched.user_warning import warn

__all__ = ["BackgroundCall", "Others", "OthersFailedError", "StuckError", "agreed", "in_all", "together"]

T = TypeVar("T")

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5  # the longest pause between two exchanges of messages while work is under way
_TO_END_S = 1.0  # how long a process waits for its own work to end after the work has failed elsewhere
#: The highest priority: the work ends before anything that it may use.
_AT_EXIT = 100


class OthersFailedError(CheckpointError):
    """The work of this process failed because of other processes, whose own errors are more important."""


class StuckError(CheckpointError):
    """The work of a process makes no progress. All processes raise this error."""


#: The errors that all processes raise, most important first.
_KINDS: dict[str, type[CheckpointError]] = {
    "damaged": DamagedCheckpointError,
    "missing": MissingCheckpointError,
    "failed": CheckpointError,
    "others": OthersFailedError,
}


@dataclass
class Others:
    """Facts about the other processes of a save, which the main thread passes to the thread that writes."""

    #: Whether the pipeline has failed, so that the thread should not wait long for other processes.
    has_failed: Callable[[], bool] = lambda: False
    #: The errors of other processes, keyed by process.
    errors: dict[int, str] = field(default_factory=dict)
    #: When the main threads of all processes last compared their progress, in seconds on the monotonic clock.
    compared_s: float = 0.0
    #: Whether the main thread has given up the save. It must then end without replacing the manifest.
    is_given_up: bool = False


class _State(NamedTuple):
    """The state of a process's work."""

    #: The kind and the message of the error, two empty strings if the work succeeded, or None if it is under way.
    outcome: tuple[str, str] | None
    #: How long the work has made no progress, and the line of code that it runs.
    idle_s: float
    line: str


def agreed(host: RankHost, make: Callable[[], T]) -> T:
    """Return the result of ``make()``. If ``make`` raises in one process, all processes raise. Collective.

    Use this function for work that takes about the same time in all processes, and ``in_all`` for other work.
    """
    work = BackgroundCall(make)
    work.run()
    _raise_any(host, host.collectives.gathered_in_all(work.outcome), work)
    return work.result


class BackgroundCall(Generic[T]):
    """A call that runs in a new thread or in the caller's thread, and whose result or exception is kept."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: list[T] = []
        self._thread: Thread | None = None
        self._progress = Progress()
        self._at_exit: Finalize | None = None
        self.error: BaseException | None = None

    def begin(self, host: RankHost) -> None:
        """Run the call: over a mesh in a new thread, while this thread exchanges messages; otherwise in this thread."""
        if host.grid.in_one_process:
            self.run()
        else:
            self.start(host)

    def start(self, host: RankHost) -> None:
        """Run the call in a new thread, which does not keep the interpreter from exiting.

        The thread has this thread's settings and the device of the host, because the call may be the user's code.
        """
        caller = Caller.here((), grad=torch.is_grad_enabled())
        run = partial(caller.context.run, self._run_in_thread, caller, host.grid.devices[0])
        self._thread = Thread(target=run, name="pipesched saving", daemon=True)
        self._thread.start()

    def end_at_exit(self, timeout_s: float | None) -> None:
        """Let the interpreter wait for the call before it exits, and warn if the call failed and nobody looked."""
        self._at_exit = Finalize(None, self._end, (timeout_s,), exitpriority=_AT_EXIT)

    def _end(self, timeout_s: float | None) -> None:
        if not self.ends(timeout_s):
            warn(f"an asynchronous save must end before the process exits; {self.why_stuck}; check the file system")
        elif self.error is not None:
            warn(f"an asynchronous save has failed: {self.error}")

    def _run_in_thread(self, caller: Caller, device: torch.device) -> None:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        work_for(self._progress)
        with caller.held(caller.default_device):
            self.run()

    def run(self) -> None:
        """Run the call in the current thread. The call runs only once."""
        make, self._make = self._make, None
        assert make is not None
        try:
            self._made.append(make())
        except BaseException as error:
            self.error = error

    def ended(self, within_s: float | None = None) -> bool:
        """Wait at most ``within_s`` seconds (None: no limit), and return whether the call has ended."""
        if self._thread is not None:
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self._thread = None
        if self._thread is None and self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        return self._thread is None

    def ends(self, timeout_s: float | None) -> bool:
        """Wait as long as the call makes progress, and return whether it has ended.

        Returns False if the call has made no progress for ``timeout_s`` seconds. None: no limit.
        """
        if timeout_s is None:
            return self.ended()
        while not self.ended(min(timeout_s / 8, _LONGEST_PAUSE_S)):
            if self._progress.idle_s > timeout_s:
                return False
        return True

    @property
    def state(self) -> _State:
        """The state of the call, to be sent to the other processes."""
        if self._thread is None:
            return _State(self.outcome, 0.0, "")
        return _State(None, self._progress.idle_s, user_line(self._thread.ident))

    @property
    def why_stuck(self) -> str:
        """Why the call counts as stuck."""
        return _why_stuck(self.state)

    @property
    def outcome(self) -> tuple[str, str]:
        """The kind and the message of the error; two empty strings if there is no error."""
        if self.error is None:
            return "", ""
        text = str(self.error)
        if not isinstance(self.error, PipeschedError):
            text = f"{type(self.error).__name__}: {text}"
        kinds = (kind for kind in ("others", "damaged", "missing") if isinstance(self.error, _KINDS[kind]))
        return next(kinds, "failed"), text

    @property
    def result(self) -> T:
        """The result of the call. Raises the call's exception if it raised one."""
        if self.error is not None:
            raise self.error
        return self._made[0]


def together(host: RankHost, work: BackgroundCall[T], others: Others | None = None) -> T:
    """Wait until work has ended in all processes, and return this process's result. Collective.

    If the work fails in one process, or makes no progress for the timeout of the pipeline, all processes raise. While a
    process waits, it exchanges messages with the others, so that no process times out.

    Args:
        host: the RankHost that runs the ranks of this process.
        work: the work, already started.
        others: where this function tells the work about failures of other processes. Default: None.

    """
    if host.grid.in_one_process:
        work.ended()  # in one process nothing else waits for the work, so it has no timeout
        return work.result
    others = others or Others()
    pause_s = _FIRST_PAUSE_S
    try:
        while True:
            work.ended(pause_s)
            states = [_State(*state) for state in host.collectives.gathered_in_all(tuple(work.state))]
            outcomes = [state.outcome for state in states if state.outcome is not None]
            if len(outcomes) == len(states):
                break
            _raise_if_stuck(host.grid, states)
            others.compared_s = time.monotonic()
            for at, state in enumerate(states):
                if state.outcome is not None and state.outcome[0]:
                    others.errors[at] = state.outcome[1]
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException:
        others.is_given_up = True
        with suppress(Exception):
            work.ended(_TO_END_S)
        raise
    _raise_any(host, outcomes, work)
    return work.result


def in_all(host: RankHost, make: Callable[[], T], *, stops: bool = False) -> T:
    """Return the result of ``make()``. If ``make`` raises in one process, all processes raise. Collective.

    Unlike ``agreed``, this function also suits work that takes much longer in some processes than in others. ``stops``
    states whether the pipeline stops if the work is stuck, because the work could later change the run.
    """
    work = BackgroundCall(make)
    work.begin(host)
    try:
        return together(host, work)
    except StuckError as error:
        if stops:
            host.collectives.fail("a load", error)
        raise


def _raise_if_stuck(grid: RankGrid, states: Sequence[_State]) -> None:
    """Raise StuckError in all processes if the work of one has made no progress for the timeout."""
    assert grid.timeout_s is not None
    stuck = [rank for rank, state in enumerate(states) if state.outcome is None and state.idle_s > grid.timeout_s]
    if stuck:
        raise StuckError(
            f"saving and loading must make progress on all ranks; "
            f"{', '.join(grid.names[rank] for rank in stuck)} failed: {_why_stuck(states[stuck[0]])}; check "
            f"the file system, or pass a larger timeout="
        )


def _why_stuck(state: _State) -> str:
    place = f", at {state.line}" if state.line else ""
    return f"nothing was read, written or finished for {state.idle_s:.1f} s{place}"


def _raise_any(host: RankHost, outcomes: Sequence[Any], work: BackgroundCall[Any]) -> None:
    """If any process failed, raise the most important kind of error in all processes.

    A process that failed with this kind of error raises its own error; the other processes raise an error that names
    the failed rank.
    """
    kinds = [kind for kind, _ in outcomes]
    worst = next((kind for kind in _KINDS if kind in kinds), None)
    if worst is None:
        return
    if work.error is not None and work.outcome[0] == worst != "others":
        raise work.error
    rank = kinds.index(worst)
    name = host.grid.names[rank]
    text = outcomes[rank][1]
    if worst == "others":
        raise CheckpointError(text) from work.error
    raise _KINDS[worst](
        f"saving and loading must succeed on all ranks; {name} failed: {text}; fix the cause on {name}"
    ) from work.error
