"""Hand-offs between host threads: what one thread has waited for, the thread that comes after it has waited for, too.

Python's ways to pass something on are replaced for the whole process: conditions, of which events, queues, barriers,
semaphores and futures are made, simple queues, and the start and the end of a thread. Modules that take `SimpleQueue`
from `queue` must be imported after :func:`install`. A bare `Lock` hands nothing on, because it cannot be replaced.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from tests.simulated.happens_before import HappensBefore
from tests.simulated.lanes import Stamp

__all__ = ["install"]

_Simple = queue.SimpleQueue
_STAMP = "_simulated_stamp"


def install(judge: HappensBefore, ident: Callable[[], int]) -> None:
    """Make Python's synchronisation hand on what threads know. `ident` returns the number of the current thread."""
    here = _Here(judge, ident)
    queue.SimpleQueue = _stamped_queue(here)
    _stamp_conditions(here)
    _stamp_threads(here)


class _Here:
    """What the current thread hands over and takes over."""

    def __init__(self, judge: HappensBefore, ident: Callable[[], int]) -> None:
        self.judge = judge
        self.ident = ident

    def stamp(self) -> Stamp:
        return self.judge.hand_over(self.ident())

    def take(self, stamp: Stamp | None) -> None:
        if stamp is not None:
            self.judge.take_over(self.ident(), stamp)

    def stamp_on(self, target: Any) -> None:
        """Leave a stamp on an object."""
        setattr(target, _STAMP, self.stamp())

    def take_from(self, target: Any) -> None:
        self.take(getattr(target, _STAMP, None))


def _stamped_queue(here: _Here) -> type:
    class SimpleQueue:
        """queue.SimpleQueue, whose items carry what the sender knows."""

        def __init__(self) -> None:
            self._items = _Simple()

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            self._items.put((here.stamp(), item))

        put_nowait = put

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            stamp, item = self._items.get(block, timeout)
            here.take(stamp)
            return item

        def get_nowait(self) -> Any:
            return self.get(False)

        def empty(self) -> bool:
            return self._items.empty()

        def qsize(self) -> int:
            return self._items.qsize()

        def __class_getitem__(cls, item: Any) -> type:
            return cls

    return SimpleQueue


def _stamp_conditions(here: _Here) -> None:
    """Who enters a condition comes after who left it. Events, queues, barriers and futures are made of conditions."""
    enter, leave = threading.Condition.__enter__, threading.Condition.__exit__
    notify, wait = threading.Condition.notify, threading.Condition.wait

    def stamped_enter(self: threading.Condition) -> Any:
        entered = enter(self)
        here.take_from(self)
        return entered

    def stamped_leave(self: threading.Condition, *error: Any) -> None:
        here.stamp_on(self)
        leave(self, *error)

    def stamped_notify(self: threading.Condition, n: int = 1) -> None:
        here.take_from(self)  # a queue notifies a condition that it has not entered, under the same lock
        here.stamp_on(self)
        notify(self, n)

    def stamped_wait(self: threading.Condition, timeout: float | None = None) -> bool:
        here.stamp_on(self)
        try:
            return wait(self, timeout)
        finally:
            here.take_from(self)

    condition = threading.Condition
    condition.__enter__, condition.__exit__ = stamped_enter, stamped_leave
    condition.notify, condition.wait = stamped_notify, stamped_wait


def _stamp_threads(here: _Here) -> None:
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def stamped_start(self: threading.Thread) -> None:
        here.stamp_on(self)
        own_run = self.run

        def run_after_start() -> None:
            here.judge.thread_started(here.ident(), getattr(self, _STAMP))
            del self.run
            try:
                own_run()
            finally:
                here.stamp_on(self)

        self.run = run_after_start
        start(self)

    def stamped_join(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            here.take_from(self)

    threading.Thread.start, threading.Thread.run, threading.Thread.join = stamped_start, run, stamped_join
