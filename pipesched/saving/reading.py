"""Reading: finds a checkpoint, and checks its files against the hashes in its manifest before they are used."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipesched.checks import is_count, is_whole, shown
from pipesched.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError, ScheduleError
from pipesched.saving.chunks import Chunk, Rows
from pipesched.saving.folders import check_no_weights, checkpoints_in
from pipesched.saving.live_run import Facts
from pipesched.saving.manifest import MANIFEST, Manifest, TensorEntry, parsed
from pipesched.saving.saved_run import SavedRun, merged, merged_entries
from pipesched.saving.saved_values import check_values
from pipesched.saving.tensor_files import TensorFile, dtype_name, dtype_of

__all__ = ["OpenCheckpoint", "checkpoint_folders", "given_state"]


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the checkpoint folders at a path, newest first.

    Raises MissingCheckpointError if there is nothing at the path that a run could have saved, so that a script may
    start at step 0. Raises CheckpointError if there is something else: a file, or weights that `save` did not write.
    """
    try:
        folders = [path] if (path / MANIFEST).exists() else checkpoints_in(path)
        if not any((folder / MANIFEST).exists() for folder in folders):
            check_no_weights(path)
            folders = []
    except OSError as error:  # such as a name that is too long, or a folder that this user may not read
        raise CheckpointError(
            f"a path to load must be readable; reading {path} failed ({error.strerror}); check the path and its "
            f"permissions"
        ) from error
    if not folders:
        raise MissingCheckpointError(
            f"a path to load must hold a checkpoint, or the checkpoint folders of save(keep=...); {path} "
            f"{f'has neither {MANIFEST} nor folders with one' if path.exists() else 'does not exist'}; check the path, "
            f"or save a checkpoint first"
        )
    return folders


class OpenCheckpoint:
    """A checkpoint that is being loaded. The constructor checks the manifest and the values against their hashes.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        DamagedCheckpointError: a file is missing or has changed.
        CheckpointError: the checkpoint has an unsupported format version, or a value of a wrong form.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._manifest = manifest = Manifest.read(folder)
        except MissingCheckpointError as error:
            raise DamagedCheckpointError(
                f"a complete checkpoint has a {MANIFEST}; {folder} has none, because the save was interrupted; load "
                f"another checkpoint"
            ) from error
        for name in manifest.files:
            manifest.check_size(folder, name)
        parts: list[Any] = []
        for name in sorted(name for name in manifest.files if name.endswith(".json")):
            path = manifest.check(folder, name)
            content = parsed(path.read_bytes(), path)
            own = content.get("values") if isinstance(content, dict) else None
            check_values(own, manifest.tensors, str(path))
            parts.append(own)
        self._files: dict[str, TensorFile] = {}
        #: The content of the checkpoint.
        self.saved = SavedRun(
            where=str(folder),
            facts=Facts(step=manifest.step, seed=int(manifest.seed), settings=manifest.settings, plan=manifest.plan),
            entries=manifest.tensors,
            values=merged(parts, str(folder)),
            read=self._read,
        )

    @property
    def text(self) -> bytes:
        """The content of the manifest, identical in all processes that read the same checkpoint."""
        return self._manifest.text()

    def check_files_of(self, needed: Mapping[str, Rows | None]) -> None:
        """Check the hashes of the files that hold the needed tensors, and that the files have these tensors.

        ``needed`` maps each tensor's key to the needed rows; None means all rows. Raises DamagedCheckpointError if a
        hash differs, or if a tensor is missing.
        """
        entries = self._manifest.tensors
        pieces = [(key, chunk) for key, rows in needed.items() for chunk, _ in entries[key].pieces(rows)]
        for name in sorted({chunk.file for _, chunk in pieces}):
            self._files[name] = TensorFile(self._manifest.check(self._folder, name))
        for key, chunk in pieces:
            self._files[chunk.file].check(key, dtype_of(entries[key].dtype), chunk.sizes)

    def _read(self, key: str, rows: Rows | None = None) -> Tensor:
        entry = self._manifest.tensors[key]
        dtype = dtype_of(entry.dtype)
        return _assembled(entry, rows, lambda chunk, own: self._files[chunk.file].read(key, dtype, chunk.sizes, own))


def _assembled(entry: TensorEntry, rows: Rows | None, read: Callable[[Chunk, Rows | None], Tensor]) -> Tensor:
    """Return a saved tensor, or some of its rows. ``read`` returns a chunk, or some of the chunk's rows."""
    found = [read(chunk, own) for chunk, own in entry.pieces(rows)]
    return found[0] if len(found) == 1 else torch.cat(found)


def given_state(states: Iterable[Mapping[str, Any]]) -> SavedRun:
    """Merge the states that ``training_state`` returned in all processes into a saved run."""
    states = list(states)
    where = "the given state"
    parts = [_given_entries(number, state, where) for number, state in enumerate(states)]
    entries = merged_entries(parts, where)
    for state in states:
        check_values(state["values"], entries, where)

    def read(key: str, rows: Rows | None = None) -> Tensor:
        def piece(chunk: Chunk, own: Rows | None) -> Tensor:
            tensor: Tensor = states[int(chunk.file)]["tensors"][key]
            return (
                tensor if own is None else tensor[own.start : own.end]
            ).clone()  # training must not change ``states``

        return _assembled(entries[key], rows, piece)

    first = states[0]
    if not is_count(first["step"], 0) or not is_whole(first["seed"]):
        raise CheckpointError(
            f"a training state must have a step, at least 0, and a seed; got step {shown(first['step'])} and seed "
            f"{shown(first['seed'])}; pass the dict that training_state returned unchanged"
        )
    facts = Facts(**{name: first[name] for name in ("step", "seed", "settings", "plan")})
    values = merged((state["values"] for state in states), where)
    return SavedRun(where=where, facts=facts, entries=entries, values=values, read=read)


def _given_entries(number: int, state: Mapping[str, Any], where: str) -> dict[str, TensorEntry]:
    """Return the entries of a given state's tensors. Raises CheckpointError if an entry does not fit its tensor."""
    tensors = state["tensors"]
    found = {}
    try:
        for key, values in state["entries"].items():
            entry = TensorEntry.from_dict(values)
            tensor = tensors[key]
            shape = entry.chunks[0].sizes if entry.chunks else entry.shape
            if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (shape, entry.dtype):
                raise _unfit(where, f"tensor {key!r} is {tensor.dtype} of shape {list(tensor.shape)}")
            found[key] = entry.in_file(str(number))
    except (ScheduleError, AttributeError, LookupError, TypeError) as error:
        raise _unfit(where, f"{type(error).__name__}: {error}") from error
    return found


def _unfit(where: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"a training state must be the dict that training_state returned; in {where}, the entries and the tensors do "
        f"not fit together ({how}); pass the dict unchanged"
    )
