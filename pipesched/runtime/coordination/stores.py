"""Stores: access to a torch.distributed store with a time limit, because the store's process may stop responding."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from torch import distributed

__all__ = ["Store", "StoreLostError", "asked", "awaited_value", "missing"]

T = TypeVar("T")
_GLANCE_S = 0.1  # time between two checks of ``given_up``
_PATIENCE_S = 2.0  # added to the store's own timeout


class Store(Protocol):
    """The methods of a torch.distributed store that pipesched uses."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> Any:
        """Wait for a key; return its value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add ``amount`` to the number at a key (0 if there is none); return the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys exist. Raises RuntimeError at the timeout."""


class StoreLostError(RuntimeError):
    """The process that hosts the store has exited, or does not respond."""

    def __init__(self, why: str) -> None:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        where = "torchrun failed: torchrun hosts" if by_torchrun else "rank 0 failed: by default rank 0 hosts"
        super().__init__(f"{where} the store of the process group, and this store {why}")


def asked(ask: Callable[[], T], limit_s: float, given_up: threading.Event | None = None) -> T:
    """Call a function that uses a store, with a time limit.

    The function runs in a separate thread. A thread that gets no reply is abandoned, because torch cannot interrupt a
    wait for a store.

    Args:
        ask: the function to call; its exceptions are raised in the caller's thread.
        limit_s: the time limit in seconds.
        given_up: an event that ends the wait early, with a RuntimeError.

    Raises:
        StoreLostError: if the store does not reply in time.

    """
    answers: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:  # raised again in the caller's thread
            answers.put((None, error))

    threading.Thread(target=answer, name="pipesched store", daemon=True).start()
    end_s = time.monotonic() + limit_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            value, error = answers.get(timeout=max(0.0, left_s if given_up is None else min(left_s, _GLANCE_S)))
            break
        except Empty:
            if given_up is not None and given_up.is_set():
                raise RuntimeError("Connection closed: a rank has failed") from None
            if left_s <= 0:
                raise StoreLostError(f"did not answer within {limit_s:g} s") from None
    if isinstance(error, distributed.DistNetworkError):
        raise StoreLostError(f"has ended ({str(error).splitlines()[0]})") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # the value that ``ask`` returned


def awaited_value(store: Store, key: str, timeout_s: float, given_up: threading.Event | None = None) -> Any:
    """Wait for a key; return its value. Raises RuntimeError at the timeout. ``given_up``: see ``asked``."""

    def ask() -> Any:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key)

    return asked(ask, timeout_s + _PATIENCE_S, given_up)


def missing(store: Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Wait until all keys exist; return the positions in ``keys`` of the keys still missing at the timeout.

    Raises the same errors as ``asked``.
    """

    def ask() -> list[int]:
        try:
            store.wait(list(keys), timedelta(seconds=timeout_s))
        except RuntimeError:
            return [position for position, key in enumerate(keys) if not store.check([key])]
        return []

    return asked(ask, timeout_s + _PATIENCE_S)
