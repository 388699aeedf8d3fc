"""Manifest: the file that lists every file and tensor of a checkpoint, with a digest of the manifest's content.

A checkpoint is a folder with ``manifest.json`` and one data folder. Each process that saves writes two files to
the data folder: one with tensors (``part-00000.safetensors``) and one with other values (``part-00000.json``). Nothing
is pickled.

In format 1, each tensor is in one file. Format 2 is used only if at least one tensor is divided into chunks.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

from pipesched.checks import shown
from pipesched.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
    PipeschedError,
    ScheduleError,
)
from pipesched.json_files import parse_json, read_fields
from pipesched.progress import advance
from pipesched.saving.chunks import Chunk, Rows, covers_tensor, pieces

__all__ = ["DATA", "KINDS", "MANIFEST", "FileEntry", "Manifest", "TensorEntry", "dumped", "hash_of", "parsed"]

T = TypeVar("T")

MANIFEST = "manifest.json"
_WHOLE, _CHUNKED = 1, 2  # versions of the format
#: The kinds of stored tensors.
KINDS = ("parameter", "buffer", "module state", "optimizer state", "scheduler state", "extra state")
_FORMAT = "pipesched checkpoint"
_DEEPEST = 128  # the maximum depth of nesting in the JSON files, which contain nested values of the user
_BLOCK = 1 << 20
#: The names of data folders.
DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"part-\d{5,}\.(json|safetensors)")
_SEED = re.compile(r"-?\d{1,20}")


@dataclass(frozen=True)
class FileEntry:
    """The size of a file in bytes, and its SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """The manifest's entry for a stored tensor."""

    #: The kind of tensor, one of `KINDS`.
    kind: str
    #: The name of the parameter, buffer, module, scheduler or extra object that the tensor belongs to.
    name: str
    #: The name of the file in the data folder that holds the tensor; empty if the tensor is divided into chunks.
    file: str
    shape: tuple[int, ...]
    #: The dtype as torch names it, such as "float32".
    dtype: str
    #: The chunks in the order of their rows; empty if one file holds the tensor.
    chunks: tuple[Chunk, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain values."""
        values = asdict(self)
        return values if self.chunks else {name: value for name, value in values.items() if name != "chunks"}

    @classmethod
    def from_dict(cls, values: Any) -> "TensorEntry":
        """Make an entry from the result of ``to_dict``, which may have been read from JSON. Raises ScheduleError."""
        return read_fields(cls, values, "the entry of a tensor must have", chunks=_chunks)

    def in_file(self, file: str) -> "TensorEntry":
        """Return a copy of the entry with ``file`` as the name of the file that holds the tensor or its chunk."""
        if self.chunks:
            return replace(self, chunks=tuple(replace(chunk, file=file) for chunk in self.chunks))
        return replace(self, file=file)

    def pieces(self, rows: Rows | None = None) -> Iterator[tuple[Chunk, Rows | None]]:
        """Yield each chunk that holds any of the tensor's rows in the range ``rows``, and the chunk's rows to read.

        In ``rows`` and in the results, None means all rows. A tensor in one file is a single chunk.
        """
        if self.chunks:
            yield from pieces(self.chunks, rows)
        else:
            yield Chunk(file=self.file, offsets=(0,) * len(self.shape), sizes=self.shape), rows


def _chunks(values: Any) -> tuple[Chunk, ...]:
    if not isinstance(values, list | tuple):
        raise ScheduleError(f"chunks must be a list; got {shown(values)}; save the file again")
    return tuple(map(Chunk.from_dict, values))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of the manifest of a checkpoint."""

    pipesched: str
    torch: str
    #: The name of the data folder.
    data: str
    #: The number of steps that the run had completed.
    step: int
    #: The seed of the run, in decimal digits.
    seed: str
    #: The settings that determine results, such as the number of micro-batches.
    settings: Mapping[str, Any]
    #: The plan under which the run was saved, as returned by ``Plan.to_dict``.
    plan: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    def text(self) -> bytes:
        """Return the content of the manifest file. Equal manifests give identical bytes."""
        tensors = {key: entry.to_dict() for key, entry in self.tensors.items()}
        values = {"format": _FORMAT, "version": self.version, **asdict(self), "tensors": tensors}
        return dumped({**values, "digest": hashlib.sha256(dumped(values)).hexdigest()})

    @property
    def version(self) -> int:
        """The version of the format."""
        return _CHUNKED if any(entry.chunks for entry in self.tensors.values()) else _WHOLE

    @property
    def total_bytes(self) -> int:
        """The total size of the data files in bytes."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def num_parts(self) -> int:
        """The number of processes that wrote the checkpoint."""
        return sum(name.endswith(".json") for name in self.files)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint.

        Raises:
            MissingCheckpointError: the folder has no manifest.
            DamagedCheckpointError: the manifest is damaged.
            CheckpointError: the checkpoint has an unsupported format version.

        """
        path = folder / MANIFEST
        try:
            if path.exists() and not path.is_file():  # such as a pipe, from which a read would not return
                raise _damaged(path, "it is not a file")
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingCheckpointError(
                f"a checkpoint must have a {MANIFEST}; {folder} has none; check the path, or save a checkpoint first"
            ) from None
        except OSError as error:
            raise DamagedCheckpointError(
                f"the {MANIFEST} of a checkpoint must be readable; reading {path} failed ({error}); load another "
                f"checkpoint"
            ) from error
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> "Manifest":
        """Parse the output of ``text``. Error messages name the file ``path``."""
        values = parsed(data, path)
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise _damaged(path, f"its format is not {_FORMAT!r}")
        digest = values.pop("digest", None)
        if digest != hashlib.sha256(dumped(values)).hexdigest() or data != dumped({**values, "digest": digest}):
            raise _damaged(path, "its content does not match its digest")
        if values.get("version") not in (_WHOLE, _CHUNKED):
            raise CheckpointError(
                f"this version of pipesched reads checkpoints of formats {_WHOLE} and {_CHUNKED}; {path} has format "
                f"{shown(values.get('version'))}, and was written by pipesched {shown(values.get('pipesched'))}; load "
                f"it with that version of pipesched"
            )
        try:
            manifest = read_fields(
                cls,
                {key: value for key, value in values.items() if key not in ("format", "version")},
                f"a {MANIFEST} must have",
                partly=False,
                files=lambda own: _each(own, lambda entry: read_fields(FileEntry, entry, "a file's entry must have")),
                tensors=lambda own: _each(own, TensorEntry.from_dict),
                settings=_plain,
                plan=_plain,
            )
        except PipeschedError as error:
            raise _damaged(path, str(error)) from error
        if wrong := next(manifest._wrong(), None):
            raise _damaged(path, wrong)
        return manifest

    def _wrong(self) -> Iterator[str]:
        """Yield descriptions of values that cannot be right."""
        if not DATA.fullmatch(self.data):
            yield f"the data folder is named {shown(self.data)}"
        if not _SEED.fullmatch(self.seed):
            yield f"the seed is {shown(self.seed)}"
        if self.step < 0:
            yield f"the step is {self.step}"
        for name in self.files:
            if not _FILE.fullmatch(name):
                yield f"a file is named {shown(name)}"
        for key, entry in self.tensors.items():
            pieces = [piece for piece, _ in entry.pieces()]
            places = [(entry.shape, entry.shape), *((piece.offsets, piece.sizes) for piece in pieces)]
            is_whole = all(len(own) == len(entry.shape) and min(own, default=0) >= 0 for pair in places for own in pair)
            if entry.kind not in KINDS or not is_whole:
                yield f"the entry of tensor {shown(key)} is of kind {shown(entry.kind)} and shape {entry.shape}"
            elif entry.chunks and not (entry.shape and covers_tensor(entry.chunks, entry.shape)):
                yield f"the chunks of tensor {shown(key)} do not make up the whole tensor"
            for piece in pieces:
                if piece.file not in self.files:
                    yield f"tensor {shown(key)} is in {shown(piece.file)}, which is not listed"

    def check_size(self, folder: Path, name: str) -> Path:
        """Check the size of a data file, and return the file's path.

        Raises DamagedCheckpointError if the file is missing or has the wrong size.
        """
        path = folder / self.data / name
        entry = self.files[name]
        try:
            found = path.stat()
        except OSError as error:
            raise DamagedCheckpointError(
                f"a checkpoint must have every file that its {MANIFEST} lists; {path} ({entry.bytes:,} bytes) is "
                f"missing ({error.strerror}); load another checkpoint"
            ) from None
        if not S_ISREG(found.st_mode):
            raise _damaged(path, "it is not a file")
        if found.st_size != entry.bytes:
            raise _damaged(path, f"it has {found.st_size:,} bytes instead of {entry.bytes:,}")
        return path

    def check(self, folder: Path, name: str) -> Path:
        """Check a data file's size and SHA-256, and return the file's path.

        Raises DamagedCheckpointError if the file is missing, or if its size or SHA-256 is wrong.
        """
        path = self.check_size(folder, name)
        if hash_of(path) != self.files[name].sha256:
            raise _damaged(path, f"its content does not match its SHA-256 in {MANIFEST}")
        return path


def _each(values: Any, make: Callable[[Any], T]) -> dict[str, T]:
    return {name: make(value) for name, value in _plain(values).items()}


def _plain(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ScheduleError(f"an entry must be a mapping; got {shown(values)}; save the file again")
    return values


def dumped(values: Any) -> bytes:
    """Return values as JSON text with sorted keys and one entry per line."""
    return (json.dumps(values, indent=0, sort_keys=True, ensure_ascii=True) + "\n").encode()


def parsed(data: bytes, path: Path) -> Any:
    """Parse the output of ``dumped``. Raises DamagedCheckpointError if the data is not valid."""
    try:
        return parse_json(data, _DEEPEST)
    except PipeschedError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, how: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the files of a checkpoint must not change after they are written; {path} is damaged: {how}; load another "
        f"checkpoint"
    )


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            advance()
            yield block


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises DamagedCheckpointError if the file cannot be read."""
    digest = hashlib.sha256()
    try:
        for block in _blocks(path):
            digest.update(block)
    except OSError as error:
        raise _damaged(path, f"reading it failed ({error})") from error
    return digest.hexdigest()
