"""Folders: lays out checkpoint folders, and keeps the old checkpoint usable until the new one is complete.

Each save writes its data files to a new folder with a unique name. The files are complete and flushed to the disk
before the manifest names them. A single ``os.replace``, which is atomic on local and on network file systems, replaces
the manifest. The old data folder is deleted only after the manifest has been replaced.
"""

import errno
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipesched.errors import CheckpointError, DamagedCheckpointError, InputError, MissingCheckpointError
from pipesched.saving.manifest import DATA, MANIFEST, Manifest
from pipesched.units import counted
from pipesched.whole_files import TEMPORARY, write_whole

__all__ = [
    "check_no_weights",
    "checkpoints_in",
    "commit",
    "folder_for",
    "keep_newest",
    "new_data_folder",
    "remove_checkpoint",
    "sync_folder",
]

_STEP = re.compile(r"step-(\d{8,})")
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp")  # suffixes of other programs' files


def folder_for(path: Path, step: int, keep: int | None) -> Path:
    """Return the folder of a new checkpoint: ``path`` or, with ``keep``, a folder in ``path`` named after the step.

    Raises InputError if ``path`` holds checkpoints saved with ``keep`` but ``keep`` is None, or vice versa.
    """
    steps = checkpoints_in(path)
    if keep is None and steps:
        raise InputError(
            f"a path holds either one checkpoint or, with keep=, one folder per checkpoint; {path} holds "
            f"{counted(len(steps), 'folder')} such as {steps[0].name}; pass keep=, or pass another path"
        )
    if keep is not None and (path / MANIFEST).exists():
        raise InputError(
            f"a path holds either one checkpoint or, with keep=, one folder per checkpoint; {path} is a single "
            f"checkpoint; leave keep= out, or pass another path"
        )
    return path if keep is None else path / f"step-{step:08}"


def checkpoints_in(path: Path) -> list[Path]:
    """Return the folders of the checkpoints saved in ``path`` with ``keep=``, newest first. Some may be incomplete."""
    try:
        found = [entry for entry in os.listdir(path) if _STEP.fullmatch(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path / name for name in sorted(found, key=lambda name: -int(name[5:]))]


def check_no_weights(path: Path) -> None:
    """Raise CheckpointError if a path is a file, or a folder with files of weights that `save` did not write."""
    found = path if path.is_file() else next(_weights_in(path), None)
    if found is None:
        return
    above = next((folder for folder in found.parents[:2] if (folder / MANIFEST).exists()), None)
    if above is not None:
        what, remedy = "a part of a checkpoint", f"pass the checkpoint's folder, {above}"
    elif _holds_weights(found):
        read = "safetensors.torch.load_file" if found.suffix == ".safetensors" else "torch.load"
        what = "a file of weights, without a step, a seed and a plan"
        remedy = (
            f"load weights with pipe.load_state_dict({read}({str(found)!r})), and the result of training_state with "
            f"pipe.load_training_state"
        )
    else:
        what, remedy = "a file", "pass a folder"
    raise CheckpointError(
        f"a path to load must be a folder that save wrote, with a {MANIFEST}; {found} is {what}; {remedy}"
    )


def _weights_in(folder: Path) -> Iterator[Path]:
    """Yield the files of weights in a folder and its subfolders, except what an interrupted save has left."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _holds_weights(entry):
            yield entry
        elif entry.is_dir() and not (DATA.fullmatch(entry.name) or _STEP.fullmatch(entry.name)):
            yield from filter(_holds_weights, sorted(entry.iterdir()))


def _holds_weights(path: Path) -> bool:
    """Whether a file is one that other programs write for weights: safetensors, torch.save, or torch's checkpoints."""
    return path.is_file() and (path.suffix in _WEIGHTS or zipfile.is_zipfile(path))


def new_data_folder(folder: Path) -> str:
    """Remove unused data folders, make a data folder for a new checkpoint, and return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(DamagedCheckpointError, CheckpointError):  # a manifest that cannot be read may still be repaired
        _remove_leftovers(folder)
    name = f"data-{secrets.token_hex(8)}"
    (folder / name).mkdir()
    return name


def _remove_leftovers(folder: Path) -> None:
    try:
        used = Manifest.read(folder).data
    except MissingCheckpointError:
        used = None
    for entry in os.listdir(folder):
        if DATA.fullmatch(entry) and entry != used:
            shutil.rmtree(folder / entry, ignore_errors=True)
        elif entry.startswith(MANIFEST) and entry.endswith(TEMPORARY):
            with suppress(OSError):
                (folder / entry).unlink()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, if the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def commit(folder: Path, manifest: Manifest) -> None:
    """Replace a checkpoint's manifest with ``manifest``, which names the new data, and remove the old data."""
    for name in manifest.files:
        manifest.check_size(folder, name)
    sync_folder(folder / manifest.data)
    write_whole(folder / MANIFEST, manifest.text())
    sync_folder(folder)
    with suppress(OSError):
        sync_folder(folder.parent)
    with suppress(OSError, CheckpointError):  # the next save removes any leftovers
        _remove_leftovers(folder)


def keep_newest(path: Path, keep: int, new: Path) -> None:
    """Remove all but the newest ``keep`` checkpoints, and all incomplete checkpoints. ``new`` is never removed."""
    whole = [folder for folder in checkpoints_in(path) if folder != new and _is_complete(folder)]
    stay = {new, *whole[: keep - 1]}
    for folder in checkpoints_in(path):
        if folder not in stay:
            remove_checkpoint(folder)


def _is_complete(folder: Path) -> bool:
    try:
        manifest = Manifest.read(folder)
        for name in manifest.files:
            manifest.check_size(folder, name)
    except DamagedCheckpointError:
        return False
    except MissingCheckpointError:
        return False
    except CheckpointError:  # another version of pipesched wrote this checkpoint
        return True
    return True


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, starting with its manifest, so that a partly deleted checkpoint never looks complete."""
    with suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
