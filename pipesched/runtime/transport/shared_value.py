"""Shared value: a value that one rank broadcasts. The other ranks wait for the value only at its first use."""

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Shared"]


class Shared:
    """A value that another rank broadcasts. The first call receives the value with ``take``, which may wait."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take: Callable[[], Any] | None = take
        self._value: Any = None
        self._lock = threading.Lock()  # one thread may read the value while another runs the next step

    @property
    def arrived(self) -> bool:
        """Whether the value has been received."""
        return self._take is None

    def __call__(self) -> Any:
        """Wait for the value and return it. Raises any exception that ``take`` raises."""
        with self._lock:
            if self._take is not None:
                self._value = self._take()
                self._take = None
        return self._value
