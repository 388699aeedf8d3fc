"""What is no tensor and travels between ranks: a closed set of types, read without running anything."""

import ast
import enum
import math
import os
import pickle
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils import _pytree as pytree

from pipesched.errors import ExecutionError
from pipesched.runtime.transport.channels import _FIELDS, _HEADER, Incoming
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.message_layout import MessageLayout, describe
from pipesched.runtime.transport.ports import Ports
from pipesched.runtime.transport.sockets import SocketPort
from pipesched.tensors.payload import Payload

ROOT = Path(__file__).parents[2]


class Colour(enum.Enum):
    RED = "red"


class Flags(enum.IntFlag):
    ONE = 1
    TWO = 2


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    tensor: Any
    note: str = "note"


class Node:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts


pytree.register_pytree_node(Node, lambda node: (list(node.parts), None), lambda parts, _: Node(*parts))


class Opaque:
    pass


PLAIN = [
    None, True, False, ..., 0, -1, 2**200, -(2**64), 0.1, -0.0, math.inf, 1 - 2j, "", "text \ud800", b"", b"\xff",
    (), (1, (2.0, "three")), [1, [None]], {"a": 1, (2, 3): [4]}, {1, 2}, frozenset({"x"}), slice(None, 3, -1),
    range(5, 1, -2), torch.Size([3, 0, 5]), torch.float32, torch.bfloat16, torch.strided, torch.channels_last,
    torch.device("cpu"), torch.device("cuda", 3), bytearray(b"bytes"), OrderedDict(a=1, b=2), deque([1, 2], maxlen=5),
]  # fmt: skip


def returned(value: Any, *types: Any) -> Any:
    """What the other end reads, which knows these types as this one does."""
    return Encoding(types).read(Encoding(types).written(value))


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    arrived = returned(value)
    assert type(arrived) is type(value)
    assert arrived == value
    assert repr(arrived) == repr(value)  # -0.0, the order of a dict


def test_a_default_dict_has_its_default() -> None:
    arrived = returned(defaultdict(list, a=[1]))
    assert arrived == {"a": [1]}
    assert arrived["b"] == []


@pytest.mark.parametrize("dtype", ["?", "i1", "<u8", ">i4", "<f2", "<c16"])
def test_arrays_of_numbers_arrive(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).T.astype(dtype)
    arrived = returned(array)
    assert arrived.dtype == array.dtype
    assert np.array_equal(arrived, array)
    assert arrived.flags.writeable
    assert type(returned(array[0, 1])) is type(array[0, 1])


@pytest.mark.parametrize("value", [Colour.RED, Flags.ONE | Flags.TWO, Pair(1, Colour.RED), Colour], ids=repr)
def test_named_types_arrive_where_both_ends_know_them(value: Any) -> None:
    assert returned(value, Colour, Flags, Pair) == value


def test_a_type_that_the_sender_has_not_seen_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"test_encoding\.Colour did not occur with the sample"):
        Encoding().written(Colour.RED)


def test_a_type_that_the_receiver_has_not_seen_is_not_looked_for() -> None:
    written = Encoding([Colour]).written(Colour.RED)
    with pytest.raises(ExecutionError, match=r"decoded \(KeyError: 'tests\.runtime\.test_encoding\.Colour'\)"):
        Encoding().read(written)


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], os.system, lambda: 0, np.array([Opaque()]), torch.ones(1)])
def test_other_values_are_refused_by_the_name_of_their_type(value: Any) -> None:
    match = r"registered pytree nodes can be sent between ranks; got [a-zA-Z_.]+; pass its parts"
    with pytest.raises(ExecutionError, match=match):
        Encoding().written(value)


def test_a_type_that_was_learnt_can_be_read_later() -> None:
    encoding = Encoding()
    with encoding.learning():
        encoding.written(Pair(Colour.RED, Flags.TWO))
    assert encoding.read(encoding.written(Pair(Flags.ONE, 2))) == Pair(Flags.ONE, 2)


PAYLOADS = [
    {"a": torch.ones(2), "b": (3, None, Colour.RED)},
    Pair(torch.ones(2, 3).t(), [slice(1), {1}]),
    Record(torch.ones(3), "other"),
    [Node(torch.zeros(1), Record(torch.ones(2)))],
    torch.ones(4, 2).max(1),
]


@pytest.mark.parametrize("value", PAYLOADS, ids=lambda value: type(value).__name__)
def test_a_form_is_put_together_again_by_a_receiver_that_knows_its_types(value: Any) -> None:
    encoding, other = Encoding(), Encoding()
    for one in (encoding, other):
        with one.learning():
            MessageLayout(describe(Payload.of(value), one)[0], one).written()
    sent = MessageLayout(describe(Payload.of(value), encoding)[0], encoding)
    arrived = MessageLayout.read(sent.written(), other)
    assert arrived == sent
    restored = arrived.restore(torch.zeros(arrived.nbytes, dtype=torch.uint8), 0).value
    assert type(restored) is type(value)
    leaves, wanted = (pytree.tree_leaves(Payload.of(one).leaves) for one in (restored, value))
    assert [getattr(leaf, "shape", leaf) for leaf in leaves] == [getattr(leaf, "shape", leaf) for leaf in wanted]


def test_a_mutable_value_is_a_new_object_in_each_message() -> None:
    encoding = Encoding()
    form = MessageLayout(describe(Payload.of(({1, 2}, "text")), encoding)[0], encoding)
    first, second = (form.restore(torch.empty(0, dtype=torch.uint8), 0).value for _ in range(2))
    first[0].clear()
    assert second[0] == {1, 2}


def test_bytes_that_nobody_wrote_are_refused_whatever_they_are() -> None:
    """Mutations of real forms, and noise: an ExecutionError or another form, nothing else, and no time."""
    draw = random.Random(5)
    types = (Colour, Pair, Record, Node, type(PAYLOADS[-1]))
    encoding = Encoding(types)
    written = [MessageLayout(describe(Payload.of(value), encoding)[0], encoding).written() for value in PAYLOADS]
    refused = 0
    for _ in range(3000):
        data = bytearray(draw.choice(written))
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(data))
            data[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        try:
            MessageLayout.read(bytes(data), encoding)
        except ExecutionError:
            refused += 1
    assert refused > 2000
    for depth in (10, 100_000):
        nested = b"".join(b"l" + (1).to_bytes(8, "little") for _ in range(depth))
        with pytest.raises(ExecutionError, match=r"encoded by pipesched; \d+ bytes could not be decoded \("):
            encoding.read(nested)


# ---- nothing is unpickled ----------------------------------------------------------------------------------------


class Runs:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.timeout(30)
def test_a_stranger_that_reads_the_password_in_the_store_cannot_run_code(tmp_path: Path) -> None:
    """The stranger greets as rank 0 does, and announces a form, which is a pickle."""
    store = distributed.HashStore()
    port = SocketPort(store, 1, "127.0.0.1", 5.0)
    stranger = SocketPort(store, 0, "127.0.0.1", 5.0)
    incoming = Incoming(Ports(port, None), 0, 0, Encoding())  # type: ignore[arg-type]
    incoming.open(("one",))
    poison = pickle.dumps(Runs(tmp_path / "ran"))
    header = bytearray(_HEADER)
    _FIELDS.pack_into(header, 0, len(poison), 0, 0, 0)
    stranger.sender(1, 0)((header,), len(header))
    stranger.sender(1, 1)((poison,), len(poison))
    with pytest.raises(ExecutionError, match=r"encoded by pipesched; \d+ bytes could not be decoded \("):
        incoming.receive()
    assert not (tmp_path / "ran").exists()
    for one in (port, stranger):
        one.close()


FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load", "all_gather_object"}
FORBIDDEN |= {"broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"}


@pytest.mark.parametrize("path", sorted((ROOT / "pipesched").rglob("*.py")), ids=lambda path: path.name)
def test_no_module_reads_pickles(path: Path) -> None:
    """Not from a socket, a store or a file: nor through torch's collectives of objects."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
        if isinstance(node, ast.Attribute):
            names |= {node.attr, ast.unparse(node)}
        assert not names & FORBIDDEN, f"{path.name}:{node.lineno} uses {names & FORBIDDEN}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["payload", "gradients"])
def test_a_value_of_one_contiguous_tensor_is_built_before_its_bytes_arrive(
    dtype: torch.dtype, shape: tuple[int, ...], backward: bool
) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    value = (tensor,) if backward else Payload.of(tensor)
    layout = MessageLayout(describe(value, Encoding())[0], Encoding())
    received, memory = layout.empty_plain()
    memory.copy_(tensor)
    (leaf,) = received if backward else received.leaves
    assert type(received) is type(value)
    assert leaf.dtype is dtype
    assert torch.equal(leaf, tensor)
    assert leaf.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "value",
    [torch.ones(2, 3).t(), torch.ones(0, 3), torch.ones(2, dtype=torch.bfloat16), [torch.ones(2), torch.ones(2)], 3],
    ids=["transposed", "empty", "bfloat16", "two tensors", "number"],
)
def test_other_values_are_built_from_the_memory_of_their_message(value: Any) -> None:
    layout = MessageLayout(describe(Payload.of(value), Encoding())[0], Encoding())
    assert layout.empty_plain() is None
