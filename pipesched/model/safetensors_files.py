"""Safetensors files: tensors in safetensors files, read by name, and only when they are asked for.

The library of that name reads them: it checks that a file's header fits the file. It maps a file into memory; a file is
opened anew for each tensor, so at most one tensor is in memory twice.
"""

from collections.abc import Iterator, Mapping, Sequence
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


_LONGEST_NAME = 255  # bytes; what file systems take


class _Entry(NamedTuple):
    """Where a tensor lies, and what it is."""

    path: Path
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
        """Copy a tensor of the files into one of its shape, cast to that one's type."""
        _read(name, tensor, self._entries[name].path)


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
        names = _named_files(path)
        for name in names:
            if name.is_absolute() or ".." in name.parts:
                raise InputError(
                    f"an index names safetensors files in its own folder; {path} names {str(name)!r}; move the file "
                    f"there, or name the files themselves"
                )
        return sorted(path.parent / name for name in names)
    return [path]


def _named_files(path: Path) -> set[Path]:
    """The files that an index names. Raises InputError where it is none."""
    try:
        index = parse_json(path.read_bytes())
    except ScheduleError as error:
        raise InputError(f"an index of safetensors files has a weight_map; {path}: {error}") from None
    weights = index.get("weight_map") if isinstance(index, dict) else None
    names: list[Any] = list(weights.values()) if isinstance(weights, dict) else [None]
    if not all(isinstance(name, str) and len(name.encode()) <= _LONGEST_NAME for name in names):
        raise InputError(
            f"an index of safetensors files has a weight_map of names to files; that of {path} is {shown(weights)}; "
            f"name the files themselves"
        )
    return {Path(name) for name in names}


def _entries(path: Path) -> Iterator[tuple[str, _Entry]]:
    if not path.is_file():
        raise InputError(f"an index names safetensors files beside it; there is no {path}; fetch it")
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            tensor = file.get_tensor(name)  # whose memory is not read
            yield name, _Entry(path, tensor.dtype, tuple(tensor.shape))


def _read(name: str, into: Tensor, path: Path) -> None:
    with _opened(path) as file:
        into.copy_(file.get_tensor(name))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError(
            f"safetensors files are read by the library safetensors; {path} needs it, and it is not installed; "
            f"pip install 'pipesched[safetensors]', or pass a state_dict"
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # the library's own, and what torch says of a type that it does not know
        raise InputError(
            f"a safetensors file begins with a header of its tensors; {path} of {path.stat().st_size} bytes does not "
            f"({error!r}); fetch it again, or convert it"
        ) from None
