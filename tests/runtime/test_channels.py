"""The two ends of a channel foresee the same, however a run comes to either of them in parts."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipesched.runtime.transport.channels import Incoming, Outgoing, Ports
from pipesched.runtime.transport.encoding import Encoding
from pipesched.tensors.payload import Payload


class Memory:
    """A port within the process, for short messages or for long ones."""

    def __init__(self) -> None:
        self.sent: dict[int, deque[bytes]] = defaultdict(deque)

    def sender(self, to: int, tag: int, /) -> Any:
        def send(parts: Sequence[Any], nbytes: int) -> None:
            self.sent[tag].append(b"".join(parts))
            assert len(self.sent[tag][-1]) == nbytes

        return send

    def reader(self, from_: int, tag: int, /) -> Any:
        def read(into: memoryview) -> None:
            data = self.sent[tag].popleft()
            into[:] = data[: len(into)]
            if len(data) > len(into):
                self.sent[tag].appendleft(data[len(into) :])

        return read

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        (tensor,) = tensors
        self.sent[tag].append(tensor.numpy().tobytes())
        return Done()

    def recv(self, tensors: list[Tensor], from_: int, tag: int, /) -> Any:
        return Read(self.sent[tag], tensors[0])


class Done:
    def wait(self) -> None:
        """It is."""


class Read:
    """A message that is longer than the memory that waits for it is an error."""

    def __init__(self, sent: deque[bytes], memory: Tensor) -> None:
        self.sent, self.memory = sent, memory

    def wait(self) -> None:
        data = self.sent.popleft()
        self.memory[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)


messages = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=60)


@settings(max_examples=60)
@given(st.data(), messages)
def test_both_ends_agree_whatever_their_parts(data: st.DataObject, run: list[tuple[str, int]]) -> None:
    """Three runs, over a port for short messages and one for long ones. The receiver is as far behind as it likes."""
    short, long = Memory(), Memory()
    outgoing, incoming = (end(Ports(short, long, 10), 0, 0, Encoding()) for end in (Outgoing, Incoming))
    keys = [key for key, _ in run]
    for _ in range(3):
        sent = taken = known_there = known_here = 0
        outgoing.open(())
        incoming.open(())
        while taken < len(run):
            if sent < len(run) and (sent == taken or data.draw(st.booleans())):
                if known_there == sent:
                    known_there = data.draw(st.integers(sent + 1, len(run)))
                    outgoing.extend(keys[sent:known_there])
                outgoing.send(value(run[sent][1], sent))
                sent += 1
            else:
                if known_here == taken:
                    known_here = data.draw(st.integers(taken + 1, len(run)))
                    incoming.extend(keys[taken:known_here])
                assert torch.equal(incoming.receive().value, value(run[taken][1], taken).value)
                taken += 1
        assert not any([*short.sent.values(), *long.sent.values()])


def value(size: int, number: int) -> Payload:
    return Payload.of(torch.full((size,), float(number)))


def test_an_announced_layout_is_predicted_a_few_messages_later() -> None:
    port = Memory()
    outgoing, incoming = (end(Ports(port, port), 0, 0, Encoding()) for end in (Outgoing, Incoming))
    outgoing.open(())
    incoming.open(())
    announced = []
    for step in range(12):
        outgoing.extend("ab")
        incoming.extend("ab")
        for size in (3, 4):
            outgoing.send(value(size, step))
            announced.append(len(port.sent[1]) > 0)
            incoming.receive()
    assert announced == [True] * 8 + [False] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 1, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("limit", [1, 1 << 20], ids=["long", "short"])
def test_the_bytes_of_a_tensor_arrive_whatever_its_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], limit: int
) -> None:
    ports = Ports(Memory(), Memory(), limit)
    outgoing, incoming = (end(ports, 0, 0, Encoding()) for end in (Outgoing, Incoming))
    for number in range(4):  # the first run announces the layout, the others foresee it
        outgoing.open("a")
        incoming.open("a")
        tensor = (torch.arange(math.prod(shape)) + number).reshape(shape).to(dtype)
        outgoing.send((tensor,))
        (received,) = incoming.receive()
        assert (received.dtype, received.shape, received.stride()) == (dtype, shape, tensor.stride())
        assert torch.equal(received, tensor)
