"""Sockets: short messages between processes, a connection for each (from, to, tag): of bytes, one behind the other.

gloo hands every message to a thread of its own, on the sending and on the receiving side. Where cores are few, that
thread spins on a lock whose holder waits for its core (0.3 ms of processor time a message, measured with two ranks on
two cores). Here the rank's own thread writes and reads: half of gloo's latency and a tenth of its processor time.

What does not fit into the connection's buffers is copied and written by a thread, so a send never blocks. Long messages
are better off with gloo, which moves them while the rank computes.

Ranks of one machine are connected through its memory (Unix sockets), in half the time that its network takes. The less
code there is in a message's way the better: what has not run for some ms has left the processor's caches, and takes 30
times as long as in a loop.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from struct import Struct
from typing import Any, NamedTuple

from pipesched.executors.stores import Store, awaited_value

__all__ = ["SocketPort", "own_host"]

_GREETING = Struct("<qq16s")  # the sender's rank, the tag, the receiver's word
_BACKLOG = 1024
_PATIENCE_S = 5  # for the other end to take what is on its way as a connection is closed
_ROOM = 4 << 20  # bytes that a connection through memory holds: several short messages
_TIME = Struct("@ll")  # seconds, microseconds: struct timeval
_IFREQ, _NAME_BYTES = Struct("@16s4x4s16x"), 15  # an interface's name, its IPv4 address: struct ifreq
_SIOCGIFADDR = 0x8915


def own_host(store: Any) -> str:
    """The address under which other machines find this one.

    That of the interface that GLOO_SOCKET_IFNAME names, as for gloo, so that all messages take one network; else the
    one on the way to the store's host; this machine's alone where the store has none.
    """
    if named := _address_of(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]):
        return named
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)  # sends nothing
        return str(route.getsockname()[0])


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface; "" where it has none, or the system does not say."""
    if not interface or sys.platform != "linux":
        return ""
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = ioctl(any_socket, _SIOCGIFADDR, _IFREQ.pack(interface.encode()[:_NAME_BYTES], b""))
        return socket.inet_ntoa(_IFREQ.unpack(answer)[1])
    return ""


class _Pending(NamedTuple):
    """A send whose rest a thread writes."""

    rest: memoryview
    written: threading.Event
    timeout_s: float

    def wait(self) -> None:
        if not self.written.wait(self.timeout_s):
            raise RuntimeError("Timed out")


class _Sender:
    """The sending end of a connection, which is made by the first send."""

    def __init__(self, connect: Callable[[], socket.socket], timeout_s: float) -> None:
        self.connection: socket.socket | None = None
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._behind = 0  # messages with the thread: until there are none, all others go behind them
        self._queue: SimpleQueue[_Pending] = SimpleQueue()
        self._writer: threading.Thread | None = None

    def send(self, parts: Sequence[Any], nbytes: int) -> _Pending | None:
        """As ``SocketPort.sender`` says. What the other end does not live to receive is lost without an error: a rank
        fails where it waits for one that is gone, and may otherwise end its work.
        """
        try:
            if self.connection is None:
                self.connection = self._connect()
            sent = 0 if self._behind else self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            return None
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return None if sent == nbytes else self._leave(memoryview(b"".join(parts))[sent:])

    def _leave(self, rest: memoryview) -> _Pending:
        """To a thread. It is a copy: what was given may change before the thread comes to it."""
        with self._lock:
            self._behind += 1
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="pipesched writer", daemon=True)
            self._writer.start()
        pending = _Pending(rest, threading.Event(), self._timeout_s)
        self._queue.put(pending)
        return pending

    def _write(self) -> None:
        """In a thread: until there is nothing to write."""
        assert self.connection is not None
        while (pending := self._queue.get()).rest:
            with suppress(OSError):
                self.connection.sendall(pending.rest)
            with self._lock:
                self._behind -= 1
            pending.written.set()

    def hang_up(self) -> None:
        """End the connection at once."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; what is written still arrives."""
        if self._writer is not None:
            self._queue.put(_Pending(memoryview(b""), threading.Event(), 0))
            self._writer.join(_PATIENCE_S)
            if self._writer.is_alive():
                self.hang_up()
                self._writer.join()
        if self.connection is not None:
            self.connection.close()


class _Reader:
    """The receiving end of a connection, which is awaited by the first read."""

    def __init__(self, accept: Callable[[], socket.socket]) -> None:
        self._accept = accept
        self._connection: socket.socket | None = None

    def read(self, into: memoryview) -> None:
        """As ``SocketPort.reader`` says."""
        if self._connection is None:
            self._connection = self._accept()
        _read(self._connection, into)


def _read(connection: socket.socket, into: memoryview) -> None:
    try:
        while (count := connection.recv_into(into, 0, socket.MSG_WAITALL)) < len(into):
            if not count:
                raise RuntimeError("Connection closed by peer")
            into = into[count:]
    except BlockingIOError:
        raise RuntimeError("Timed out") from None
    except OSError as error:
        raise RuntimeError(str(error)) from None


class SocketPort:
    """One rank's connections; each is made when first used. The ranks find each other through the store.

    Those of one machine meet at a name that no other machine or network namespace sees; the others use the network.
    """

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._word = secrets.token_bytes(16)  # who does not know it from the store is a stranger
        self._name = f"\0pipesched/{secrets.token_hex(16)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listeners = [socket.create_server((host, 0), family=family, backlog=_BACKLOG)]
        if sys.platform == "linux":
            self._listeners.append(_listener(self._name))
        self._knocking = selectors.DefaultSelector()
        for listener in self._listeners:
            self._knocking.register(listener, selectors.EVENT_READ, listener.accept)
        self._senders: dict[tuple[int, int], _Sender] = {}
        self._accepted: dict[tuple[int, int], socket.socket] = {}
        address = host, self._listeners[0].getsockname()[1], self._name, self._word.hex()
        store.set(f"address/{rank}", json.dumps(address))

    def sender(self, to: int, tag: int, /) -> Callable[[Sequence[Any], int], _Pending | None]:
        """What sends buffers, so many bytes in all, without waiting. They may change at once; None: all is written."""
        if (to, tag) not in self._senders:
            self._senders[to, tag] = _Sender(lambda: self._connect(to, tag), self._timeout_s)
        return self._senders[to, tag].send

    def reader(self, from_: int, tag: int, /) -> Callable[[memoryview], None]:
        """What waits for the next bytes that were sent, as many as a buffer takes, and fills it."""
        return _Reader(lambda: self._accept(from_, tag)).read

    def _connect(self, to: int, tag: int) -> socket.socket:
        host, port, name, word = json.loads(awaited_value(self._store, f"address/{to}", self._timeout_s))
        connection = _connected(name) or socket.create_connection((host, port), self._timeout_s)
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_GREETING.pack(self._rank, tag, bytes.fromhex(word)))
        return connection

    def _accept(self, from_: int, tag: int) -> socket.socket:
        """The connection from this rank, once it is there."""
        while (from_, tag) not in self._accepted:
            knocking = self._knocking.select(self._timeout_s)
            if not knocking:
                raise RuntimeError("Timed out")
            try:
                connection, _ = knocking[0][0].data()
            except OSError as error:
                raise RuntimeError(str(error)) from None
            self._admit(connection)
        return self._accepted[from_, tag]

    def _admit(self, connection: socket.socket) -> None:
        patience = _TIME.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        greeting = bytearray(_GREETING.size)
        with suppress(RuntimeError):
            _read(connection, memoryview(greeting))
        rank, tag, word = _GREETING.unpack(greeting)
        if secrets.compare_digest(word, self._word):
            self._accepted[rank, tag] = connection
        else:
            connection.close()

    def hang_up(self) -> None:
        """End every wait of this rank, and of those that wait for it."""
        for sender in list(self._senders.values()):  # another thread may add one
            sender.hang_up()
        for end in [*self._listeners, *self._accepted.values()]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; what was sent still arrives, where the other end takes it soon."""
        for sender in self._senders.values():
            sender.close()
        self._knocking.close()
        for end in [*self._listeners, *self._accepted.values()]:
            end.close()


def _listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(_BACKLOG)
    return listener


def _connected(name: str) -> socket.socket | None:
    """A connection through memory to who listens at this name. None where nobody does, or where the system allows it
    less room than a connection through the network has, which would often leave a thread to write the rest.
    """
    if sys.platform != "linux":
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    try:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= _ROOM:
            connection.connect(name)
            return connection
    except OSError:
        pass
    connection.close()
    return None
