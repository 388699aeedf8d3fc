"""Failure notices: what a rank tells others of a fault, and what they answer. It asks many at a time, and waits for
none.
"""

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from pipesched.runtime.coordination.rank_activity import ENDED, SILENT, State

__all__ = ["LONGEST", "Address", "Fault", "told"]

LONGEST = 1 << 16  # bytes of a message


class Fault(NamedTuple):
    """What happened. who: the rank to blame, as errors name it. settled: whether that is known, or a guess so far."""

    who: str
    text: str
    settled: bool

    def __str__(self) -> str:
        return f"{self.who} failed: {self.text}"


class Address(NamedTuple):
    """Where a rank listens. word: in hexadecimals; who does not know it from the store is a stranger."""

    name: str
    rank: int
    host: str
    port: int
    word: str


def told(
    fault: Fault,
    listeners: Sequence[Address],
    patience_s: float,
    until: Callable[[], bool] = lambda: False,
) -> dict[str, State | str]:
    """Tell these ranks a fault. What each of them answers, by name. until: ends it early."""
    said = json.dumps(fault).encode() + b"\n"
    calls = [_Call(address, address.word.encode() + said) for address in listeners]
    end_s = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for call in calls:
            call.begin(selector)
        while selector.get_map() and time.monotonic() < end_s and not until():
            for key, _ in selector.select(0.05):
                key.data.go_on(selector)
    answers: dict[str, State | str] = {}
    for call in calls:  # a rank that has made several pipelines is alive as long as one of them answers
        answer = call.end()
        name = call.address.name
        if answer != ENDED or name not in answers:
            answers[name] = answer
    return answers


class _Call:
    """A message to one rank, and its answer."""

    def __init__(self, address: Address, said: bytes) -> None:
        self.address = address
        self._said = said
        self._read = bytearray()
        self._answer = SILENT
        self._socket = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        self._socket.setblocking(False)

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Connect."""
        self._socket.connect_ex((self.address.host, self.address.port))
        selector.register(self._socket, selectors.EVENT_WRITE, self)

    def go_on(self, selector: selectors.BaseSelector) -> None:
        """Where the socket is ready: say, or read."""
        try:
            if self._said:
                self._said = self._said[self._socket.send(self._said) :]
                if not self._said:
                    selector.modify(self._socket, selectors.EVENT_READ, self)
                return
            part = self._socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._read += part
        if not part:
            selector.unregister(self._socket)
            self._answer = ENDED

    def end(self) -> State | str:
        """What was answered."""
        self._socket.close()
        with suppress(ValueError, TypeError):
            return State(*json.loads(self._read))
        return self._answer
