"""Message layout: what a value on a wire looks like, apart from the bytes of its tensors.

A value is a Payload (forward), Gradients (backward), a tensor, or a plain value. Its form is small, compares fast, and
says how the tensors' bytes are laid into one message, and how the value is put together again on the other side:
with the strides it had, since results depend on them, and sharing memory where its tensors did.
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

_ALIGNMENT = 64  # bytes; as torch's own allocator: kernels may add in another order at another alignment
_STORAGE_ALIGNMENT = 16  # bytes; the largest element
_LONG = 1 << 14  # bytes; shorter ones are copied sooner than looked at
_GRADIENTS = "gradients"
_SINGLE = "single"

_Sizes = tuple[int, ...]
#: What a form is compared by: (skeleton, leaves, plain values, shared memory).
Description = tuple[Any, ...]


class _Piece(NamedTuple):
    """A run of bytes in a message: the elements of one tensor, or the memory that several share.

    leaf: which one it is read from. shape, stride: of the bytes in the message. source: the shape and strides by which
    the leaf's elements are read, None for its own; bytes: the memory's first byte instead, None where not shared.
    """

    offset: int
    nbytes: int
    leaf: int
    dtype: torch.dtype
    shape: _Sizes
    stride: _Sizes
    source: tuple[_Sizes, _Sizes] | None = None
    first_byte: int | None = None


class _Restored(NamedTuple):
    """How a tensor comes out of its piece. offset: in elements. gapped: it is copied into memory with gaps."""

    piece: int
    dtype: torch.dtype
    shape: _Sizes
    stride: _Sizes
    offset: int = 0
    gapped: bool = False


def describe(value: Any, encoding: Encoding) -> tuple[Description, tuple[Any, ...]]:
    """What a value looks like, and its leaves. Raises ExecutionError for tensors that are not plain and strided, and
    for values of types that do not travel.
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
    """A leaf; what a functional collective, as of DTensors inside a stage, still has under way once it is there."""
    if type(leaf) is Tensor or not isinstance(leaf, Tensor):
        return leaf
    wait = getattr(leaf, "wait", None)
    return leaf if wait is None else wait()


def _check(tensor: Tensor) -> None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        raise ExecutionError(
            f"plain, strided tensors travel between ranks; got a {type(tensor).__name__} of layout {tensor.layout}; "
            f"turn it into one (to_dense, full_tensor), or move the boundary so that it stays on one rank"
        )


def _shared(leaves: tuple[Any, ...]) -> tuple[tuple[int, int] | None, ...] | None:
    """For each leaf that shares memory with another one (the number of the memory, the first byte); None: no leaf."""
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
    """The address of a tensor's memory; 0 for what has none, or is read as something else than what lies there."""
    if not isinstance(leaf, Tensor) or not leaf.numel() or leaf.is_conj() or leaf.is_neg():
        return 0
    return leaf.untyped_storage().data_ptr()


@dataclass(frozen=True)
class MessageLayout:
    """The form of a value: written once, known to both sides from then on. encoding: of its plain values."""

    description: Description
    encoding: Encoding = field(repr=False, compare=False)

    @cached_property
    def _layout(self) -> tuple[list[_Piece], list[_Restored | None], int]:
        return _laid_out(self.description)

    @cached_property
    def spare(self) -> "list[Packed]":
        """Messages of this form that are not on their way."""
        return []

    def written(self) -> bytes:
        """The form as bytes."""
        return self.encoding.written(self.description)

    @classmethod
    def read(cls, written: bytes, encoding: Encoding) -> "MessageLayout":
        """The inverse of ``written``. Raises ExecutionError for bytes that are no form."""
        form = cls(encoding.read(written), encoding)
        try:
            skeleton, looks, _, _ = form.description
            counts = form._layout[2] >= 0 and (isinstance(skeleton, str) or len(skeleton[2]) == len(looks))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError):
            counts = False
        if not counts:
            raise ExecutionError(
                f"a message is announced by its form; these {len(written)} bytes hold something else; run the same "
                f"versions and the same model on every rank"
            )
        return form

    @cached_property
    def nbytes(self) -> int:
        """How many bytes the tensors take in a message."""
        return self._layout[2]

    @property
    def pieces(self) -> list[_Piece]:
        """The bytes of a message."""
        return self._layout[0]

    def plain_bytes(self, value: Any) -> Any:
        """The bytes of a value of this form where they lie, as numpy shows them, where that is plain to see: of one
        contiguous tensor. None: ``describe`` finds out what it is.
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
        except (RuntimeError, TypeError):  # none that a form has: sparse, conjugated, of a device
            pass
        return None

    @cached_property
    def _plain(self) -> tuple[Any, Any] | None:
        skeleton, looks, _, _ = self.description
        if len(looks) != 1 or looks[0] is None or skeleton == _SINGLE:
            return None
        dtype, shape, stride = looks[0]
        try:
            torch.empty(0, dtype=dtype).numpy()
        except TypeError:  # numpy does not know the type
            return None
        return (skeleton, looks[0]) if stride == torch.empty(shape, device="meta").stride() else None

    def in_place(self, leaves: tuple[Any, ...]) -> Tensor | None:
        """The bytes of a message where they lie: those of a value's only tensor, if it is long and fills its memory."""
        piece = self._only
        if piece is None:
            return None
        leaf: Tensor = leaves[piece.leaf]
        if leaf.device.type != "cpu" or leaf.is_conj() or leaf.is_neg():
            return None
        start = leaf.storage_offset() * leaf.element_size()
        return torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage(), start, (piece.nbytes,), (1,))

    @cached_property
    def _only(self) -> _Piece | None:
        pieces, _, nbytes = self._layout
        plain = len(pieces) == 1 and pieces[0].source is None and pieces[0].first_byte is None
        return pieces[0] if plain and self.lies_as_sent and nbytes >= _LONG else None

    @cached_property
    def lies_as_sent(self) -> bool:
        """Whether a value's tensors lie in the message as they are: it may be restored before the bytes are there."""
        return not any(one is not None and one.gapped for one in self._layout[1])

    def restore(self, message: Tensor, start: int) -> Any:
        """The value whose bytes lie in a message from ``start`` on. Its tensors keep the message's memory alive."""
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
        """The leaves that are no tensors: the same objects each time only where they never change."""
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


def _tensor(one: _Restored, piece: _Piece, memory: Any, device: torch.device) -> Tensor:
    if not one.gapped:
        return torch.empty(0, dtype=one.dtype, device=device).set_(memory, one.offset, one.shape, one.stride)
    compact = torch.empty(0, dtype=one.dtype, device=device).set_(memory, 0, piece.shape, piece.stride)
    tensor = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
    tensor.as_strided(piece.shape, one.stride).copy_(compact)
    return tensor


class Packed:
    """A message's memory: ``header`` bytes, on a CPU alone, then those of a form's tensors. data: all of them."""

    def __init__(self, form: MessageLayout | None, header: int, device: torch.device | None = None) -> None:
        pieces = form.pieces if form else []
        nbytes = header + (form.nbytes if form else 0)
        with torch.inference_mode(False):  # it serves steps with and without
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
        """Copy the tensors of a value of this form; onto a device without waiting for it, in its stream's order."""
        ahead = self.tensor.is_cuda
        for view, piece in zip(self._views, self._pieces, strict=True):
            view.copy_(_source(piece, leaves[piece.leaf]), non_blocking=ahead)


def _source(piece: _Piece, leaf: Tensor) -> Tensor:
    if piece.first_byte is not None:
        whole = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        return whole.set_(leaf.untyped_storage(), piece.first_byte, piece.shape, piece.stride)
    return leaf if piece.source is None else leaf.as_strided(*piece.source)


# ---- layout -------------------------------------------------------------------------------------------------------


def _laid_out(description: Description) -> tuple[list[_Piece], list[_Restored | None], int]:
    _, looks, _, shared = description
    pieces: list[_Piece] = []
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


def _own_piece(leaf: int, dtype: torch.dtype, shape: _Sizes, stride: _Sizes, offset: int) -> tuple[_Piece, bool]:
    """The bytes of a tensor that shares no memory, and whether they go into memory with gaps."""
    if 0 in shape:
        return _Piece(offset, 0, leaf, dtype, shape, stride), False
    once = tuple(1 if not step else size for size, step in zip(shape, stride, strict=True))  # expanded: sent once
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
        return _Piece(offset, extent * dtype.itemsize, leaf, dtype, once, stride, source), False
    if not apart:  # several elements in one place: all the memory between the first and the last is sent
        span = (extent,), (1,)
        return _Piece(offset, extent * dtype.itemsize, leaf, dtype, *span, span), False
    compact = torch.empty(once, device="meta").stride()
    return _Piece(offset, _product(once) * dtype.itemsize, leaf, dtype, once, compact, source), True


def _shared_piece(leaf: int, number: int, looks: Any, shared: Any, offset: int) -> _Piece:
    """The memory between the first and the last byte that any leaf of it reaches."""
    ends = [
        (first, first + _reach(shape, stride) * dtype.itemsize)
        for (dtype, shape, stride), (memory, first) in (
            (look, group) for look, group in zip(looks, shared, strict=True) if look is not None and group is not None
        )
        if memory == number
    ]
    low = min(first for first, _ in ends) // _STORAGE_ALIGNMENT * _STORAGE_ALIGNMENT
    size = max(last for _, last in ends) - low
    return _Piece(offset, size, leaf, torch.uint8, (size,), (1,), first_byte=low)


def _reach(shape: _Sizes, stride: _Sizes) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _product(sizes: _Sizes) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
