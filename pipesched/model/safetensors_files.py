"""Safetensors files: reads tensors by name, one at a time, from safetensors files.

The safetensors library maps a file into memory, and checks that the header fits the file. Each read opens the file and
closes it again. Memory therefore holds the mapped pages of at most one tensor at a time, in addition to the tensors
that were read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.checks import shown
from pipesched.errors import InputError, ScheduleError
from pipesched.json_files import parse_json

__all__ = ["WeightFiles"]


_LONGEST_NAME = 255  # bytes; the limit of common file systems


class _TensorInFile(NamedTuple):
    """A tensor's file, dtype and shape."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFiles(Mapping[str, Tensor]):
    """A mapping from names to the tensors in safetensors files. A tensor is read when it is accessed.

    Args:
        paths: a file, several files, an index (``*.safetensors.index.json``), or a folder with an index or files.

    Raises:
        InputError: a file is missing or corrupt, or two files contain the same name.

    """

    def __init__(self, paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> None:
        several = [paths] if isinstance(paths, str | PathLike) else paths
        self._entries: dict[str, _TensorInFile] = {}
        for path in dict.fromkeys(file for given in several for file in _files(Path(fspath(given)))):
            for name, entry in _entries(path):
                if name in self._entries:
                    raise InputError(
                        f"a weight must be in one file only; {name!r} is in {self._entries[name].path} and in {path}; "
                        f"pass only the files of one model"
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
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_into(name, tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading the tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype, without reading the tensor."""
        return self._entries[name].dtype

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor, part: Callable[[Tensor], Tensor] | None = None) -> None:
        """Copy the stored tensor of this name into ``tensor``, converting the dtype. The shapes must be the same.

        ``part`` returns the part to copy of the stored tensor. Default: None (all of it).
        """
        _read(name, tensor, self._entries[name].path, part)


def _files(path: Path) -> list[Path]:
    """Return the safetensors files at a path: the file itself, or the files in a folder or an index."""
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise InputError(
            f"the path of a safetensors file must be readable; reading {path} failed ({error.strerror}); check the path"
        ) from error
    if is_folder:
        found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        indices = [file for file in found if file.suffix == ".json"]
        if not found or len(indices) > 1:
            raise InputError(
                f"a folder of weights must contain exactly one index, or *.safetensors files; {path} contains "
                f"{', '.join(file.name for file in indices) or 'neither'}; pass the paths of the files to load"
            )
        return _files(indices[0]) if indices else found
    if not path.is_file():
        raise InputError(f"the path of a safetensors file must exist; {path} does not exist; check the path")
    if path.suffix == ".json":
        names = _named_files(path)
        for name in names:
            if name.is_absolute() or ".." in name.parts:
                raise InputError(
                    f"an index must name safetensors files in its own folder; {path} names {str(name)!r}; move that "
                    f"file into the folder, or pass the paths of the safetensors files"
                )
        return sorted(path.parent / name for name in names)
    return [path]


def _named_files(path: Path) -> set[Path]:
    """Return the files that an index names. Raises InputError if the file is not an index."""
    try:
        index = parse_json(path.read_bytes())
    except ScheduleError as error:
        raise InputError(
            f"an index of safetensors files must have a weight_map; reading {path} failed ({error}); pass the paths of "
            f"the safetensors files"
        ) from None
    weights = index.get("weight_map") if isinstance(index, dict) else None
    names: list[Any] = list(weights.values()) if isinstance(weights, dict) else [None]
    if not all(isinstance(name, str) and len(name.encode()) <= _LONGEST_NAME for name in names):
        raise InputError(
            f"an index of safetensors files must have a weight_map from names to files; the weight_map of {path} is "
            f"{shown(weights)}; pass the paths of the safetensors files"
        )
    return {Path(name) for name in names}


def _entries(path: Path) -> Iterator[tuple[str, _TensorInFile]]:
    if not path.is_file():
        raise InputError(
            f"every safetensors file that an index names must be in the folder of the index; {path} does not exist; "
            f"download this file"
        )
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  file is not a mapping
            tensor = file.get_tensor(name)  # mapped, not read
            yield name, _TensorInFile(path, tensor.dtype, tuple(tensor.shape))


def _read(name: str, into: Tensor, path: Path, part: Callable[[Tensor], Tensor] | None) -> None:
    with _opened(path) as file:
        stored = file.get_tensor(name)
        into.copy_(stored if part is None else part(stored))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError(
            f"reading {path} requires the safetensors library, which is not installed; run pip install "
            f"'pipesched[safetensors]', or pass a state_dict"
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # an error of safetensors, or torch's error for an unknown dtype
        raise InputError(
            f"a safetensors file must begin with a header that describes its tensors; the header of {path} "
            f"({path.stat().st_size} bytes) cannot be read ({error!r}); download the file again, or convert it"
        ) from None
