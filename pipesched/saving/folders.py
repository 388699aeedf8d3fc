"""Folders: where checkpoints lie, and the order of writes that keeps the old checkpoint usable until the new is whole.

Data files get a new folder with a unique name. They are complete and on the disk before the manifest names them. The
manifest is replaced by one ``os.replace``, which is atomic on local and on network file systems. The old data folder is
deleted only after that.
"""

import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from pipesched.errors import CheckpointError, DamagedCheckpointError, InputError, MissingCheckpointError
from pipesched.saving.manifest import MANIFEST, Manifest

__all__ = [
    "checkpoints_in",
    "commit",
    "folder_for",
    "keep_newest",
    "new_data_folder",
    "remove_checkpoint",
    "sync_folder",
    "write_whole",
]

_STEP = re.compile(r"step-(\d{8,})")
_DATA = re.compile(r"data-[0-9a-f]{16}")
_TEMPORARY = ".tmp"


def folder_for(path: Path, step: int, keep: int | None) -> Path:
    """The folder of a new checkpoint: ``path`` itself, or with ``keep`` a folder in it that is named by the step.

    Raises InputError if ``path`` has checkpoints of the other kind.
    """
    steps = checkpoints_in(path)
    if keep is None and steps:
        raise InputError(
            f"a path holds either one checkpoint or, with keep=, a folder for each; {path} holds {len(steps)} folders "
            f"such as {steps[0].name}; pass keep= or another path"
        )
    if keep is not None and (path / MANIFEST).exists():
        raise InputError(
            f"a path holds either one checkpoint or, with keep=, a folder for each; {path} is one checkpoint; leave "
            f"keep= out, or pass another path"
        )
    return path if keep is None else path / f"step-{step:08}"


def checkpoints_in(path: Path) -> list[Path]:
    """The folders of checkpoints that ``keep=`` has made in a folder, the newest first. They need not be whole."""
    try:
        found = [entry for entry in os.listdir(path) if _STEP.fullmatch(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path / name for name in sorted(found, key=lambda name: -int(name[5:]))]


def new_data_folder(folder: Path) -> str:
    """Make a data folder for a new checkpoint, and return its name. Data that no manifest names is removed first."""
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
        if _DATA.fullmatch(entry) and entry != used:
            shutil.rmtree(folder / entry, ignore_errors=True)
        elif entry.startswith(MANIFEST) and entry.endswith(_TEMPORARY):
            with suppress(OSError):
                (folder / entry).unlink()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it. It is never seen incomplete."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def commit(folder: Path, manifest: Manifest) -> None:
    """Make new data the checkpoint of a folder, and remove the old data."""
    for name in manifest.files:
        manifest.check_size(folder, name)
    sync_folder(folder / manifest.data)
    write_whole(folder / MANIFEST, manifest.text())
    sync_folder(folder)
    with suppress(OSError):
        sync_folder(folder.parent)
    with suppress(OSError, CheckpointError):  # the next save removes what stays
        _remove_leftovers(folder)


def keep_newest(path: Path, keep: int, new: Path) -> None:
    """Remove the oldest checkpoints beyond ``keep``, and incomplete ones. ``new`` always stays."""
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
    except CheckpointError:  # of another version
        return True
    return True


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: its manifest first, so that it never looks whole while its data is going."""
    with suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
