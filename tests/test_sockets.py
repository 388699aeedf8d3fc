"""Bytes between two ranks' sockets, through the machine's memory and through its network."""

import socket
import threading
from typing import Any

import pytest
from torch import distributed

from pipesched.executors import sockets
from pipesched.executors.sockets import SocketPort

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


def test_who_does_not_know_the_word_is_not_let_in(ports: list[SocketPort]) -> None:
    first, second = ports
    word, second._word = second._word, b"another word    "
    first.sender(1, 0)((b"stranger",), 8)
    second._timeout_s = 0.2
    with pytest.raises(RuntimeError, match="Timed out"):
        read(second, 0, 0, 8)
    second._word = word
    first.sender(1, 1)((b"friend",), 6)
    assert read(second, 0, 1, 6) == b"friend"


def test_hanging_up_ends_waits_at_both_ends(ports: list[SocketPort]) -> None:
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
