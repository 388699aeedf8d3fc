"""Bytes between two ranks' sockets, through the machine's memory and through its network, and strangers beside them."""

import json
import os
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.coordination.strangers import STRANGERS, Strangers
from pipesched.runtime.transport import sockets
from pipesched.runtime.transport.sockets import SocketPort

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(params=["memory", "network"])
def ports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of ranks 0 and 1."""
    if request.param == "network":
        monkeypatch.setattr(sockets, "_connected", lambda name: None)
    elif not hasattr(socket, "AF_UNIX"):
        pytest.skip("the system has no Unix sockets")
    store = distributed.HashStore()
    made = [SocketPort(store, rank, "127.0.0.1", 5.0) for rank in range(2)]
    yield made
    for port in made:
        port.close()


def read(port: SocketPort, from_: int, tag: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    port.reader(from_, tag)(memoryview(into))
    return bytes(into)


def test_bytes_come_in_order_whatever_a_connection_holds(ports: list[SocketPort]) -> None:
    """What was sent while nobody reads is more than any connection holds; it may change at once."""
    first, second = ports
    send = first.sender(1, 4)
    pending, sent = [], b""
    for number in range(8):
        parts = bytearray(b"%d" % number * 64), bytearray(b"%d" % number * (8 << 20 if number == 2 else 1000))
        pending.append(send(parts, sum(map(len, parts))))
        sent += b"".join(parts)
        parts[1][:] = bytes(len(parts[1]))
    assert pending[:2] == [None, None]
    assert None not in pending[2:]  # they wait behind the long one
    assert read(second, 0, 4, len(sent)) == sent
    for one in pending[2:]:
        one.wait()
    assert send((b"at once",), 7) is None
    assert read(second, 0, 4, 7) == b"at once"


def test_each_tag_and_direction_is_a_connection_of_its_own(ports: list[SocketPort]) -> None:
    first, second = ports
    for tag in (0, 1):
        first.sender(1, tag)((b"%d" % tag,), 1)
        second.sender(0, tag)((b"%d" % (tag + 2),), 1)
    assert [read(second, 0, tag, 1) for tag in (1, 0)] == [b"1", b"0"]
    assert [read(first, 1, tag, 1) for tag in (0, 1)] == [b"2", b"3"]


def test_a_connection_without_the_password_is_refused(ports: list[SocketPort]) -> None:
    first, second = ports
    word, second._word = second._word, b"another word    "
    first.sender(1, 0)((b"stranger",), 8)
    second._timeout_s = 0.2
    with pytest.raises(RuntimeError, match="Timed out"):
        read(second, 0, 0, 8)
    second._word = word
    first.sender(1, 1)((b"friend",), 6)
    assert read(second, 0, 1, 6) == b"friend"


def test_closing_a_port_ends_waits_at_both_ends(ports: list[SocketPort]) -> None:
    first, second = ports
    first.sender(1, 0)((b"1",), 1)
    read(second, 0, 0, 1)
    failed = []

    def wait(tag: int) -> None:
        try:
            read(second, 0, tag, 1)
        except RuntimeError:
            failed.append(tag)

    first.hang_up()
    wait(0)
    waits = threading.Thread(target=wait, args=(7,))  # for a connection that nobody makes
    waits.start()
    second.hang_up()
    waits.join()
    assert failed == [0, 7]


# ---- strangers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def strangers() -> Iterator[Callable[..., list[socket.socket]]]:
    """Makes connections with every listener of a port."""
    made: list[socket.socket] = []

    def connect(port: SocketPort, many: int = 1) -> list[socket.socket]:
        new = []
        for listener in port._listeners * many:
            new.append(socket.socket(listener.family))
            new[-1].settimeout(10)
            new[-1].connect(listener.getsockname())
        made.extend(new)
        return new

    yield connect
    for connection in made:
        connection.close()


def is_ended(connection: socket.socket) -> bool:
    """Whether the other end has hung up, which it does within the connection's timeout or not at all."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


GREETING = sockets._GREETING.size
SAYINGS = {
    "nothing": b"",
    "a byte": b"x",
    "all but the last byte": bytes(GREETING - 1),
    "another word": bytes(GREETING),
    "noise": bytes(range(256)) * 64,
    "a length": struct.pack("<q", 2**63 - 1) * 4,
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("saying", SAYINGS.values(), ids=list(SAYINGS))
def test_a_rank_does_not_wait_for_strangers(ports: list[SocketPort], strangers: Any, saying: bytes) -> None:
    """They are there before it. Each of them would take the whole timeout."""
    first, second = ports
    for connection in strangers(second, 20):
        connection.sendall(saying)
    first.sender(1, 0)((b"friend",), 6)
    assert read(second, 0, 0, 6) == b"friend"


def test_strangers_that_leave_or_reset_are_forgotten(ports: list[SocketPort], strangers: Any) -> None:
    first, second = ports
    for number, connection in enumerate(strangers(second, 20)):
        if number % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    first.sender(1, 0)((b"friend",), 6)
    assert read(second, 0, 0, 6) == b"friend"
    second._timeout_s = 0.3
    with pytest.raises(RuntimeError, match="Timed out"):
        read(second, 0, 1, 1)
    assert not second._greeting


def test_the_number_of_open_connections_from_silent_strangers_is_limited(
    ports: list[SocketPort], strangers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest gives way."""
    monkeypatch.setattr(Strangers, "most", 40)
    first, second = ports
    come = strangers(second, 100)
    first.sender(1, 0)((b"friend",), 6)
    assert read(second, 0, 0, 6) == b"friend"
    second._timeout_s = 0.3
    with pytest.raises(RuntimeError, match="Timed out"):
        read(second, 0, 1, 1)
    assert 0 < len(second._greeting) <= 40
    assert all(map(is_ended, come[:50]))


def test_the_listeners_of_a_process_share_one_limit(strangers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen listeners with thirty strangers each: all of them together hold a quarter of the file descriptors."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (160, 160))
    store = distributed.HashStore()
    ports = [SocketPort(distributed.PrefixStore(str(at), store), 1, "127.0.0.1", 0.2) for at in range(8)]
    alarms = [Alarm(SimpleNamespace(rank=lambda: 0, size=lambda: 1), ["rank 0"], "127.0.0.1", 1.0) for _ in range(8)]
    try:
        for port in ports:
            strangers(port, 30)
            with pytest.raises(RuntimeError, match="Timed out"):
                read(port, 0, 1, 1)
            assert len(STRANGERS) <= 40
        for alarm in alarms:
            here = [socket.create_connection(alarm._listener.server.getsockname()) for _ in range(30)]
            here[-1].sendall(b"x" * (1 << 17))  # dismissed once it has been read, and so have all before it
            assert is_ended(here[-1])
            assert len(STRANGERS) <= 40
            [one.close() for one in here]
        held = sum(len(port._greeting) for port in ports) + sum(len(alarm._listener._callers) for alarm in alarms)
        assert held <= 40
    finally:
        for alarm in alarms:
            alarm.end()
        for port in ports:
            port.close()
    assert len(STRANGERS) == 0


def test_strangers_do_not_extend_the_timeout_of_a_wait(ports: list[SocketPort], strangers: Any) -> None:
    """Strangers that go on saying a little do not make it longer."""
    _, second = ports
    second._timeout_s, ended = 1.0, threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            strangers(second)[0].send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(RuntimeError, match="Timed out"):
            read(second, 0, 0, 1)
    finally:
        ended.set()
        dripping.join()


def test_a_greeting_does_not_say_the_word_and_counts_once(ports: list[SocketPort], strangers: Any) -> None:
    """Who has overheard it and repeats it is turned away, and the rank's own connection stays."""
    first, second = ports
    send = first.sender(1, 3)
    send((b"first",), 5)
    assert read(second, 0, 3, 5) == b"first"
    (own,) = (sender.connection for sender in first._senders.values())
    said = sockets._greeting(own, 0, 3, second._word)
    assert second._word not in said
    come = strangers(second)
    for connection in come:
        connection.sendall(said)
    first.sender(1, 4)((b"other",), 5)
    assert read(second, 0, 4, 5) == b"other"
    assert all(map(is_ended, come))
    reader = second.reader(0, 3)
    send((b"second",), 6)
    into = bytearray(6)
    reader(memoryview(into))
    assert bytes(into) == b"second"


@pytest.mark.parametrize("listener", range(2 if sys.platform == "linux" else 1))
def test_connections_are_accepted_in_the_order_in_which_they_came(listener: int) -> None:
    """A rank that has connected greets late. A stranger that came meanwhile repeats it, before anybody has looked."""
    port = SocketPort(distributed.HashStore(), 1, "127.0.0.1", 0.3)
    address, family = port._listeners[listener].getsockname(), port._listeners[listener].family
    with socket.socket(family) as rank, socket.socket(family) as stranger:
        rank.connect(address)
        with pytest.raises(RuntimeError, match="Timed out"):
            read(port, 0, 0, 4)
        stranger.connect(address)
        said = sockets._greeting(rank, 0, 0, port._word)
        rank.sendall(said + b"true")
        stranger.sendall(said + b"false")
        assert read(port, 0, 0, 4) == b"true"
    port.close()


def test_closing_a_port_closes_the_connections_of_strangers(ports: list[SocketPort], strangers: Any) -> None:
    first, second = ports
    come = strangers(second)
    for connection in come:
        connection.sendall(b"x")
    first.sender(1, 0)((b"1",), 1)
    read(second, 0, 0, 1)
    second.hang_up()
    assert all(map(is_ended, come))


def full_listener() -> tuple[socket.socket, list[socket.socket]]:
    """One that takes nobody any more, and who is there."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    there = []
    for _ in range(8):
        there.append(socket.socket())
        there[-1].setblocking(False)
        there[-1].connect_ex(listener.getsockname())
    return listener, there


def test_a_rank_that_takes_no_connection_does_not_hold_a_sender_up() -> None:
    """A thread goes on trying, with a limit, while the sender goes on."""
    listener, there = full_listener()
    store = distributed.HashStore()
    port = SocketPort(store, 0, "127.0.0.1", 1.5)
    store.set("address/1", json.dumps((*listener.getsockname(), "\0nobody", bytes(16).hex())))
    pending = port.sender(1, 0)((b"message",), 7)
    other = SocketPort(store, 2, "127.0.0.1", 5.0)
    other.sender(0, 0)((b"friend",), 6)
    assert read(port, 2, 0, 6) == b"friend"
    assert pending is not None
    with pytest.raises(RuntimeError, match="Timed out"):
        pending.wait()
    for one in (port, other, listener, *there):
        one.close()


def test_a_message_to_a_rank_that_was_flooded_arrives_once_it_takes_connections() -> None:
    listener, there = full_listener()
    store = distributed.HashStore()
    port = SocketPort(store, 0, "127.0.0.1", 15.0)
    store.set("address/1", json.dumps((*listener.getsockname(), "\0nobody", bytes(16).hex())))
    pending = port.sender(1, 0)((b"message",), 7)
    for one in there:
        one.close()
    listener.settimeout(15)
    said = b""
    while not said:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(15)
            while len(said) < GREETING + 7 and (more := connection.recv(100)):
                said += more
    assert said[GREETING:] == b"message"
    pending.wait()
    for one in (port, listener):
        one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_is_turned_away(ports: list[SocketPort]) -> None:
    first, second = ports
    here, there = socket.socketpair()
    if not (child := os.fork()):
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(second._name)
        there.send(b"x")
        connection.settimeout(10)
        os._exit(not is_ended(connection))
    here.recv(1)
    first.sender(1, 0)((b"friend",), 6)
    assert read(second, 0, 0, 6) == b"friend"
    second._timeout_s = 0.3
    with pytest.raises(RuntimeError, match="Timed out"):
        read(second, 0, 1, 1)
    assert os.waitpid(child, 0)[1] == 0


def test_ranks_connect_over_the_network_if_another_user_owns_the_local_socket(
    ports: list[SocketPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_is_own_user", lambda connection: False)
    first, second = ports
    first.sender(1, 0)((b"friend",), 6)
    assert read(second, 0, 0, 6) == b"friend"
    (own,) = (sender.connection for sender in first._senders.values())
    assert own.family == socket.AF_INET
