"""Sockets: short messages between processes, a connection for each (from, to, tag).

gloo hands every message to a thread of its own, on the sending and on the receiving side. Where cores are few, that
thread spins on a lock whose holder waits for its core (0.3 ms of processor time a message, measured with two ranks on
two cores). Here the rank's own thread writes and reads: half of gloo's latency and a tenth of its processor time.
What does not fit into the connection's buffers is copied and written by a thread, so a send never blocks. Long
messages are better off with gloo, which moves them while the rank computes.
"""

import json
import os
import secrets
import socket
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from struct import Struct
from typing import Any, NamedTuple

from torch import Tensor

from pipesched.executors.alarm import Store

__all__ = ["SocketPort", "own_host"]

_LENGTH = Struct("<q")
_GREETING = Struct("<qq16s")  # the sender's rank, the tag, the receiver's word
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

    rest: list[memoryview]
    written: threading.Event
    timeout_s: float

    def wait(self) -> None:
        if not self.written.wait(self.timeout_s):
            raise RuntimeError("Timed out")


class _Sender:
    """The sending end of a connection."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._behind = 0  # messages with the thread: until there are none, all others go behind them
        self._queue: SimpleQueue[_Pending] = SimpleQueue()
        self._writer: threading.Thread | None = None

    def send(self, tensors: list[Tensor]) -> _Pending | None:
        length = sum(map(len, tensors))
        parts = [memoryview(_LENGTH.pack(length)), *(tensor.numpy().data for tensor in tensors)]
        with self._lock:
            sent = 0
            if not self._behind:
                with suppress(BlockingIOError):
                    sent = self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
                if sent == length + _LENGTH.size:
                    return None
            rest = [memoryview(b"".join(parts)[sent:])]  # the tensors may change before the thread comes to it
            self._behind += 1
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="pipesched writer", daemon=True)
            self._writer.start()
        pending = _Pending(rest, threading.Event(), self._timeout_s)
        self._queue.put(pending)
        return pending

    def _write(self) -> None:
        """In a thread: until the connection ends."""
        with suppress(OSError):
            while (pending := self._queue.get()).rest:
                for part in pending.rest:
                    self.connection.sendall(part)
                with self._lock:
                    self._behind -= 1
                pending.written.set()

    def close(self) -> None:
        """Close the connection; what is written still arrives."""
        if self._writer is not None:
            self._queue.put(_Pending([], threading.Event(), 0))
            if self._behind:
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
            self._writer.join()
        self.connection.close()


class _Receive:
    """A receive: it is read when it is waited for, in the order of the posts."""

    def __init__(self, port: "SocketPort", key: tuple[int, int], memory: Tensor) -> None:
        self._port, self._key, self._memory = port, key, memory

    def wait(self) -> None:
        connection = self._port.accepted(self._key)
        length = bytearray(_LENGTH.size)
        _read(connection, memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > len(self._memory):
            raise RuntimeError(f"a message of {size} bytes came where at most {len(self._memory)} were foreseen")
        _read(connection, self._memory.numpy().data[:size])


def _read(connection: socket.socket, into: memoryview) -> None:
    while into:
        try:
            count = connection.recv_into(into, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise RuntimeError("Timed out") from None
        except OSError as error:
            raise RuntimeError(str(error)) from None
        if not count:
            raise RuntimeError("Connection closed by peer")
        into = into[count:]


class SocketPort:
    """One rank's connections; each is made when first used. The ranks find each other through the store."""

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._word = secrets.token_bytes(16)  # who does not know it from the store is a stranger
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._listener.settimeout(timeout_s)
        self._senders: dict[tuple[int, int], _Sender] = {}
        self._accepted: dict[tuple[int, int], socket.socket] = {}
        store.set(f"address/{rank}", json.dumps([host, self._listener.getsockname()[1], self._word.hex()]))

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> _Pending | None:
        """Send tensors of bytes as one message, without waiting. They may change at once; None: it is complete."""
        try:
            sender = self._senders.get((to, tag)) or self._connect(to, tag)
            return sender.send(tensors)
        except OSError as error:
            raise RuntimeError(str(error)) from None

    def recv(self, tensors: list[Tensor], from_: int, tag: int, /) -> _Receive:
        """Receive into one tensor of bytes, at least as long as what comes, once it is waited for."""
        return _Receive(self, (from_, tag), tensors[0])

    def _connect(self, to: int, tag: int) -> _Sender:
        host, port, word = json.loads(self._store.get(f"address/{to}"))
        connection = socket.create_connection((host, port), self._timeout_s)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_GREETING.pack(self._rank, tag, bytes.fromhex(word)))
        sender = self._senders[to, tag] = _Sender(connection, self._timeout_s)
        return sender

    def accepted(self, key: tuple[int, int]) -> socket.socket:
        """The connection from (rank, tag), once it is there."""
        while key not in self._accepted:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise RuntimeError("Timed out") from None
            except OSError as error:
                raise RuntimeError(str(error)) from None
            connection.settimeout(None)
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
        return self._accepted[key]

    def hang_up(self) -> None:
        """End every wait of this rank, and of those that wait for it."""
        senders, accepted = list(self._senders.values()), list(self._accepted.values())  # another thread may add one
        for end in [self._listener, *accepted, *(sender.connection for sender in senders)]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; what was sent still arrives."""
        for sender in self._senders.values():
            sender.close()
        for end in [self._listener, *self._accepted.values()]:
            end.close()
