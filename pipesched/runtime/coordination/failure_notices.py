"""Failure notices: report a fault to many ranks at the same time, and collect their replies."""

import errno
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pipesched.runtime.coordination.rank_activity import ENDED, SILENT, State

__all__ = ["LONGEST", "Address", "Fault", "asked_of", "told"]

LONGEST = 1 << 16  # the maximum size of a message, in bytes
#: Errors of a connection that do not show that the process at its other end has ended.
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT)


class Fault(NamedTuple):
    """A failure, and the rank to blame for the failure."""

    #: The name of the rank to blame.
    who: str
    text: str
    #: Whether ``who`` is final; otherwise it is a guess that another notice may correct.
    settled: bool

    def __str__(self) -> str:
        return f"{self.who} failed: {self.text}"


class Address(NamedTuple):
    """The address at which a rank listens."""

    name: str
    rank: int
    host: str
    port: int
    #: A secret in hexadecimal. Senders read it from the store, and a rank refuses messages without the secret.
    word: str


def told(
    fault: Fault,
    listeners: Sequence[Address],
    patience_s: float,
    until: Callable[[], bool] = lambda: False,
) -> dict[str, State | str]:
    """Report a fault to other ranks; return each rank's reply (a State, ENDED or SILENT), keyed by rank name.

    Args:
        fault: the fault to report.
        listeners: the addresses of the ranks.
        patience_s: how long to wait for replies, in seconds.
        until: a function that ends the wait early by returning True. Default: always returns False.

    """
    answers: dict[str, State | str] = {}
    for address, reply in _calls(fault, listeners, patience_s, until):
        answer: State | str = reply if isinstance(reply, str) else SILENT
        with suppress(TypeError):
            answer = State(*reply) if isinstance(reply, list) else answer
        answers[address.name] = max(answers.get(address.name, ENDED), answer, key=_certainty)
    return answers


def asked_of(addresses: Sequence[Address], question: dict[str, Any], patience_s: float) -> list[Any]:
    """Ask the alarms of ranks a question; return the reply of each, or ENDED or SILENT."""
    return [reply for _, reply in _calls(question, addresses, patience_s)]


def _calls(
    said: Any, listeners: Sequence[Address], patience_s: float, until: Callable[[], bool] = lambda: False
) -> list[tuple[Address, Any]]:
    """Send a message to other ranks; return each rank's decoded reply, or ENDED or SILENT."""
    line = json.dumps(said).encode() + b"\n"
    calls = [_NoticeCall(address, address.word.encode() + line) for address in listeners]
    end_s = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for call in calls:
            call.begin(selector)
        while selector.get_map() and time.monotonic() < end_s and not until():
            for key, _ in selector.select(0.05):
                key.data.go_on(selector)
    return [(call.address, call.end()) for call in calls]


def _certainty(answer: State | str) -> int:
    """Return a larger number for a reply that says more: a rank with several pipelines lives if one alarm replies."""
    return 2 if isinstance(answer, State) else (ENDED, SILENT).index(answer)


class _NoticeCall:
    """A message to one rank, and the rank's reply."""

    def __init__(self, address: Address, said: bytes) -> None:
        self.address = address
        self._said = said
        self._read = bytearray()
        self._answer = SILENT
        self._socket = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        self._socket.setblocking(False)

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Start connecting."""
        if self._socket.connect_ex((self.address.host, self.address.port)) not in _UNREACHABLE:
            selector.register(self._socket, selectors.EVENT_WRITE, self)

    def go_on(self, selector: selectors.BaseSelector) -> None:
        """Send more of the message, or read more of the reply. Called when the socket is ready."""
        try:
            if self._said:
                self._said = self._said[self._socket.send(self._said) :]
                if not self._said:
                    selector.modify(self._socket, selectors.EVENT_READ, self)
                return
            part = self._socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _UNREACHABLE:  # the rank may live
                selector.unregister(self._socket)
                return
            part = b""
        self._read += part
        if not part:
            selector.unregister(self._socket)
            self._answer = ENDED

    def end(self) -> Any:
        """Close the socket; return the rank's decoded reply, or ENDED or SILENT."""
        self._socket.close()
        with suppress(ValueError):
            return json.loads(self._read)
        return self._answer
