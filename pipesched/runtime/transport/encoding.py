"""Encoding: converts plain values to bytes and back. Only known types are decoded, so received bytes cannot run code.

Supported types are None, numbers, text, bytes, tuples, lists, dicts, sets, slices, ranges, numpy arrays of numbers, and
torch's dtypes, devices and shapes. Enums and pytree nodes are written with the names of their types. The receiving rank
looks up each name among the types that it has registered, including the types that occurred when it captured the
model. Decoding never imports a module.
"""

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

from pipesched.errors import ExecutionError
from pipesched.tensors.payload import Opened, children_of, pytree

__all__ = ["Encoding", "UnsentTypeError"]

_HEAD = Struct("<cQ")  # a tag, and the number of bytes or parts that follow
_FLOAT = Struct("<d")
_COMPLEX = Struct("<dd")
_MOST_REMEMBERED = 4096  # the maximum number of cached encodings of immutable values
_NUMBERS_OF_NUMPY = "biufc"

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_CONSTANTS: dict[str, Any] = {str(one): one for one in vars(torch).values() if isinstance(one, _NAMED)}
_CONSTANTS |= {str(one): one for one in (None, True, False, ...)}


def _constant(value: Any) -> bytes:
    return str(value).encode()


def _read_constant(data: memoryview) -> Any:
    return _CONSTANTS[str(data, "ascii")]


def _paired(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


#: For values without parts: (tag, write function, read function).
_ATOMS: dict[type, tuple[bytes, Callable[[Any], bytes], Callable[[memoryview], Any]]] = {
    **dict.fromkeys((type(None), bool, type(...), *_NAMED), (b"k", _constant, _read_constant)),
    int: (
        b"i",
        lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
    float: (b"f", _FLOAT.pack, lambda data: _FLOAT.unpack(data)[0]),
    complex: (b"c", lambda value: _COMPLEX.pack(value.real, value.imag), lambda data: complex(*_COMPLEX.unpack(data))),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass"), lambda data: str(data, "utf-8", "surrogatepass")),
    bytes: (b"b", bytes, bytes),
    bytearray: (b"y", bytes, bytearray),
    torch.device: (b"v", _constant, lambda data: torch.device(str(data, "ascii"))),
}
_ATOM_READERS = {tag: read for tag, _, read in _ATOMS.values()}

#: For values with parts: (tag, function that returns the parts, function that builds the value).
_COMPOUNDS: dict[type, tuple[bytes, Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    tuple: (b"t", tuple, tuple),
    list: (b"l", list, list),
    torch.Size: (b"S", tuple, torch.Size),
    dict: (b"m", lambda value: [part for pair in value.items() for part in pair], _paired),
    set: (b"e", list, set),
    frozenset: (b"z", list, frozenset),
    slice: (b":", lambda value: (value.start, value.stop, value.step), lambda parts: slice(*parts)),
    range: (b"r", lambda value: (value.start, value.stop, value.step), lambda parts: range(*parts)),
}
_COMPOUND_READERS = {tag: make for tag, _, make in _COMPOUNDS.values()}
_IMMUTABLE = {*_ATOMS, slice, range, torch.Size} - {bytearray}

_NODES: tuple[Any, ...] = (tuple, list, dict, namedtuple, OrderedDict, defaultdict, deque, Opened)
_BUILT_IN = (*_ATOMS, *_COMPOUNDS)


class UnsentTypeError(ExecutionError):
    """A value has a type that cannot be sent between ranks."""


class _Own(NamedTuple):
    """The functions that split values of one type into parts and rebuild the values (see ``know_own``)."""

    name: str
    take: Callable[[Any], Iterable[Any]]
    make: Callable[..., Any]
    immutable: bool


class Encoding:
    """Encodes plain values as bytes, and decodes them.

    ``types`` are the classes of enums and pytree nodes to register by name, in addition to built-in types. Both ends
    must register the same types: pipesched's own types, and the types that occur when each rank captures the model.
    """

    def __init__(self, types: Iterable[Any] = ()) -> None:
        self._types: dict[str, Any] = {}
        self._own: dict[type, _Own] = {}
        self._remembered: dict[Any, bytes] = {}
        self._learning = False
        self.know(*_NODES, *_BUILT_IN, *types)

    def know(self, *types: Any) -> None:
        """Register types, so that values of these types can be decoded."""
        self._types.update((_name(kind), kind) for kind in types)

    def know_own(
        self, kind: type, take: Callable[[Any], Iterable[Any]], make: Callable[..., Any], *, immutable: bool = False
    ) -> None:
        """Register a type. ``take`` splits a value of this type into parts, and ``make(*parts)`` rebuilds the value."""
        self.know(kind)
        self._own[kind] = _Own(_name(kind), take, make, immutable)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A context that registers the types of all values that are encoded within the context."""
        self._learning = True
        try:
            yield
        finally:
            self._learning = False

    def is_immutable(self, value: Any) -> bool:
        """Return whether a value is known to be immutable, so that the same object may be used several times."""
        own = self._own.get(type(value))
        return type(value) in _IMMUTABLE or isinstance(value, Enum) or (own is not None and own.immutable)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def written(self, value: Any) -> bytes:
        """Encode a value as bytes. Raises UnsentTypeError for a type that cannot be sent."""
        out = bytearray()
        self._write(value, out)
        return bytes(out)

    def _write(self, value: Any, out: bytearray) -> None:
        kind = type(value)
        if atom := _ATOMS.get(kind):
            data = atom[1](value)
            out += _HEAD.pack(atom[0], len(data))
            out += data
        elif compound := _COMPOUNDS.get(kind):
            self._write_parts(compound[0], compound[1](value), out)
        elif own := self._own.get(kind):
            if not own.immutable:
                self._write_parts(b"o", (own.name, *own.take(value)), out)
                return
            if value not in self._remembered:
                if len(self._remembered) >= _MOST_REMEMBERED:
                    self._remembered.clear()
                part = bytearray()
                self._write_parts(b"o", (own.name, *own.take(value)), part)
                self._remembered[value] = bytes(part)
            out += self._remembered[value]
        else:
            self._write_rare(value, kind, out)

    def _write_rare(self, value: Any, kind: type, out: bytearray) -> None:
        if isinstance(value, Enum):
            member = value.name if value.name in kind.__members__ else value.value  # type: ignore[attr-defined]
            self._write_parts(b"E", (self._named(kind), member), out)
        elif isinstance(value, pytree.TreeSpec):
            inner = () if value.is_leaf() else (self._named(value.type), value.context, *children_of(value))
            self._write_parts(b"p", inner, out)
        elif isinstance(value, type):
            self._write_parts(b"T", (self._named(value),), out)
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS_OF_NUMPY:
            shape = value.shape if isinstance(value, np.ndarray) else None
            self._write_parts(b"a", (value.dtype.str, shape, value.tobytes()), out)
        else:
            parts, spec = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
            if spec.is_leaf():
                raise UnsentTypeError(
                    f"only tensors, numbers, text, bytes, None, containers, enums, dataclasses and registered pytree "
                    f"nodes can be sent between ranks; got {_name(kind)}; pass its parts in a tuple or dict, register "
                    f"the type with torch.utils._pytree.register_pytree_node, or move the stage boundary to keep the "
                    f"value on one rank"
                )
            self._write_parts(b"n", (spec, *parts), out)

    def _write_parts(self, tag: bytes, parts: Any, out: bytearray) -> None:
        out += _HEAD.pack(tag, len(parts))
        for part in parts:
            self._write(part, out)

    def _named(self, kind: Any) -> str:
        name = _name(kind)
        if self._types.get(name) is not kind:
            if not self._learning:
                raise UnsentTypeError(
                    f"ranks can only send types that occurred when the model was captured; {name} did not occur with "
                    f"the sample; construct the pipeline with a sample that produces this type, or pass only tensors "
                    f"and built-in types"
                )
            self._types[name] = kind
        return name

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, data: bytes) -> Any:
        """Decode a value from the bytes that ``written`` returned. Raises ExecutionError for invalid bytes."""
        try:
            value, end = self._read(memoryview(data), 0)
            if end != len(data):
                raise ValueError(f"{len(data) - end} bytes are left over")  # noqa: TRY301
        except Exception as error:  # pytree nodes may raise any type
            raise ExecutionError(
                f"a message must contain values encoded by pipesched; {len(data)} bytes could not be decoded "
                f"({type(error).__name__}: {error}); run the same versions and the same model on every rank"
            ) from None
        return value

    def _read(self, data: memoryview, at: int) -> tuple[Any, int]:
        tag, count = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if count > len(data) - at:  # every part has at least one byte
            raise ValueError(f"{count} parts cannot fit into {len(data) - at} bytes")
        if atom := _ATOM_READERS.get(tag):
            return atom(data[at : at + count]), at + count
        parts = []
        for _ in range(count):
            part, at = self._read(data, at)
            parts.append(part)
        compound = _COMPOUND_READERS.get(tag)
        return (compound(parts) if compound else self._made(tag, parts)), at

    def _made(self, tag: bytes, parts: list[Any]) -> Any:
        if tag == b"n":
            return pytree.tree_unflatten(parts[1:], parts[0])
        if tag == b"p":
            return self._spec(*parts) if parts else pytree.tree_structure(0)
        if tag == b"a":
            dtype, shape, data = parts
            if np.dtype(dtype).kind not in _NUMBERS_OF_NUMPY:
                raise ValueError(f"an array must hold numbers, not {dtype}")
            array = np.frombuffer(data, dtype).copy()
            return array[0] if shape is None else array.reshape(shape)
        name, *rest = parts
        kind = self._types[name]
        if tag == b"T":
            return kind
        if tag == b"E" and issubclass(kind, Enum):
            return kind[rest[0]] if rest[0] in kind.__members__ else kind(rest[0])
        if tag == b"o":
            return self._own[kind].make(*rest)
        raise ValueError(f"a value of type {name} cannot have the tag {tag!r}")

    def _spec(self, name: str, context: Any, *children: Any) -> pytree.TreeSpec:
        kind = self._types[name]
        if kind is namedtuple and not (issubclass(context, tuple) and hasattr(context, "_fields")):
            raise ValueError(f"{context} is not a named tuple")
        return pytree.TreeSpec(kind, context, list(children))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
