"""Sockets: send short messages between processes, over one connection for each sender, receiver and tag.

gloo passes every message to its own threads, at both ends. On a machine with few cores, such a thread spins on a lock
whose holder waits for a core (0.3 ms of processor time per message, measured with two ranks on two cores). In this
module, the rank's own thread writes and reads, which halves the latency and takes a tenth of the processor time. Long
messages go through gloo, which transfers them while the rank computes.

Bytes that do not fit into the connection's buffers are copied and written by a thread, so a send never blocks.

Ranks on one machine use Unix sockets, which take half as long as network sockets. The code that handles a message is
kept short: code that has not run for a few milliseconds is no longer in the processor's caches, and then takes 30 times
as long as in a loop.

A connection is accepted after a greeting, which proves that the sender has read the receiver's secret from the store.
The receiver reads the greetings of all new connections as their bytes arrive, so no connection can block the receiver.
The number of connections without a complete greeting is limited (`pipesched.runtime.coordination.strangers`).
"""

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

from pipesched.runtime.coordination.interpreter_exit import EXIT
from pipesched.runtime.coordination.stores import Store, StoreLostError, awaited_value
from pipesched.runtime.coordination.strangers import STRANGERS

__all__ = ["SocketPort", "own_host"]

_GREETING = Struct("<qq16s")  # the sender's rank, the tag, a proof that the sender has read the receiver's secret
_BACKLOG = 1024
_TRY_S = 0.25  # time to connect before a thread takes over; only a rank flooded with connections needs longer
_GLANCE_S = 0.1  # time between two checks of whether another thread has accepted the awaited connection
_CREDENTIALS = Struct("@iII")  # struct ucred: process, user, group
_PATIENCE_S = 5  # time for the other end to receive pending bytes when a connection is closed
_ROOM = 4 << 20  # bytes in the send buffer of a Unix socket; holds several short messages
_TIME = Struct("@ll")  # struct timeval: seconds, microseconds
_IFREQ = Struct("@16s4x4s16x")  # struct ifreq: an interface's name and IPv4 address
_NAME_BYTES = 15
_SIOCGIFADDR = 0x8915


def own_host(store: Any) -> str:
    """Return the address at which other machines reach this machine.

    If GLOO_SOCKET_IFNAME names an interface, that interface's address is used, as in gloo, so that all messages use one
    network. Otherwise the address from which this machine reaches the store's host is used, or the loopback address if
    the store has no host.
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
    """Return a network interface's IPv4 address, or "" if it has no address or the system is not Linux."""
    if not interface or sys.platform != "linux":
        return ""
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = ioctl(any_socket, _SIOCGIFADDR, _IFREQ.pack(interface.encode()[:_NAME_BYTES], b""))
        return socket.inet_ntoa(_IFREQ.unpack(answer)[1])
    return ""


class _PendingSend(NamedTuple):
    """A send whose remaining bytes (``rest``) are written by a thread."""

    rest: memoryview
    written: threading.Event
    timeout_s: float

    def wait(self) -> None:
        if not self.written.wait(self.timeout_s):
            raise RuntimeError("Timed out")


class _Sender:
    """The sending end of a connection. The first send makes the connection."""

    def __init__(self, connect: Callable[[float], socket.socket], timeout_s: float) -> None:
        self.connection: socket.socket | None = None
        self._ended = False
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._behind = 0  # messages queued for the thread; while there are any, new messages queue behind them
        self._queue: SimpleQueue[_PendingSend] = SimpleQueue()
        self._writer: threading.Thread | None = None

    def send(self, parts: Sequence[Any], nbytes: int) -> _PendingSend | None:
        """Send buffers, as described in ``SocketPort.sender``.

        Bytes that a dead receiver never reads are lost without an error, because a rank must fail only if it waits for
        a dead rank.
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
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, StoreLostError):
            return None
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return None if sent == nbytes else self._queue_rest(memoryview(b"".join(parts))[sent:])

    def _queue_rest(self, rest: memoryview) -> _PendingSend:
        """Queue the rest of a message for the thread, as a copy, because the buffers may change."""
        with self._lock:
            self._behind += 1
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="pipesched writer", daemon=True)
            self._writer.start()
        pending = _PendingSend(rest, threading.Event(), self._timeout_s)
        self._queue.put(pending)
        return pending

    def _write(self) -> None:
        """The main loop of the writer thread: write queued messages until an empty message arrives.

        Ends without writing if no connection can be made.
        """
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
        """Shut the connection down immediately."""
        self._ended = True
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; bytes already written still arrive."""
        if self._writer is not None:
            self._queue.put(_PendingSend(memoryview(b""), threading.Event(), 0))
            self._writer.join(_PATIENCE_S)
            if self._writer.is_alive():
                self.hang_up()
                self._writer.join()
        if self.connection is not None:
            self.connection.close()


class _Reader:
    """The receiving end of a connection. The first read waits for the connection."""

    def __init__(self, accept: Callable[[], socket.socket]) -> None:
        self._accept = accept
        self._connection: socket.socket | None = None

    def read(self, into: memoryview) -> None:
        """Fill a buffer, as described in ``SocketPort.reader``."""
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
    finally:
        if EXIT.begun:
            EXIT.check()


class SocketPort:
    """One rank's connections, each created when it is first used. Ranks exchange their addresses through the store.

    Ranks on one machine connect through an abstract Unix socket, which no other machine or network namespace can reach.
    Ranks on different machines connect over the network.
    """

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._hung_up = threading.Event()
        self._word = secrets.token_bytes(16)  # a secret; a greeting must prove that its sender knows it
        self._name = f"\0pipesched/{secrets.token_hex(16)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listeners = [socket.create_server((host, 0), family=family, backlog=_BACKLOG)]
        if sys.platform == "linux":
            self._listeners.append(_listener(self._name))
        self._selector = selectors.DefaultSelector()
        self._greeting: dict[socket.socket, bytearray] = {}  # bytes received so far of each greeting, oldest first
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept_next, listener))
        self._senders: dict[tuple[int, int], _Sender] = {}
        self._accepted: dict[tuple[int, int], socket.socket] = {}
        address = host, self._listeners[0].getsockname()[1], self._name, self._word.hex()
        store.set(f"address/{rank}", json.dumps(address))

    def sender(self, to: int, tag: int, /) -> Callable[[Sequence[Any], int], _PendingSend | None]:
        """Return a function that takes buffers and their total size in bytes, and sends the buffers without waiting.

        The caller may reuse the buffers as soon as the function returns. The function returns None if all bytes have
        been written, otherwise the pending send.
        """
        if (to, tag) not in self._senders:
            self._senders[to, tag] = _Sender(partial(self._connect, to, tag), self._timeout_s)
        return self._senders[to, tag].send

    def reader(self, from_: int, tag: int, /) -> Callable[[memoryview], None]:
        """Return a function that waits for the next bytes and fills a buffer with them."""
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
        """Wait for a rank's connection with this tag; other connections that arrive meanwhile are also accepted."""
        end_s = time.monotonic() + self._timeout_s
        while (from_, tag) not in self._accepted:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError("Timed out")
            ready = self._selector.select(min(left_s, _GLANCE_S))
            with STRANGERS.lock:  # also because one thread may wait for a shared value while another runs a step
                for key, _ in ready:
                    try:
                        key.data()
                    except OSError as error:
                        raise RuntimeError(str(error)) from None
        return self._accepted[from_, tag]

    def _accept_next(self, listener: socket.socket) -> None:
        """Accept the next connection on a listener, and read the available bytes of all incomplete greetings."""
        connection = STRANGERS.accepted(listener)
        if connection is None:
            return
        if _is_in_memory(connection) and not _is_own_user(connection):
            connection.close()
            return
        STRANGERS.admit(connection, partial(self._refuse, connection))
        connection.setblocking(False)
        self._greeting[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read_greeting, connection))
        for one in list(self._greeting):
            self._read_greeting(one)

    def _read_greeting(self, connection: socket.socket) -> None:
        """Read the available bytes of a greeting, and accept the connection if the greeting is complete and valid."""
        said = self._greeting.get(connection)
        if said is None:  # another thread has handled the greeting
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
        if known and (rank, tag) not in self._accepted:  # a second valid greeting was overheard and replayed
            STRANGERS.remove(connection)
            self._selector.unregister(connection)
            del self._greeting[connection]
            connection.setblocking(True)
            patience = _TIME.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            self._accepted[rank, tag] = connection
        else:
            self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        STRANGERS.remove(connection)
        self._selector.unregister(connection)
        del self._greeting[connection]
        connection.close()

    def hang_up(self) -> None:
        """Shut all connections down, so that neither this rank nor a rank connected to it keeps waiting."""
        self._hung_up.set()
        for sender in list(self._senders.values()):  # another thread may add a sender
            sender.hang_up()
        for end in [*self._listeners, *list(self._greeting), *list(self._accepted.values())]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; bytes already sent still arrive if the other end reads them soon."""
        for sender in self._senders.values():
            sender.close()
        with STRANGERS.lock:
            for connection in [*self._greeting]:
                self._refuse(connection)
            self._selector.close()
        for end in [*self._listeners, *self._accepted.values()]:
            end.close()


def _greeting(connection: socket.socket, rank: int, tag: int, word: bytes) -> bytes:
    """Return the greeting of a connection. A greeting proves that the sender knows the secret, but does not reveal it.

    The proof is valid only for one rank, tag and kind of connection, so it cannot be reused elsewhere.
    """
    way = b"memory" if _is_in_memory(connection) else b"network"
    proof = blake2b(b"%s %d %d" % (way, rank, tag), key=word, digest_size=16)
    return _GREETING.pack(rank, tag, proof.digest())


def _is_in_memory(connection: socket.socket) -> bool:
    return connection.family not in (socket.AF_INET, socket.AF_INET6)


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(_BACKLOG)
    return listener


def _connected(name: str) -> socket.socket | None:
    """Return a Unix connection to the listener with this name; None if the network must be used.

    The network is used if there is no listener, if the listener belongs to another user or its backlog is full, or if
    the system limits the send buffer to less than ``_ROOM`` bytes. With a smaller buffer, a thread would often have to
    write the rest of a message.
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
