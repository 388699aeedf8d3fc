"""Streams and host threads, and what each of them knows to be done. Nothing here imports torch.

A stream runs its operations one after another and numbers them. A lane (a stream or a host thread) keeps one number for
each stream: the last operation of that stream that is known to have ended before the lane goes on. Numbers of streams
are dense, so this knowledge is a vector. Stamps share vectors with lanes: a lane copies its vector only if it learns
something after a stamp was taken.
"""

from typing import Any, NamedTuple

import numpy as np

__all__ = ["HostThread", "Lane", "Stamp", "Stream"]


class Stamp(NamedTuple):
    """A moment of a lane. `number` is the stream's last operation; `stream` is None for a host thread."""

    stream: "Stream | None"
    number: int
    known: np.ndarray
    time_s: float


class Lane:
    """What a stream or a host thread knows, and its virtual time."""

    __slots__ = ("_shared", "changes", "known", "time_s")

    def __init__(self, width: int) -> None:
        self.known = np.zeros(width, np.int64)  # grows with the number of streams
        self._shared = False
        self.changes = 0  # counts what was learned
        self.time_s = 0.0

    def knows(self, stream: "Stream", number: int) -> bool:
        """Whether an operation of another stream is known to be done."""
        known = self.known
        return stream.index < len(known) and known.item(stream.index) >= number

    def learn(self, stamp: Stamp) -> None:
        """Come after a moment of another lane. A stream that is known so far is known with all that it knew."""
        stream, number, known, time_s = stamp
        self.time_s = max(self.time_s, time_s)
        if stream is self or known is self.known or (stream is not None and self.knows(stream, number)):
            return
        width = max(len(known), 0 if stream is None else stream.index + 1)
        own = self._writable(width)
        np.maximum(own[: len(known)], known, out=own[: len(known)])
        if stream is not None:
            own[stream.index] = number
        self.changes += 1

    def _writable(self, width: int) -> np.ndarray:
        """This lane's vector, which no stamp shares, with room for so many streams."""
        if width > len(self.known):
            grown = np.zeros(1 << (width - 1).bit_length(), np.int64)  # lanes that learn from each other stay equal
            grown[: len(self.known)] = self.known
            self.known = grown
        elif self._shared:
            self.known = self.known.copy()
        self._shared = False
        return self.known

    def _shared_vector(self) -> np.ndarray:
        self._shared = True
        return self.known


class HostThread(Lane):
    """A thread of the program. `label` says what it works on."""

    __slots__ = ("label", "name")

    def __init__(self, name: str, width: int) -> None:
        super().__init__(width)
        self.name = name
        self.label: Any = None

    def stamp(self) -> Stamp:
        """Return this moment of the thread."""
        return Stamp(None, 0, self._shared_vector(), self.time_s)


class Stream(Lane):
    """A stream of a device. `index` numbers all streams densely, `number` is the last operation."""

    __slots__ = ("_followed_changes", "_follows", "device", "id", "index", "number", "pending")

    def __init__(self, index: int, key: tuple[int, int], width: int) -> None:
        super().__init__(width)
        self.index = index
        self.device, self.id = key
        self.number = 0
        #: Uses of freed memory that later allocations on this stream may still meet, by the stream that used it.
        self.pending: dict[Stream, Any] = {}
        self._follows: HostThread | None = None
        self._followed_changes = -1

    def __str__(self) -> str:
        return f"sim:{self.device} {f'stream {self.id}' if self.id else 'default stream'}"

    def follow(self, host: HostThread) -> None:
        """Come after everything that a thread has waited for, because the thread launches the next operation."""
        if self._follows is not host or self._followed_changes != host.changes:
            self.learn(host.stamp())
            self._follows, self._followed_changes = host, host.changes

    def stamp(self) -> Stamp:
        """Return this moment of the stream. Each moment has its own number, so that knowing one means knowing all."""
        self.number += 1
        return Stamp(self, self.number, self._shared_vector(), self.time_s)
