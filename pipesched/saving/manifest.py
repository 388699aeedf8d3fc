"""Manifest: the file that makes a folder a checkpoint. It lists every file and every tensor, and has its own digest.

A checkpoint is a folder with ``manifest.json`` and one data folder. The data folder has two files for each process that
saved: its tensors (``part-00000.safetensors``) and its other values (``part-00000.json``). Nothing is pickled.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipesched.checks import shown
from pipesched.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError, PipeschedError
from pipesched.json_files import parse_json

__all__ = ["KINDS", "MANIFEST", "VERSION", "FileEntry", "Manifest", "TensorEntry", "dumped", "hash_of", "parsed"]

MANIFEST = "manifest.json"
VERSION = 1
#: The kinds of stored tensors.
KINDS = ("parameter", "buffer", "module state", "optimizer state", "scheduler state", "extra state")
_FORMAT = "pipesched checkpoint"
_DEEPEST = 128  # levels of nesting in the files of a checkpoint, which hold the user's own nested values
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """A file's size in bytes and its SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A stored tensor."""

    #: One of `KINDS`.
    kind: str
    #: The name of the parameter, buffer, module, scheduler or extra object that it belongs to.
    name: str
    #: The file of the data folder that holds it.
    file: str
    shape: tuple[int, ...]
    #: The dtype as torch names it, such as "float32".
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint."""

    pipesched: str
    torch: str
    #: The name of the data folder.
    data: str
    #: The number of steps of the run.
    step: int
    #: The seed of the run, in decimal digits.
    seed: str
    #: The settings that determine results, such as the number of micro-batches.
    settings: Mapping[str, Any]
    #: The plan of the run that saved, in the form of ``Plan.to_dict``.
    plan: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    def text(self) -> bytes:
        """The manifest as a file. Equal manifests have equal bytes."""
        values = {"format": _FORMAT, "version": VERSION, **asdict(self)}
        return dumped({**values, "digest": hashlib.sha256(dumped(values)).hexdigest()})

    @property
    def total_bytes(self) -> int:
        """The size of all data files."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def num_parts(self) -> int:
        """The number of processes that saved."""
        return sum(name.endswith(".json") for name in self.files)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint.

        Raises:
            MissingCheckpointError: the folder has no manifest.
            DamagedCheckpointError: the manifest is damaged.
            CheckpointError: another version wrote it.

        """
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingCheckpointError(
                f"a checkpoint must have a {MANIFEST}; {folder} has none; check the path, or save first"
            ) from None
        except OSError as error:
            raise DamagedCheckpointError(
                f"the {MANIFEST} of a checkpoint must be readable; reading {path} failed ({error}); load another one"
            ) from error
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> "Manifest":
        """The inverse of ``text``; ``path`` names the file in errors."""
        values = parsed(data, path)
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise _damaged(path, f"it does not begin as a {_FORMAT!r}")
        digest = values.pop("digest", None)
        if digest != hashlib.sha256(dumped(values)).hexdigest() or data != dumped({**values, "digest": digest}):
            raise _damaged(path, "its content differs from its digest")
        if values.get("version") != VERSION:
            raise CheckpointError(
                f"this version of pipesched reads checkpoints of format {VERSION}; {path} has format "
                f"{shown(values.get('version'))}, written by pipesched {shown(values.get('pipesched'))}; load it with "
                f"that version"
            )
        if any(Path(name).name != name for name in (values.get("data"), *values.get("files", ())) if name is not None):
            raise _damaged(path, "it names a file outside of its folder")
        try:
            entries = {
                "files": {name: FileEntry(**entry) for name, entry in values["files"].items()},
                "tensors": {key: _tensor(entry) for key, entry in values["tensors"].items()},
            }
            plain = {key: value for key, value in values.items() if key not in ("format", "version")}
            return cls(**{**plain, **entries})
        except (TypeError, KeyError, AttributeError) as error:
            raise _damaged(path, f"an entry is missing or wrong ({error})") from error

    def check_size(self, folder: Path, name: str) -> Path:
        """Return the path of a data file. Raises DamagedCheckpointError if it is missing or has another size."""
        path = folder / self.data / name
        entry = self.files[name]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DamagedCheckpointError(
                f"a checkpoint must have every file of its {MANIFEST}; {path} ({entry.bytes:,} bytes) is missing "
                f"({error.strerror}); load another checkpoint"
            ) from None
        if size != entry.bytes:
            raise _damaged(path, f"it has {size:,} bytes in place of {entry.bytes:,}")
        return path

    def check(self, folder: Path, name: str) -> Path:
        """Return the path of a data file after comparing its size and hash. Raises DamagedCheckpointError."""
        path = self.check_size(folder, name)
        if hash_of(path) != self.files[name].sha256:
            raise _damaged(path, f"its content differs from its SHA-256 in {MANIFEST}")
        return path


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    return TensorEntry(**{**entry, "shape": tuple(entry["shape"])})


def dumped(values: Any) -> bytes:
    """Values as JSON text, with sorted keys and one entry a line."""
    return (json.dumps(values, indent=0, sort_keys=True, ensure_ascii=True) + "\n").encode()


def parsed(data: bytes, path: Path) -> Any:
    """The inverse of ``dumped``. Raises DamagedCheckpointError."""
    try:
        return parse_json(data, _DEEPEST)
    except PipeschedError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, how: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the files of a checkpoint must be as they were written; {path} is damaged: {how}; load another checkpoint"
    )


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def hash_of(path: Path) -> str:
    """The SHA-256 of a file. Raises DamagedCheckpointError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        for block in _blocks(path):
            digest.update(block)
    except OSError as error:
        raise _damaged(path, f"reading it failed ({error})") from error
    return digest.hexdigest()
