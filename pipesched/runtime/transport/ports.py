"""Ports: send bytes between ranks, through sockets for short messages and a process group for long messages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.stores import StoreLostError

__all__ = ["ConnectionLostError", "Ports", "ShortPort", "Work", "awaited", "lost"]


class Work(Protocol):
    """An operation in progress."""

    def wait(self) -> Any:
        """Wait until the operation is done. Raises RuntimeError if it fails."""


class ShortPort(Protocol):
    """Sends and receives short messages of bytes. Messages with the same rank and tag arrive in order.

    All methods raise RuntimeError if a transfer fails.
    """

    def sender(self, to: int, tag: int, /) -> Callable[[Sequence[Any], int], Work | None]:
        """Return a function that takes buffers and their total size in bytes, and sends the buffers without waiting.

        The caller may reuse the buffers as soon as the function returns. The function returns None if all bytes have
        been written, otherwise the pending send.
        """

    def reader(self, from_: int, tag: int, /) -> Callable[[memoryview], None]:
        """Return a function that waits for the next bytes and fills a buffer with them."""


class _Port(Protocol):
    """The methods of a process group that `Ports` uses. All methods raise RuntimeError if a transfer fails."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        """Start a send."""

    def recv(self, tensors: list[Tensor], from_: int, tag: int, /) -> Work:
        """Start a receive. The memory must be at least as large as the sent message."""


class Ports(NamedTuple):
    """The ports of one rank. Both ends choose the port by the message's predicted size, so both use the same port."""

    short: ShortPort
    long: _Port
    limit: int = 1 << 20  # the size in bytes of the smallest long message; about the size of a connection's buffers

    def send(self, tensor: Tensor, to: int, tag: int) -> Work | None:
        """Send a tensor of bytes through the port for messages of this size.

        Returns None if all bytes are written, otherwise the pending send. Raises ConnectionLostError.
        """
        try:
            if len(tensor) < self.limit:
                return self.short.sender(to, tag)((tensor.numpy(),), len(tensor))
            return self.long.send([tensor], to, tag)
        except RuntimeError as error:
            raise lost(to, error) from None

    def receive(self, tensor: Tensor, from_: int, tag: int) -> None:
        """Wait for a message from a rank, and write it to ``tensor``, which must have the size of the message.

        Raises ConnectionLostError.
        """
        try:
            if len(tensor) < self.limit:
                self.short.reader(from_, tag)(tensor.numpy().data)
            else:
                self.long.recv([tensor], from_, tag).wait()
        except RuntimeError as error:
            raise lost(from_, error) from None


class ConnectionLostError(ExecutionError):
    """A message did not arrive, or could not be sent. ``ended`` is the rank that closed the connection, if known."""

    def __init__(self, text: str, ended: int | None = None) -> None:
        super().__init__(text)
        self.ended = ended


def awaited(work: Work, peer: int) -> None:
    """Wait for an operation. Raises a ConnectionLostError that names ``peer``, the rank at the other end."""
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(peer, error) from None


def lost(peer: int, error: RuntimeError) -> ConnectionLostError:
    """Convert the error of a transfer from or to rank ``peer`` to a ConnectionLostError."""
    if isinstance(error, StoreLostError):
        return ConnectionLostError(str(error))
    if "Timed out" in str(error):
        return ConnectionLostError(f"no data arrived from rank {peer} within the timeout")
    return ConnectionLostError(f"the connection with rank {peer} ended ({error})", peer)
