"""Stores: what is asked of a torch.distributed store, which never answers where its process has been stopped."""

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
_GLANCE_S = 0.1  # between two looks whether a wait has been given up
_PATIENCE_S = 2.0  # beyond the time that the store itself is to wait


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> Any:
        """Write."""

    def get(self, key: str, /) -> Any:
        """Read, once it is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number. Returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether these keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return once they are. Raises RuntimeError."""


class StoreLostError(RuntimeError):
    """The process that hosts the store has ended, or is stopped."""

    def __init__(self, why: str) -> None:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        where = "torchrun failed: it hosts" if by_torchrun else "rank 0 failed: unless another process does, it hosts"
        super().__init__(f"{where} the store of the process group, which {why}")


def asked(ask: Callable[[], T], limit_s: float, given_up: threading.Event | None = None) -> T:
    """Call ``ask``, which asks a store. Raises what it raises, and StoreLostError where no answer comes in time.

    It is called in a thread of its own. A thread without an answer is left behind: torch has no way to end its wait.
    given_up: set it to end the wait at once, with a RuntimeError.
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
    return value  # type: ignore[return-value]  # what ask returned


def awaited_value(store: Store, key: str, timeout_s: float, given_up: threading.Event | None = None) -> Any:
    """A key's value, once it is there. Raises RuntimeError where it comes too late. given_up: as for ``asked``."""

    def ask() -> Any:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key)

    return asked(ask, timeout_s + _PATIENCE_S, given_up)


def missing(store: Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """The positions of the keys that are not there within the timeout. Raises RuntimeError as ``asked``."""

    def ask() -> list[int]:
        try:
            store.wait(list(keys), timedelta(seconds=timeout_s))
        except RuntimeError:
            return [position for position, key in enumerate(keys) if not store.check([key])]
        return []

    return asked(ask, timeout_s + _PATIENCE_S)
