"""Hand-offs between host threads: what one thread has waited for, the thread that comes after it has waited for, too.

Python's ways to pass something on are replaced for the whole process: queues, events, futures, locks, conditions, and
the start and the end of a thread. Modules that take a name from `queue` must be imported after :func:`install`.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
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
    _stamp_queue(here)
    _stamp_events(here)
    _stamp_futures(here)
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


def _stamp_queue(here: _Here) -> None:
    """queue.Queue and its subclasses, which keep their items in `_put` and `_get`."""
    for kind in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):
        put, get = kind.put, kind.get

        def stamped_put(self: Any, item: Any, *args: Any, put: Any = put, **options: Any) -> None:
            here.stamp_on(self)
            put(self, item, *args, **options)

        def stamped_get(self: Any, *args: Any, get: Any = get, **options: Any) -> Any:
            item = get(self, *args, **options)
            here.take_from(self)
            return item

        kind.put, kind.get = stamped_put, stamped_get


def _stamp_events(here: _Here) -> None:
    set_, wait = threading.Event.set, threading.Event.wait
    notify, condition_wait = threading.Condition.notify, threading.Condition.wait
    barrier_wait = threading.Barrier.wait

    def stamped_set(self: threading.Event) -> None:
        _join_on(here, self)
        set_(self)

    def stamped_wait(self: threading.Event, timeout: float | None = None) -> bool:
        done = wait(self, timeout)
        if done:
            here.take_from(self)
        return done

    def stamped_notify(self: threading.Condition, n: int = 1) -> None:
        _join_on(here, self)
        notify(self, n)

    def stamped_condition_wait(self: threading.Condition, timeout: float | None = None) -> bool:
        done = condition_wait(self, timeout)
        if done:
            here.take_from(self)
        return done

    def stamped_barrier_wait(self: threading.Barrier, timeout: float | None = None) -> int:
        _join_on(here, self)
        number = barrier_wait(self, timeout)
        here.take_from(self)
        return number

    threading.Event.set, threading.Event.wait = stamped_set, stamped_wait
    threading.Condition.notify, threading.Condition.wait = stamped_notify, stamped_condition_wait
    threading.Barrier.wait = stamped_barrier_wait


def _join_on(here: _Here, target: Any) -> None:
    """Leave a stamp that also holds what threads before this one have left: several threads may set one event."""
    here.take_from(target)
    here.stamp_on(target)


def _stamp_futures(here: _Here) -> None:
    set_result, set_exception, result = Future.set_result, Future.set_exception, Future.result

    def stamped_set_result(self: Future, value: Any) -> None:
        here.stamp_on(self)
        set_result(self, value)

    def stamped_set_exception(self: Future, error: BaseException | None) -> None:
        here.stamp_on(self)
        set_exception(self, error)

    def stamped_result(self: Future, timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            here.take_from(self)

    Future.set_result, Future.set_exception, Future.result = stamped_set_result, stamped_set_exception, stamped_result


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
