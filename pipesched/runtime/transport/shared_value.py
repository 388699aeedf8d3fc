"""Shared value: a value of one rank that the others can look at."""

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Shared"]


class Shared:
    """A value on its way from one rank to the others: received once, by whoever looks first."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take: Callable[[], Any] | None = take
        self._value: Any = None
        self._lock = threading.Lock()  # a thread may look at it while another one runs the next step

    @property
    def arrived(self) -> bool:
        """Whether it has been received."""
        return self._take is None

    def __call__(self) -> Any:
        """The value, waited for. Raises as ``take``."""
        with self._lock:
            if self._take is not None:
                self._value = self._take()
                self._take = None
        return self._value
