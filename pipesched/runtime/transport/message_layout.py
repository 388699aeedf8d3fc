"""Message layout: describes a value that is sent between ranks, but not the contents of its tensors.

A value is a Payload (forward), a tuple of gradients (backward), a tensor, or a plain value. A layout is
small and fast to compare. It defines how the tensors' bytes are arranged in one message and how the receiver rebuilds
the value. Strides are kept, because results depend on them. Tensors that share memory also share memory after they are
received.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.runtime.transport.encoding import Encoding
from pipesched.tensors.payload import Payload

__all__ = ["MessageLayout", "Packed", "describe"]

_ALIGNMENT = 64  # bytes, as in torch's allocator; with a different alignment, kernels may add in a different order
_STORAGE_ALIGNMENT = 16  # bytes; the size of the largest element
_LONG = 1 << 14  # bytes; a shorter tensor is copied in less time than in_place() takes
_GRADIENTS = "gradients"
_SINGLE = "single"

_Sizes = tuple[int, ...]
#: The comparable part of a layout: (structure of the value, (dtype, shape, stride) of each tensor leaf, encoded plain
#: leaves, memory that leaves share).
Description = tuple[Any, ...]


class _ByteRange(NamedTuple):
    """A range of bytes in a message: the elements of one tensor, or memory that several tensors share."""

    offset: int
    nbytes: int
    #: The number of the leaf from which the bytes are read.
    leaf: int
    dtype: torch.dtype
    #: Shape and stride of the elements in the message.
    shape: _Sizes
    stride: _Sizes
    #: The shape and the strides with which the leaf is read. Default: the leaf's own shape and strides.
    source: tuple[_Sizes, _Sizes] | None = None
    #: For memory that several tensors share, the offset of its first byte in the leaf's storage; otherwise None.
    first_byte: int | None = None


class _Restored(NamedTuple):
    """Describes how a received tensor is rebuilt from the `_ByteRange` of the message that contains it."""

    #: The number of the piece.
    piece: int
    dtype: torch.dtype
    shape: _Sizes
    stride: _Sizes
    #: The position of the tensor's first element in the piece, in elements.
    offset: int = 0
    #: Whether the received elements are copied to new memory, because the tensor has gaps between its elements.
    gapped: bool = False


def describe(value: Any, encoding: Encoding) -> tuple[Description, tuple[Any, ...]]:
    """Return the description of a value, and the value's leaves.

    Raises ExecutionError for tensors that are not plain and strided, and for values of types that cannot be sent.
    """
    skeleton, leaves = _taken_apart(value)
    looks: list[Any] = []
    plain: list[Any] = []
    num_tensors = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _check(leaf)
            num_tensors += 1
            looks.append((leaf.dtype, leaf.shape, leaf.stride()))
        else:
            looks.append(None)
            plain.append(leaf)
    encoded = encoding.written(plain) if any(leaf is not None for leaf in plain) else None
    shared = _shared(leaves) if num_tensors > 1 else None
    return (skeleton, tuple(looks), encoded, shared), leaves


def _taken_apart(value: Any) -> tuple[Any, tuple[Any, ...]]:
    if type(value) is Payload:
        return (value.spec, value.places, value.needs_grad), tuple(map(_arrived, value.leaves))
    if type(value) is tuple and all(leaf is None or isinstance(leaf, Tensor) for leaf in value):
        return _GRADIENTS, tuple(map(_arrived, value))
    return _SINGLE, (value,)


def _arrived(leaf: Any) -> Any:
    """Return a leaf. If it is the asynchronous result of a functional collective, wait for it first."""
    if type(leaf) is Tensor or not isinstance(leaf, Tensor):
        return leaf
    wait = getattr(leaf, "wait", None)
    return leaf if wait is None else wait()


def _check(tensor: Tensor) -> None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        raise ExecutionError(
            f"only plain, strided tensors can be sent between ranks; got a {type(tensor).__name__} of layout "
            f"{tensor.layout}; convert the tensor (to_dense, full_tensor), or move the stage boundary so that the "
            f"tensor stays on one rank"
        )


def _shared(leaves: tuple[Any, ...]) -> tuple[tuple[int, int] | None, ...] | None:
    """Return which leaves share memory; None if no two leaves share memory.

    The result has one entry per leaf: None for a leaf that shares no memory, otherwise a pair (index of the shared
    memory, offset in bytes of the leaf's first element in this memory).
    """
    addresses = [_memory(leaf) for leaf in leaves]
    counts = Counter(address for address in addresses if address)
    if len(counts) == sum(counts.values()):
        return None
    numbers = {address: number for number, address in enumerate(counts)}
    return tuple(
        (numbers[address], leaf.storage_offset() * leaf.element_size()) if counts[address] > 1 else None
        for leaf, address in zip(leaves, addresses, strict=True)
    )


def _memory(leaf: Any) -> int:
    """Return the address of a tensor's memory; 0 for other values, empty tensors, and conjugated or negated views."""
    if not isinstance(leaf, Tensor) or not leaf.numel() or leaf.is_conj() or leaf.is_neg():
        return 0
    return leaf.untyped_storage().data_ptr()


@dataclass(frozen=True)
class MessageLayout:
    """The layout of a value, sent once and then stored at both ends. ``encoding`` encodes the plain values."""

    description: Description
    encoding: Encoding = field(repr=False, compare=False)

    @cached_property
    def _layout(self) -> tuple[list[_ByteRange], list[_Restored | None], int]:
        return _laid_out(self.description)

    @cached_property
    def spare(self) -> "list[Packed]":
        """Message buffers of this layout that are not in use."""
        return []

    def written(self) -> bytes:
        """Return the layout as bytes."""
        return self.encoding.written(self.description)

    @classmethod
    def read(cls, written: bytes, encoding: Encoding) -> "MessageLayout":
        """Decode a layout from its bytes. Raises ExecutionError for bytes that are not a layout."""
        layout = cls(encoding.read(written), encoding)
        try:
            skeleton, looks, _, _ = layout.description
            is_valid = layout._layout[2] >= 0 and (isinstance(skeleton, str) or len(skeleton[2]) == len(looks))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError):
            is_valid = False
        if not is_valid:
            raise ExecutionError(
                f"a message must be preceded by a description of its layout; the {len(written)} bytes received are not "
                f"a valid description; run the same versions of pipesched and torch, and the same model, on every rank"
            )
        return layout

    @cached_property
    def nbytes(self) -> int:
        """The size of the tensors in a message, in bytes."""
        return self._layout[2]

    @property
    def pieces(self) -> list[_ByteRange]:
        """The ranges of bytes that make up a message, in order."""
        return self._layout[0]

    def plain_bytes(self, value: Any) -> Any:
        """Return the only tensor of a value with this layout, as a numpy array that shares the tensor's memory.

        Returns None if this layout is not the layout of one contiguous CPU tensor, or if the value has another layout.
        The caller must then use ``describe``.
        """
        if self._plain is None:
            return None
        skeleton, (dtype, shape, stride) = self._plain
        if type(value) is Payload:
            if (value.spec, value.places, value.needs_grad) != skeleton:
                return None
            leaf = value.leaves[0]
        elif type(value) is tuple and len(value) == 1 and skeleton == _GRADIENTS:
            leaf = value[0]
        else:
            return None
        try:
            if type(leaf) is Tensor and leaf.dtype is dtype and leaf.shape == shape and leaf.stride() == stride:
                return leaf.numpy()
        except (RuntimeError, TypeError):  # not an ordinary CPU tensor: sparse, conjugated, or on a device
            pass
        return None

    def empty_plain(self) -> tuple[Any, Tensor] | None:
        """Return a value of this layout that contains an uninitialized tensor, and this tensor.

        Returns None if this layout is not the layout of one contiguous CPU tensor with elements.
        """
        if self._plain is None or not self.nbytes:
            return None
        skeleton, (dtype, shape, _) = self._plain
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if skeleton == _GRADIENTS:
            return (tensor,), tensor
        spec, places, needs_grad = skeleton
        return Payload((tensor,), places, spec, needs_grad), tensor

    @cached_property
    def _plain(self) -> tuple[Any, Any] | None:
        skeleton, looks, _, _ = self.description
        if len(looks) != 1 or looks[0] is None or skeleton == _SINGLE:
            return None
        dtype, shape, stride = looks[0]
        try:
            torch.empty(0, dtype=dtype, device="cpu").numpy()
        except TypeError:  # not a numpy type
            return None
        return (skeleton, looks[0]) if stride == torch.empty(shape, device="meta").stride() else None

    def in_place(self, leaves: tuple[Any, ...]) -> Tensor | None:
        """Return a value's only tensor as a view of bytes if it is long, contiguous and on the CPU; otherwise None."""
        piece = self._only
        if piece is None:
            return None
        leaf: Tensor = leaves[piece.leaf]
        if leaf.device.type != "cpu" or leaf.is_conj() or leaf.is_neg():
            return None
        start = leaf.storage_offset() * leaf.element_size()
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
            leaf.untyped_storage(), start, (piece.nbytes,), (1,)
        )

    @cached_property
    def _only(self) -> _ByteRange | None:
        pieces, _, nbytes = self._layout
        plain = len(pieces) == 1 and pieces[0].source is None and pieces[0].first_byte is None
        return pieces[0] if plain and self.lies_as_sent and nbytes >= _LONG else None

    @cached_property
    def lies_as_sent(self) -> bool:
        """Whether every received tensor is a view of the message buffer.

        If so, the value can be built before the message's bytes arrive.
        """
        return not any(one is not None and one.gapped for one in self._layout[1])

    def restore(self, message: Tensor, start: int) -> Any:
        """Rebuild the value from a message. ``start`` is the size of the header in bytes.

        Tensors that are views of the message keep the message's memory alive.
        """
        pieces, restored, _ = self._layout
        storage = message.untyped_storage()
        memory = [storage[start + piece.offset : start + piece.offset + piece.nbytes] for piece in pieces]
        skeleton = self.description[0]
        plain = iter(self._plain_leaves())
        leaves = tuple(
            next(plain) if one is None else _tensor(one, pieces[one.piece], memory[one.piece], message.device)
            for one in restored
        )
        if isinstance(skeleton, str):
            return leaves if skeleton == _GRADIENTS else leaves[0]
        spec, places, needs_grad = skeleton
        return Payload(leaves, places, spec, needs_grad)

    def _plain_leaves(self) -> list[Any]:
        """Return the leaves that are not tensors.

        If all these leaves are immutable, they are decoded once and shared by all calls. Otherwise each call decodes
        new objects.
        """
        if self._immutable_leaves is not None:
            return self._immutable_leaves
        encoded = self.description[2]
        leaves: list[Any] = self.encoding.read(encoded)
        return leaves

    @cached_property
    def _immutable_leaves(self) -> list[Any] | None:
        _, looks, encoded, _ = self.description
        leaves = [None] * looks.count(None) if encoded is None else self.encoding.read(encoded)
        return leaves if all(map(self.encoding.is_immutable, leaves)) else None


def _tensor(one: _Restored, piece: _ByteRange, memory: Any, device: torch.device) -> Tensor:
    if not one.gapped:
        return torch.empty(0, dtype=one.dtype, device=device).set_(memory, one.offset, one.shape, one.stride)
    compact = torch.empty(0, dtype=one.dtype, device=device).set_(memory, 0, piece.shape, piece.stride)
    tensor = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
    tensor.as_strided(piece.shape, one.stride).copy_(compact)
    return tensor


class Packed:
    """The buffer of a message, which contains a header and then the bytes of the tensors.

    ``header`` is the size of the header in bytes; it is 0 on a device. ``data`` is a view of the buffer as bytes, or an
    empty view if ``header`` is 0.
    """

    def __init__(self, layout: MessageLayout | None, header: int, device: torch.device | str = "cpu") -> None:
        pieces = layout.pieces if layout else []
        nbytes = header + (layout.nbytes if layout else 0)
        with torch.inference_mode(False):  # the memory is used by steps with and without inference mode
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
            storage = self.tensor.untyped_storage()
            self._views = [
                torch.empty(0, dtype=piece.dtype, device=device).set_(
                    storage[header + piece.offset : header + piece.offset + piece.nbytes], 0, piece.shape, piece.stride
                )
                for piece in pieces
            ]
        self._pieces = pieces
        self.data = self.tensor.numpy().data if header else memoryview(b"")

    def fill(self, leaves: tuple[Any, ...]) -> None:
        """Copy a value's tensors into the buffer. On a device, the copies run asynchronously on the current stream."""
        ahead = not self.tensor.is_cpu
        for view, piece in zip(self._views, self._pieces, strict=True):
            view.copy_(_source(piece, leaves[piece.leaf]), non_blocking=ahead)


def _source(piece: _ByteRange, leaf: Tensor) -> Tensor:
    if piece.first_byte is not None:
        whole = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        return whole.set_(leaf.untyped_storage(), piece.first_byte, piece.shape, piece.stride)
    return leaf if piece.source is None else leaf.as_strided(*piece.source)


# ---- layout -------------------------------------------------------------------------------------------------------


def _laid_out(description: Description) -> tuple[list[_ByteRange], list[_Restored | None], int]:
    _, looks, _, shared = description
    pieces: list[_ByteRange] = []
    restored: list[_Restored | None] = []
    of_memory: dict[int, int] = {}
    end = 0
    for leaf, look in enumerate(looks):
        if look is None:
            restored.append(None)
            continue
        dtype, shape, stride = look
        group = shared[leaf] if shared else None
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if group is None:
            piece, gapped = _own_piece(leaf, dtype, tuple(shape), stride, start)
            restored.append(_Restored(len(pieces), dtype, tuple(shape), stride, gapped=gapped))
        else:
            number, first = group
            known = number in of_memory
            piece = pieces[of_memory[number]] if known else _shared_piece(leaf, number, looks, shared, start)
            offset = (first - (piece.first_byte or 0)) // dtype.itemsize
            at = of_memory.setdefault(number, len(pieces))
            restored.append(_Restored(at, dtype, tuple(shape), stride, offset))
            if known:
                continue
        pieces.append(piece)
        end = piece.offset + piece.nbytes
    return pieces, restored, end


def _own_piece(leaf: int, dtype: torch.dtype, shape: _Sizes, stride: _Sizes, offset: int) -> tuple[_ByteRange, bool]:
    """Return the piece for a tensor that shares no memory, and whether its elements have gaps between them."""
    if 0 in shape:
        return _ByteRange(offset, 0, leaf, dtype, shape, stride), False
    # An expanded dim is sent once.
    once = tuple(1 if not step else size for size, step in zip(shape, stride, strict=True))
    source = None if once == shape else (once, stride)
    dims = sorted((step, size) for size, step in zip(once, stride, strict=True) if size > 1)
    extent = 1
    dense = True
    apart = True
    for step, size in dims:
        dense &= step == extent
        apart &= step >= extent
        extent += (size - 1) * step
    if dense:
        return _ByteRange(offset, extent * dtype.itemsize, leaf, dtype, once, stride, source), False
    if not apart:  # overlapping elements: send the whole range
        span = (extent,), (1,)
        return _ByteRange(offset, extent * dtype.itemsize, leaf, dtype, *span, span), False
    compact = torch.empty(once, device="meta").stride()
    return _ByteRange(offset, _product(once) * dtype.itemsize, leaf, dtype, once, compact, source), True


def _shared_piece(leaf: int, number: int, looks: Any, shared: Any, offset: int) -> _ByteRange:
    """Return the piece for memory that leaves share: all bytes from the first to the last that any leaf uses."""
    ends = [
        (first, first + _reach(shape, stride) * dtype.itemsize)
        for (dtype, shape, stride), (memory, first) in (
            (look, group) for look, group in zip(looks, shared, strict=True) if look is not None and group is not None
        )
        if memory == number
    ]
    low = min(first for first, _ in ends) // _STORAGE_ALIGNMENT * _STORAGE_ALIGNMENT
    size = max(last for _, last in ends) - low
    return _ByteRange(offset, size, leaf, torch.uint8, (size,), (1,), first_byte=low)


def _reach(shape: _Sizes, stride: _Sizes) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _product(sizes: _Sizes) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
