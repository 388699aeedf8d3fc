"""Saved run: the content of a checkpoint, and the part of it that each process saves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from pipesched.errors import CheckpointError
from pipesched.saving.chunks import Chunk, Rows, covers_tensor
from pipesched.saving.live_run import Facts
from pipesched.saving.manifest import TensorEntry
from pipesched.saving.tensor_files import dtype_name
from pipesched.saving.whole_tensors import NO_WHOLE_TENSORS, WholeTensors

__all__ = ["CheckpointPart", "Read", "SavedRun", "merged", "merged_entries"]


@dataclass
class CheckpointPart:
    """The part of a checkpoint that one process saves: tensors with their manifest entries, and JSON values."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    #: How the whole tensors of those that are blocks are made. The entries are those of the whole tensors.
    wholes: WholeTensors = NO_WHOLE_TENSORS

    def add(self, kind: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors, and a manifest entry with this ``kind`` and ``name`` for each tensor."""
        for key, tensor in tensors.items():
            shape = tuple(tensor.shape)
            entry = TensorEntry(kind=kind, name=name, file="", shape=shape, dtype=dtype_name(tensor.dtype))
            self._insert(key, tensor, entry)

    def add_rows(self, kind: str, name: str, tensors: Mapping[str, Tensor], rows: Rows, num_rows: int) -> None:
        """Add tensors that hold some rows of larger tensors. Other processes save the other rows under the same keys.

        ``rows`` is the range of these rows, and ``num_rows`` is the number of rows of the larger tensors.
        """
        for key, tensor in tensors.items():
            sizes = tuple(tensor.shape)
            self._insert(
                key,
                tensor,
                TensorEntry(
                    kind=kind,
                    name=name,
                    file="",
                    shape=(num_rows, *sizes[1:]),
                    dtype=dtype_name(tensor.dtype),
                    chunks=(Chunk(file="", offsets=(rows.start, *[0] * (len(sizes) - 1)), sizes=sizes),),
                ),
            )

    def _insert(self, key: str, tensor: Tensor, entry: TensorEntry) -> None:
        if key in self.tensors:
            raise CheckpointError(
                f"saved tensors must have different names; two are named {key!r}; rename a layer or a key of extra="
            )
        self.tensors[key] = tensor
        self.entries[key] = entry

    def joined(self, other: "CheckpointPart") -> "CheckpointPart":
        """Return a part with the content of both parts. Two dicts under the same key are merged."""
        values = dict(self.values)
        for word, value in other.values.items():
            known = values.get(word)
            values[word] = {**known, **value} if isinstance(known, dict) else value
        return CheckpointPart({**self.tensors, **other.tensors}, {**self.entries, **other.entries}, values)


class Read(Protocol):
    """Reads a saved tensor."""

    def __call__(self, key: str, rows: Rows | None = None) -> Tensor:
        """Return the tensor with this key, or only the given rows. A tensor that is read from a file is on the CPU."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A saved run, with the parts of all processes merged."""

    #: The checkpoint's path, for error messages.
    where: str
    facts: Facts
    entries: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    read: Read


def merged_entries(parts: Iterable[Mapping[str, TensorEntry]], where: str) -> dict[str, TensorEntry]:
    """Merge the tensor entries of all processes. Every entry must name the file of its tensor or chunk.

    Raises CheckpointError if two processes saved the same tensor, or if chunks do not make up the whole tensor.
    """
    found: dict[str, TensorEntry] = {}
    for part in parts:
        for key, entry in part.items():
            known = found.setdefault(key, entry)
            if known is not entry:
                found[key] = _with_chunks_of(known, entry, key, where)
    for key, entry in found.items():
        if entry.chunks:
            chunks = tuple(sorted(entry.chunks, key=lambda chunk: chunk.offsets))
            if not covers_tensor(chunks, entry.shape):
                rows = ", ".join(f"{chunk.rows.start} to {chunk.rows.end - 1}" for chunk in chunks)
                raise CheckpointError(
                    f"the processes that save a tensor must together save each of its rows once; {key!r} in {where} "
                    f"has {entry.shape[0]} rows, and the processes saved rows {rows}; pass the states of all ranks"
                )
            found[key] = replace(entry, chunks=chunks)
    return found


def _with_chunks_of(one: TensorEntry, other: TensorEntry, key: str, where: str) -> TensorEntry:
    if not one.chunks or not other.chunks or replace(one, chunks=()) != replace(other, chunks=()):
        raise CheckpointError(
            f"saved tensors must have different names; {key!r} is saved by two processes in {where}; build the same "
            f"model on every rank"
        )
    return replace(one, chunks=one.chunks + other.chunks)


def merged(parts: Iterable[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Merge the values of all processes. Raises CheckpointError if two processes saved the same name."""
    found: dict[str, Any] = {}
    for part in parts:
        offset = len(found.get("groups", ()))
        for word, value in part.items():
            if word == "groups":
                found.setdefault(word, []).extend(value)
                continue
            for name, own in value.items():
                if word == "parameters":
                    own = {**own, "group": own["group"] + offset}  # noqa: PLW2901
                if word == "extra leaves":
                    found.setdefault(word, {}).setdefault(name, []).extend(own)
                elif name in found.setdefault(word, {}):
                    raise CheckpointError(
                        f"every name must be saved only once; {where} has {name!r} twice in its {word}; save the "
                        f"checkpoint again"
                    )
                else:
                    found[word][name] = own
    return found
