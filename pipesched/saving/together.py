"""Together: runs work in all processes of a pipeline, and raises an error in all of them if the work fails in one."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Generic, TypeVar

from pipesched.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError, PipeschedError
from pipesched.runtime.rank_host import MeshRanks, RankHost

__all__ = ["Work", "agreed", "in_all", "together"]

T = TypeVar("T")

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5  # the longest pause between two exchanges of messages while work is under way
#: The errors that all processes raise, most important first.
_KINDS: dict[str, type[CheckpointError]] = {
    "damaged": DamagedCheckpointError,
    "missing": MissingCheckpointError,
    "failed": CheckpointError,
}


def agreed(host: RankHost, make: Callable[[], T]) -> T:
    """Return the result of ``make()``. If ``make`` raises in one process, all processes raise. Collective.

    Use this function for work that takes about the same time in all processes, and ``in_all`` for other work.
    """
    work = Work(make)
    work.run()
    _raise_any(host.gathered_in_all(work.outcome), work)
    return work.result


class Work(Generic[T]):
    """A call that runs in a new thread or in the caller's thread, and whose result or exception is kept.

    The interpreter waits for the thread before it exits.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []
        self._thread: Thread | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Run the call in a new thread."""
        self._thread = Thread(target=self.run, name="pipesched saving")
        self._thread.start()

    def run(self) -> None:
        """Run the call in the current thread."""
        try:
            self._made.append(self._make())
        except BaseException as error:
            self.error = error

    def ended(self, within_s: float | None = None) -> bool:
        """Wait at most ``within_s`` seconds (None: no limit), and return whether the call has ended."""
        if self._thread is not None:
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self._thread = None
        return self._thread is None

    @property
    def outcome(self) -> tuple[str, str]:
        """The kind and the message of the error; two empty strings if there is no error."""
        if self.error is None:
            return "", ""
        text = str(self.error)
        if not isinstance(self.error, PipeschedError):
            text = f"{type(self.error).__name__}: {text}"
        return next((kind for kind, error in _KINDS.items() if isinstance(self.error, error)), "failed"), text

    @property
    def result(self) -> T:
        """The result of the call. Raises the call's exception if it raised one."""
        if self.error is not None:
            raise self.error
        return self._made[0]


def together(host: RankHost, work: Work[T], hurry: Event | None = None) -> T:
    """Wait until work has ended in all processes, and return this process's result. Collective.

    If the work fails in one process, all processes raise. While a process waits, it exchanges messages with the others,
    so that no process times out.

    Args:
        host: the RankHost that runs the ranks of this process.
        work: the work, already started.
        hurry: an event that this function sets if a process fails, so that the work soon stops waiting for other
            processes. Default: None.

    """
    if not isinstance(host, MeshRanks):
        work.ended()
        return work.result
    pause_s = _FIRST_PAUSE_S
    try:
        while True:
            done = work.ended(pause_s)
            outcomes = host.gathered_in_all(work.outcome if done else None)
            if None not in outcomes:
                break
            if hurry is not None and any(outcome is not None and outcome[0] for outcome in outcomes):
                hurry.set()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException:
        if hurry is not None:
            hurry.set()
        with suppress(Exception):
            work.ended()
        raise
    _raise_any(outcomes, work)
    return work.result


def in_all(host: RankHost, make: Callable[[], T]) -> T:
    """Return the result of ``make()``. If ``make`` raises in one process, all processes raise. Collective.

    Unlike ``agreed``, this function also suits work that takes much longer in some processes than in others.
    """
    work = Work(make)
    if isinstance(host, MeshRanks):
        work.start()
    else:
        work.run()
    return together(host, work)


def _raise_any(outcomes: Sequence[Any], work: Work[Any]) -> None:
    """If any process failed, raise the most important kind of error in all processes.

    A process that failed with this kind of error raises its own error; the other processes raise an error that names
    the failed rank.
    """
    kinds = [kind for kind, _ in outcomes]
    worst = next((kind for kind in _KINDS if kind in kinds), None)
    if worst is None:
        return
    if work.error is not None and work.outcome[0] == worst:
        raise work.error
    rank = kinds.index(worst)
    raise _KINDS[worst](
        f"saving and loading must succeed on all ranks; rank {rank} of {len(outcomes)} failed with: "
        f"{outcomes[rank][1]}; fix the cause on rank {rank}"
    ) from work.error
