"""Weight files: tensors in safetensors files, read by name, and only when they are asked for.

The format (github.com/huggingface/safetensors): the header's length in 8 bytes, the header in JSON: of each name the
type, the shape, and where its bytes lie behind the header. They are read piece by piece into the memory where they are
wanted, which a mapped file would hold twice.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.errors import InputError

__all__ = ["WeightFiles"]

_PIECE = 1 << 22  # bytes read at once
_HEADER_LIMIT = 100_000_000  # bytes, as the format says
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _Entry(NamedTuple):
    """Where a tensor lies."""

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of safetensors files by name; each is read when it is asked for.

    paths: a file, several, an index (``*.safetensors.index.json``), or a folder with an index or with files.
    Raises InputError for files that are missing, broken, or hold a name twice.
    """

    def __init__(self, paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> None:
        several = [paths] if isinstance(paths, str | PathLike) else paths
        self._entries: dict[str, _Entry] = {}
        for path in dict.fromkeys(file for given in several for file in _files(Path(fspath(given)))):
            for name, entry in _entries(path):
                if name in self._entries:
                    raise InputError(
                        f"each weight lies in one file; {name!r} is in {self._entries[name].path} and in {path}; "
                        f"name the files that belong together"
                    )
                self._entries[name] = entry

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, unread."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type, unread."""
        return self._entries[name].dtype

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of the files into one of its shape, cast to that one's type. 4 MiB are held meanwhile."""
        entry = self._entries[name]
        size = entry.dtype.itemsize
        staging = bytearray(min(_PIECE, max(1, tensor.numel()) * size))
        values = torch.frombuffer(staging, dtype=entry.dtype)
        flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype).view(-1)
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.begin)
            for start in range(0, len(flat), len(values)):
                piece = flat[start : start + len(values)]
                _read(file, memoryview(staging)[: len(piece) * size], entry.path)
                piece.copy_(values[: len(piece)])
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def _read(file: Any, into: memoryview, path: Path) -> None:
    while into:
        count = file.readinto(into)
        if not count:
            raise InputError(f"a safetensors file is as long as its header says; {path} ends before; fetch it again")
        into = into[count:]


def _files(path: Path) -> list[Path]:
    """The files that a path stands for."""
    if path.is_dir():
        found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        indices = [file for file in found if file.suffix == ".json"]
        if not found or len(indices) > 1:
            raise InputError(
                f"a folder of weights holds one index or *.safetensors files; {path} holds "
                f"{', '.join(file.name for file in indices) or 'none'}; name the files"
            )
        return _files(indices[0]) if indices else found
    if not path.is_file():
        raise InputError(f"weights are read from safetensors files; there is no {path}; check the path")
    if path.suffix == ".json":
        try:
            return sorted({path.parent / name for name in json.loads(path.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"an index of safetensors files has a weight_map of names to files; {path} has none ({error!r}); name "
                f"the files themselves"
            ) from None
    return [path]


def _entries(path: Path) -> Iterator[tuple[str, _Entry]]:
    if not path.is_file():
        raise InputError(f"an index names safetensors files beside it; there is no {path}; fetch it")
    end = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(end, _HEADER_LIMIT) else b""
    try:
        header = json.loads(text)
        for name, told in header.items():
            if name != "__metadata__":
                begin, stop = told["data_offsets"]
                entry = _Entry(path, 8 + length + begin, _DTYPES[told["dtype"]], tuple(told["shape"]))
                if stop - begin != math.prod(entry.shape) * entry.dtype.itemsize or 8 + length + stop > end:
                    raise ValueError(f"{name} does not fit")  # noqa: TRY301
                yield name, entry
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"a safetensors file begins with a header of its tensors; {path} of {end} bytes does not ({error!r}); "
            f"fetch it again, or convert it"
        ) from None
