"""Reading: finds a checkpoint, and checks its files against the hashes in its manifest before they are used."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipesched.errors import DamagedCheckpointError, MissingCheckpointError
from pipesched.saving.folders import checkpoints_in
from pipesched.saving.live_run import Facts
from pipesched.saving.manifest import MANIFEST, Manifest, TensorEntry, parsed
from pipesched.saving.saved_run import SavedRun, merged
from pipesched.saving.tensor_files import TensorFile, dtype_of

__all__ = ["OpenCheckpoint", "checkpoint_folders", "given_state"]


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the folders to try, in this order, for the newest checkpoint of a path.

    Raises MissingCheckpointError if there is no checkpoint.
    """
    if (path / MANIFEST).exists():
        return [path]
    folders = checkpoints_in(path)
    if not any((folder / MANIFEST).exists() for folder in folders):
        raise MissingCheckpointError(
            f"a path to load must hold a checkpoint, or the folders that save made with keep=; {path} "
            f"{f'has neither {MANIFEST} nor folders with one' if path.exists() else 'does not exist'}; check the path, "
            f"or save a checkpoint first"
        )
    return folders


class OpenCheckpoint:
    """A checkpoint that is being loaded. The constructor checks its manifest and values against their hashes.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        DamagedCheckpointError: a file is missing or has changed.
        CheckpointError: the checkpoint has another format version.

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
        parts = []
        for name in sorted(name for name in manifest.files if name.endswith(".json")):
            path = manifest.check(folder, name)
            parts.append(parsed(path.read_bytes(), path)["values"])
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

    def check_files_of(self, keys: Iterable[str]) -> None:
        """Check the hashes of the files that hold these tensors. Raises DamagedCheckpointError if one differs."""
        for name in sorted({self._manifest.tensors[key].file for key in keys}):
            self._files[name] = TensorFile(self._manifest.check(self._folder, name))

    def _read(self, key: str) -> Tensor:
        entry = self._manifest.tensors[key]
        return self._files[entry.file].read(key, dtype_of(entry.dtype), entry.shape)


def given_state(states: Iterable[Mapping[str, Any]]) -> SavedRun:
    """Merge the states that ``training_state`` returned in all processes into a saved run."""
    states = list(states)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    for state in states:
        tensors |= state["tensors"]
        entries |= {key: TensorEntry(**entry) for key, entry in state["entries"].items()}
    facts = Facts(**{name: states[0][name] for name in ("step", "seed", "settings", "plan")})
    where = "the given state"
    values = merged((state["values"] for state in states), where)
    return SavedRun(where=where, facts=facts, entries=entries, values=values, read=tensors.__getitem__)
