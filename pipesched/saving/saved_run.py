"""Saved run: the content of a checkpoint, and the part of it that each process saves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesched.errors import CheckpointError
from pipesched.saving.live_run import Facts
from pipesched.saving.manifest import TensorEntry
from pipesched.saving.tensor_files import dtype_name

__all__ = ["Part", "SavedRun"]


@dataclass
class Part:
    """The part of a checkpoint that one process saves: tensors with their manifest entries, and JSON values."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors under their keys, with ``kind`` and ``name`` in the tensors' manifest entries."""
        for key, tensor in tensors.items():
            if key in self.tensors:
                raise CheckpointError(
                    f"saved tensors must have different names; two are named {key!r}; rename a layer or a key of extra="
                )
            self.tensors[key] = tensor
            shape = tuple(tensor.shape)
            self.entries[key] = TensorEntry(kind=kind, name=name, file="", shape=shape, dtype=dtype_name(tensor.dtype))


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A saved run, with the parts of all processes merged."""

    #: The checkpoint's path, for error messages.
    where: str
    facts: Facts
    entries: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    #: Returns the tensor with a given key: read from a file to the CPU, or taken from a training state.
    read: Callable[[str], Tensor]


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
