"""Reading: find a checkpoint and compare its files before they are used."""

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
    """The folders that may hold the newest checkpoint of a path, in the order in which to try them.

    Raises MissingCheckpointError if there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    folders = checkpoints_in(path)
    if not any((folder / MANIFEST).exists() for folder in folders):
        raise MissingCheckpointError(
            f"a path to load must hold a checkpoint, or the folders that keep= has made; {path} "
            f"{f'has neither {MANIFEST} nor folders with one' if path.exists() else 'does not exist'}; check the path, "
            f"or save first"
        )
    return folders


class OpenCheckpoint:
    """A checkpoint that is being loaded. Its manifest and its values have been compared with their hashes.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        DamagedCheckpointError: a file is missing or changed.
        CheckpointError: another version wrote the checkpoint.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._manifest = manifest = Manifest.read(folder)
        except MissingCheckpointError as error:
            raise DamagedCheckpointError(
                f"a save that is complete ends with a {MANIFEST}; {folder} has none: the save was interrupted; load "
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
        """The manifest's text, which is equal in all processes that read the same checkpoint."""
        return self._manifest.text()

    def check_files_of(self, keys: Iterable[str]) -> None:
        """Compare the hashes of the files that hold these tensors. Raises DamagedCheckpointError."""
        for name in sorted({self._manifest.tensors[key].file for key in keys}):
            self._files[name] = TensorFile(self._manifest.check(self._folder, name))

    def _read(self, key: str) -> Tensor:
        entry = self._manifest.tensors[key]
        return self._files[entry.file].read(key, dtype_of(entry.dtype), entry.shape)


def given_state(states: Iterable[Mapping[str, Any]]) -> SavedRun:
    """The saved run in the states of all processes, as ``training_state`` returns them."""
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
