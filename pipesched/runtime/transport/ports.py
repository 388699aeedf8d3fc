"""Ports: by what bytes get from rank to rank: sockets for short messages, a process group for long ones."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.stores import StoreLostError

__all__ = ["ConnectionLostError", "Ports", "ShortPort", "Work", "awaited", "lost"]


class Work(Protocol):
    """An operation that was started."""

    def wait(self) -> Any:
        """Return once it has ended. Raises RuntimeError where it cannot."""


class ShortPort(Protocol):
    """For short messages: bytes to and from the other ranks, on each tag one behind the other. Raises RuntimeError."""

    def sender(self, to: int, tag: int, /) -> Callable[[Sequence[Any], int], Work | None]:
        """What sends buffers, so many bytes in all, without waiting. They may change at once; None: all is written."""

    def reader(self, from_: int, tag: int, /) -> Callable[[memoryview], None]:
        """What waits for the next bytes, as many as a buffer takes, and fills it."""


class _Port(Protocol):
    """What is used of a process group: (tensors, rank in the group, tag). Raises RuntimeError."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        """Start to send."""

    def recv(self, tensors: list[Tensor], from_: int, tag: int, /) -> Work:
        """Start to receive, into as much memory as is sent, or more."""


class Ports(NamedTuple):
    """Which port takes a message, by how long it is foreseen to be: both ends say the same."""

    short: ShortPort
    long: _Port
    limit: int = 1 << 20  # bytes; about what the buffers of a connection hold

    def send(self, tensor: Tensor, to: int, tag: int) -> Work | None:
        """Send a tensor of bytes through the port for such a length; None: it has been written, and may change.

        Raises ConnectionLostError.
        """
        try:
            if len(tensor) < self.limit:
                return self.short.sender(to, tag)((tensor.numpy(),), len(tensor))
            return self.long.send([tensor], to, tag)
        except RuntimeError as error:
            raise lost(to, error) from None

    def receive(self, tensor: Tensor, from_: int, tag: int) -> None:
        """Wait for what ``send`` sends of a tensor of this length, and fill this one. Raises ConnectionLostError."""
        try:
            if len(tensor) < self.limit:
                self.short.reader(from_, tag)(tensor.numpy().data)
            else:
                self.long.recv([tensor], from_, tag).wait()
        except RuntimeError as error:
            raise lost(from_, error) from None


class ConnectionLostError(ExecutionError):
    """A message did not come, or could not be sent. ended: the rank that ended the connection, where one did."""

    def __init__(self, text: str, ended: int | None = None) -> None:
        super().__init__(text)
        self.ended = ended


def awaited(work: Work, peer: int) -> None:
    """Wait. Raises ConnectionLostError that names the rank at the other end."""
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(peer, error) from None


def lost(peer: int, error: RuntimeError) -> ConnectionLostError:
    """What an error of a port means."""
    if isinstance(error, StoreLostError):
        return ConnectionLostError(str(error))
    if "Timed out" in str(error):
        return ConnectionLostError(f"nothing came from rank {peer} within the timeout")
    return ConnectionLostError(f"the connection with rank {peer} ended ({error})", peer)
