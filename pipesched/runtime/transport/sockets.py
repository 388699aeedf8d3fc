"""Sockets: short messages between processes, a connection for each (from, to, tag): of bytes, one behind the other.

gloo hands every message to a thread of its own, on the sending and on the receiving side. Where cores are few, that
thread spins on a lock whose holder waits for its core (0.3 ms of processor time a message, measured with two ranks on
two cores). Here the rank's own thread writes and reads: half of gloo's latency and a tenth of its processor time.

What does not fit into the connection's buffers is copied and written by a thread, so a send never blocks. Long messages
are better off with gloo, which moves them while the rank computes.

Ranks of one machine are connected through its memory (Unix sockets), in half the time that its network takes. The less
code there is in a message's way the better: what has not run for some ms has left the processor's caches, and takes 30
times as long as in a loop.

A connection counts once it has greeted with a proof that it knows the receiver's word, which is in the store. Nobody
waits for a single one to greet: connections that are silent, slow or of another user take nothing but a place among a
bounded number, and the oldest gives way.
"""

import errno
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from queue import SimpleQueue
from struct import Struct
from typing import Any, NamedTuple

from pipesched.runtime.coordination.stores import Store, awaited_value

__all__ = ["SocketPort", "own_host"]

_GREETING = Struct("<qq16s")  # the sender's rank, the tag, a proof that it knows the receiver's word
_BACKLOG = 1024
_MOST_GREETING = 64  # connections that have not greeted: a rank's own greets at once, and a stranger's gives way
_TRY_S = 0.25  # to connect, before a thread goes on trying; where nobody floods a rank it takes no time
_GLANCE_S = 0.1  # to wait for greetings, before looking whether another thread has heard the one that is awaited
_CREDENTIALS = Struct("@iII")  # a process, its user, its group: struct ucred
_PATIENCE_S = 5  # for the other end to take what is on its way as a connection is closed
_ROOM = 4 << 20  # bytes that a connection through memory holds: several short messages
_TIME = Struct("@ll")  # seconds, microseconds: struct timeval
_IFREQ = Struct("@16s4x4s16x")  # an interface's name, its IPv4 address: struct ifreq
_NAME_BYTES = 15
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

    def __init__(self, connect: Callable[[float], socket.socket], timeout_s: float) -> None:
        self.connection: socket.socket | None = None
        self._ended = False
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
            if self._behind:
                sent = 0
            else:
                if self.connection is None:
                    self.connection = self._connect(_TRY_S)
                sent = self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except (BlockingIOError, TimeoutError):
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
        """In a thread: until there is nothing to write, or no connection comes."""
        with suppress(OSError, RuntimeError):
            if self.connection is None:
                self.connection = self._connect_patiently()
        if self.connection is None:
            return
        while (pending := self._queue.get()).rest:
            with suppress(OSError):
                self.connection.sendall(pending.rest)
            with self._lock:
                self._behind -= 1
            pending.written.set()

    def _connect_patiently(self) -> socket.socket:
        end_s = time.monotonic() + self._timeout_s
        while not self._ended:
            with suppress(TimeoutError):
                return self._connect(max(_TRY_S, min(1.0, end_s - time.monotonic())))
            if time.monotonic() > end_s:
                break
        raise TimeoutError

    def hang_up(self) -> None:
        """End the connection at once."""
        self._ended = True
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
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._hung_up = threading.Event()
        self._word = secrets.token_bytes(16)  # who does not know it from the store is a stranger
        self._name = f"\0pipesched/{secrets.token_hex(16)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listeners = [socket.create_server((host, 0), family=family, backlog=_BACKLOG)]
        if sys.platform == "linux":
            self._listeners.append(_listener(self._name))
        self._selector = selectors.DefaultSelector()
        self._greeting: dict[socket.socket, bytearray] = {}  # what each has said so far; the oldest first
        self._lock = threading.Lock()  # a thread may wait for a shared value while another one runs a step
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._let_in, listener))
        self._senders: dict[tuple[int, int], _Sender] = {}
        self._accepted: dict[tuple[int, int], socket.socket] = {}
        address = host, self._listeners[0].getsockname()[1], self._name, self._word.hex()
        store.set(f"address/{rank}", json.dumps(address))

    def sender(self, to: int, tag: int, /) -> Callable[[Sequence[Any], int], _Pending | None]:
        """What sends buffers, so many bytes in all, without waiting. They may change at once; None: all is written."""
        if (to, tag) not in self._senders:
            self._senders[to, tag] = _Sender(partial(self._connect, to, tag), self._timeout_s)
        return self._senders[to, tag].send

    def reader(self, from_: int, tag: int, /) -> Callable[[memoryview], None]:
        """What waits for the next bytes that were sent, as many as a buffer takes, and fills it."""
        return _Reader(lambda: self._accept(from_, tag)).read

    def _connect(self, to: int, tag: int, limit_s: float) -> socket.socket:
        host, port, name, word = json.loads(awaited_value(self._store, f"address/{to}", self._timeout_s, self._hung_up))
        connection = _connected(name) or socket.create_connection((host, port), limit_s)
        connection.settimeout(None)
        if not _is_in_memory(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_greeting(connection, self._rank, tag, bytes.fromhex(word)))
        return connection

    def _accept(self, from_: int, tag: int) -> socket.socket:
        """The connection from this rank, once it has greeted; meanwhile all others may greet, too."""
        end_s = time.monotonic() + self._timeout_s
        while (from_, tag) not in self._accepted:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError("Timed out")
            ready = self._selector.select(min(left_s, _GLANCE_S))
            with self._lock:
                for key, _ in ready:
                    try:
                        key.data()
                    except OSError as error:
                        raise RuntimeError(str(error)) from None
        return self._accepted[from_, tag]

    def _let_in(self, listener: socket.socket) -> None:
        """Take the next connection, and hear what it has said by now: after all that came before it."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another thread has it, or it has left
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._greeting:
                raise
            self._turn_away(next(iter(self._greeting)))  # its descriptor is for the next one
            return
        if _is_in_memory(connection) and not _is_own_user(connection):
            connection.close()
            return
        if len(self._greeting) >= _MOST_GREETING:
            self._turn_away(next(iter(self._greeting)))
        connection.setblocking(False)
        self._greeting[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, connection))
        for one in list(self._greeting):
            self._hear(one)

    def _hear(self, connection: socket.socket) -> None:
        """Read what there is of a greeting, and let in who has said all of it."""
        said = self._greeting.get(connection)
        if said is None:  # another thread has heard it
            return
        try:
            more = connection.recv(_GREETING.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if more and len(said) < _GREETING.size:
            return
        rank, tag, _ = _GREETING.unpack(said) if more else (0, 0, b"")
        known = secrets.compare_digest(said, _greeting(connection, rank, tag, self._word))
        if known and (rank, tag) not in self._accepted:  # else it repeats what it has overheard
            self._selector.unregister(connection)
            del self._greeting[connection]
            connection.setblocking(True)
            patience = _TIME.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            self._accepted[rank, tag] = connection
        else:
            self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._greeting[connection]
        connection.close()

    def hang_up(self) -> None:
        """End every wait of this rank, and of those that wait for it."""
        self._hung_up.set()
        for sender in list(self._senders.values()):  # another thread may add one
            sender.hang_up()
        for end in [*self._listeners, *list(self._greeting), *list(self._accepted.values())]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; what was sent still arrives, where the other end takes it soon."""
        for sender in self._senders.values():
            sender.close()
        self._selector.close()
        for end in [*self._listeners, *self._greeting, *self._accepted.values()]:
            end.close()


def _greeting(connection: socket.socket, rank: int, tag: int, word: bytes) -> bytes:
    """What shows that a rank knows a word, without the word. It is worth nothing elsewhere than where it was said:
    through memory and through the network connections come in the order in which they were made.
    """
    way = b"memory" if _is_in_memory(connection) else b"network"
    proof = blake2b(b"%s %d %d" % (way, rank, tag), key=word, digest_size=16)
    return _GREETING.pack(rank, tag, proof.digest())


def _is_in_memory(connection: socket.socket) -> bool:
    return connection.family not in (socket.AF_INET, socket.AF_INET6)


def _is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection through memory is of this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(_BACKLOG)
    return listener


def _connected(name: str) -> socket.socket | None:
    """A connection through memory to who listens at this name. None where nobody does, or another user, or where more
    connections wait there than the system lets; and where the system allows it less room than a connection through the
    network has, which would often leave a thread to write the rest.
    """
    if sys.platform != "linux":
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    connection.setblocking(False)
    with suppress(OSError):
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= _ROOM:
            connection.connect(name)
            if _is_own_user(connection):
                return connection
    connection.close()
    return None
