"""Tensor files: writes and reads safetensors files, one tensor at a time.

This module does not use the safetensors library to write files, but that library can read the files. A single pass
over the tensors both writes and hashes them, copies at most one tensor at a time, and lets other threads run.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from struct import Struct, error
from typing import Any, Protocol

import torch
from torch import Tensor

from pipesched.checks import shown
from pipesched.errors import CheckpointError, DamagedCheckpointError
from pipesched.progress import advance
from pipesched.saving.chunks import Rows
from pipesched.saving.manifest import FileEntry, TensorEntry

__all__ = [
    "TensorFile",
    "bytes_of",
    "dtype_name",
    "dtype_of",
    "file_order",
    "from_bytes",
    "plain",
    "sharding_info",
    "write_tensors",
]

_LENGTH = Struct("<Q")
_ALIGNED = 8  # the length of a header in bytes is a multiple of this number
_LONGEST_HEADER = 1 << 32
_BLOCK = 1 << 26  # bytes that are written, hashed or read at a time; each block is a sign of progress
_FLUSHED = 1 << 28  # bytes between two flushes to the disk, so that no flush takes long
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_BYTES = "U8"  # the code for dtypes that safetensors lacks; the manifest has the real dtype and shape


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name. Raises CheckpointError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the installed torch must have the dtypes of a checkpoint; torch {torch.__version__} has no dtype "
            f"{name!r}; load the checkpoint with the version of torch that saved it"
        )
    return dtype


def plain(tensor: Tensor, place: str) -> Tensor:
    """Detach a tensor. Raises CheckpointError unless it is a dense torch.Tensor that is not on the meta device."""
    tensor = tensor.detach()
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    if type(tensor) is not Tensor or tensor.is_meta or not is_dense:
        how = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} of layout {tensor.layout}"
        raise CheckpointError(
            f"a checkpoint can hold only dense torch.Tensors that are not on the meta device; {place} is {how}; save "
            f"this tensor separately"
        )
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes in row-major order."""
    if not tensor.numel():
        return memoryview(b"")
    here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _memory(here)


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor from the bytes that ``bytes_of`` returned."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.numel():
        _memory(tensor)[:] = data
    return tensor


def _memory(tensor: Tensor) -> memoryview:
    """Return a writable view of the memory of a contiguous CPU tensor that is not empty."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers: Any = real.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class Wholes(Protocol):
    """Makes the whole tensors of blocks."""

    def shape(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the tensor to write under a key. ``tensor`` is it, or a block of it."""

    def get(self, key: str, tensor: Tensor) -> Tensor:
        """Return the tensor to write under a key."""


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the keys of tensors in their order in a file: large elements first, so that all tensors are aligned."""
    return sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    wholes: Wholes | None = None,
) -> FileEntry:
    """Write a safetensors file, flush it to the disk, and return its size and hash.

    Args:
        path: the file.
        tensors: dense tensors on any device, keyed by their names in the file.
        metadata: text for the file's header. Default: none.
        wholes: makes the whole tensors of those that are blocks. Default: None (none are).

    Raises:
        OSError: writing failed.

    """
    ordered = [(key, tensors[key]) for key in file_order(tensors)]
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, tensor in ordered:
        own_shape = tuple(tensor.shape) if wholes is None else wholes.shape(key, tensor)
        begin, end = end, end + math.prod(own_shape) * tensor.element_size()
        code = _CODES.get(tensor.dtype)
        shape = [end - begin] if code is None else list(own_shape)
        header[key] = {"dtype": code or _BYTES, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        unflushed = 0

        def put(data: bytes | memoryview) -> None:
            nonlocal unflushed
            view = memoryview(data)
            while view:
                block = view[:_BLOCK]
                block = block[: file.write(block)]
                digest.update(block)
                view = view[len(block) :]
                unflushed += len(block)
                if unflushed >= _FLUSHED:
                    os.fsync(file.fileno())
                    unflushed = 0
                advance()

        put(_LENGTH.pack(len(text)) + text)
        for key, tensor in ordered:
            put(bytes_of(tensor if wholes is None else wholes.get(key, tensor)))
        os.fsync(file.fileno())
    return FileEntry(_LENGTH.size + len(text) + end, digest.hexdigest())


def sharding_info(entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the metadata that torch's HuggingFaceStorageReader needs to join the chunks of several files.

    The metadata is empty if no tensor of the file is a chunk.
    """
    if not any(entry.chunks for entry in entries.values()):
        return {}
    offsets = {key: {"saved_offsets": next(entry.pieces())[0].offsets} for key, entry in entries.items()}
    return {"DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":"))}


class TensorFile:
    """Reads tensors of a safetensors file by key.

    Args:
        path: the file, whose hash has already been checked.

    Raises:
        DamagedCheckpointError: the file has no valid header.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                if length > _LONGEST_HEADER:
                    raise ValueError(f"a header of {length} bytes")  # noqa: TRY301
                self._start = _LENGTH.size + length
                self._header: dict[str, Any] = json.loads(file.read(length))
            self._size = path.stat().st_size
            if not isinstance(self._header, dict):
                raise TypeError("it is no JSON object")  # noqa: TRY301
        except (OSError, ValueError, TypeError, KeyError, RecursionError, error) as wrong:
            raise DamagedCheckpointError(
                f"a safetensors file must begin with a valid header; the header of {path} cannot be read ({wrong}); "
                f"load another checkpoint"
            ) from wrong

    def check(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Return the place in the file at which a tensor begins.

        Raises DamagedCheckpointError if the file has no tensor of this key, dtype and shape.
        """
        entry = self._header.get(key)
        offsets: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
        size = math.prod(shape) * dtype.itemsize
        is_pair = isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)
        code = _CODES.get(dtype)
        described = [_BYTES, [size]] if code is None else [code, list(shape)]
        is_same = isinstance(entry, dict) and [entry.get("dtype"), entry.get("shape")] == described
        is_inside = is_pair and offsets[0] >= 0 and self._start + offsets[1] <= self._size
        if is_same and is_inside and offsets[1] - offsets[0] == size:
            return int(self._start + offsets[0])
        raise DamagedCheckpointError(
            f"a checkpoint must hold every tensor that its manifest lists; {self._path} does not have tensor "
            f"{shown(key)}, {dtype_name(dtype)} of shape {list(shape)}, {size:,} bytes; load another checkpoint"
        )

    def read(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], rows: Rows | None = None) -> Tensor:
        """Read a tensor, or some of its rows, into CPU memory.

        Args:
            key: the tensor's name in the file.
            dtype: the tensor's dtype.
            shape: the tensor's shape.
            rows: the rows to read. Default: None (the whole tensor).

        Raises:
            DamagedCheckpointError: the file has no such tensor, or is truncated.

        """
        begin = self.check(key, dtype, shape)
        if rows is not None:
            begin += math.prod(shape[1:]) * dtype.itemsize * rows.start
            shape = (rows.end - rows.start, *shape[1:])
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if tensor.numel():
            view = _memory(tensor)
            with self._path.open("rb", buffering=0) as file:
                file.seek(begin)
                while view:
                    count = file.readinto(view[:_BLOCK])
                    advance()
                    if not count:
                        raise DamagedCheckpointError(
                            f"a checkpoint's files must not change while it is loaded; {self._path} is too short; load "
                            f"the checkpoint again, or load another checkpoint"
                        )
                    view = view[count:]
        return tensor
