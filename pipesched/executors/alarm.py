"""Alarm: how ranks in different processes learn that one has failed, within moments and whatever they wait for.

The first rank that fails writes what happened into the group's store and wakes the others. In every rank a thread
sleeps in the store until then; it ends whatever the rank waits for, by closing its connections.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import finalize

__all__ = ["Alarm", "Fault", "Store"]

_LONG = timedelta(days=1)
_PATIENCE_S = 5  # for a store that does not answer
_FAULT = "fault"


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> Any:
        """Write."""

    def get(self, key: str, /) -> Any:
        """Read, once it is there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> Any:
        """Write where the key has the expected value, "" for none. Returns its value then."""

    def check(self, keys: list[str], /) -> bool:
        """Whether these keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return once they are."""

    def clone(self) -> Any:
        """Another client of the same store."""


class Fault(NamedTuple):
    """What the first rank that failed said."""

    rank: int
    text: str


class _Bell:
    """Whether a rank has failed. The alarm's thread holds this alone, so that the alarm can be dropped."""

    rung = False


class Alarm:
    """One rank's bell. hang_up: ends every wait of this rank; called in the alarm's own thread, at most once.

    Dropping the alarm ends its thread, as ``end`` does.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, hang_up: Callable[[], None]) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self.bell = _Bell()
        # A client of its own: one that sleeps in the store holds all other calls up.
        sleeper = threading.Thread(
            target=_sleep, args=(store.clone(), rank, self.bell, hang_up), name=f"pipesched alarm {rank}", daemon=True
        )
        self._thread = sleeper
        sleeper.start()
        self._finalizer = finalize(self, _wake, store, rank)

    @property
    def rung(self) -> bool:
        """Whether a rank has failed."""
        return self.bell.rung

    def ring(self, text: str) -> Fault:
        """Tell all ranks that this one failed. Returns what the first one that failed said."""
        own = Fault(self._rank, text)
        try:
            first = Fault(*json.loads(self._store.compare_set(_FAULT, "", json.dumps(own))))
            for rank in range(self._num_ranks):
                _wake(self._store, rank)
        except RuntimeError:  # the store's host is gone: the others' connections with this rank end all the same
            return own
        return first

    def end(self) -> None:
        """End the thread."""
        self._finalizer()
        self._thread.join(_PATIENCE_S)


def _wake(store: Store, rank: int) -> None:
    with suppress(RuntimeError):  # without a store nobody sleeps in it
        store.set(f"awake/{rank}", "")


def _sleep(store: Store, rank: int, bell: _Bell, hang_up: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the store's host is gone
        while not _awoken(store, rank):
            pass
        if store.check([_FAULT]):
            bell.rung = True
            hang_up()


def _awoken(store: Store, rank: int) -> bool:
    try:
        store.wait([f"awake/{rank}"], _LONG)
    except RuntimeError:
        return store.check([f"awake/{rank}"])
    return True
