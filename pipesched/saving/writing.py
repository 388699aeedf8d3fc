"""Writing: writes the files of a checkpoint in all processes, and then its manifest in the first process.

Each writer writes a file of tensors and then a file of values. The file of values shows that the writer has finished.
The writers are the processes of replica 0, or all processes if replicas hold different states. The first process waits
until the value files of all writers exist, and then replaces the manifest. Processes therefore exchange no messages
while they write, and a save can continue during the next steps.
"""

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipesched.errors import CheckpointError, MissingCheckpointError
from pipesched.progress import advance
from pipesched.saving.collective_work import Others, OthersFailedError
from pipesched.saving.folders import commit, folder_for, keep_newest, new_data_folder
from pipesched.saving.live_run import Facts
from pipesched.saving.manifest import FileEntry, Manifest, TensorEntry, dumped, hash_of, parsed
from pipesched.saving.saved_run import CheckpointPart, merged_entries
from pipesched.saving.tensor_files import sharding_info, write_tensors
from pipesched.units import quote_bytes
from pipesched.whole_files import write_whole

__all__ = ["Target", "begin", "check_shared", "explained", "write"]

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.2
_HURRIED_S = 10.0  # after the pipeline has failed, the longest wait during which no other process writes a byte


@dataclass(frozen=True, kw_only=True)
class Target:
    """The paths and processes of a save."""

    #: The path that the user passed.
    path: Path
    #: The folder of the checkpoint: ``path`` or, with ``keep``, a folder in ``path`` named after the step.
    folder: Path
    #: The name of the data folder.
    data: str
    #: The number of checkpoints to keep; None to save to the path itself.
    keep: int | None
    #: The index of this process, and the number of processes.
    process: int
    num_processes: int
    #: The indexes of the processes that write a part of the checkpoint.
    writers: tuple[int, ...]
    #: The indexes of the processes whose files are numbered first, in ascending order: those of the first plane.
    numbered: tuple[int, ...]
    #: The names of the processes in error messages.
    names: Sequence[str]
    #: How long the first process waits while no other process writes a byte, in seconds. Ignored for one process.
    timeout_s: float

    @property
    def data_folder(self) -> Path:
        """The folder of the data files."""
        return self.folder / self.data


def begin(path: Path, step: int, keep: int | None) -> str:
    """Make a new data folder for a checkpoint, and return its name. Only the first process calls this.

    Args:
        path: the path that the user passed.
        step: the number of steps that the run has completed.
        keep: the number of checkpoints to keep; None to save to the path itself.

    Raises:
        InputError: the path holds checkpoints saved with ``keep`` but ``keep`` is None, or vice versa.
        CheckpointError: the folder cannot be made.

    """
    with explained(path):
        return new_data_folder(folder_for(path, step, keep))


def check_shared(target: Target) -> None:
    """Raise CheckpointError if this process cannot see the data folder that the first process made."""
    if not target.data_folder.is_dir():
        raise CheckpointError(
            f"all ranks must see the same file system; {target.data_folder}, which rank 0 made, does not exist on "
            f"rank {target.process}; pass the same path on every rank, on a file system that all hosts share"
        )


def write(target: Target, part: CheckpointPart, facts: Facts, others: Others) -> None:
    """Write this process's files. The first process then waits for the other writers, and replaces the manifest.

    Args:
        target: the paths and processes of the save.
        part: the part of the checkpoint that this process saves.
        facts: the step, seed, settings and plan of the run.
        others: what the main thread tells about the other processes.

    Raises:
        CheckpointError: writing failed in this process. The previous checkpoint is intact.
        OthersFailedError: writing failed in other processes. Only the first process raises this error.

    """
    name = _name(target, target.process)
    try:
        if target.process in target.writers:
            with explained(target.folder):
                _write_part(target, name, part)
            advance()
        part.wholes.finish()
    except CheckpointError as error:
        with suppress(Exception):
            part.wholes.finish()
        _report(target, error)
        if target.process:
            raise
        with suppress(CheckpointError):  # a full disk may have no room for this process's own report
            _parts(target, others, others_only=True)
        shutil.rmtree(target.data_folder, ignore_errors=True)
        raise
    if target.process == 0:
        try:
            manifest = _manifest(target, facts, _parts(target, others))
            _check_wanted(target, others)
            with explained(target.folder):
                commit(target.folder, manifest)
        except BaseException:
            if _is_replaceable(target):
                shutil.rmtree(target.data_folder, ignore_errors=True)
            raise
        if target.keep is not None:
            with suppress(OSError):
                keep_newest(target.path, target.keep, target.folder)


def _check_wanted(target: Target, others: Others) -> None:
    """Raise CheckpointError if the save was given up, so that it does not replace the manifest of a later save."""
    if others.is_given_up:
        raise CheckpointError(f"a save that was given up must not go on; {target.folder} keeps its checkpoint")


def _is_replaceable(target: Target) -> bool:
    """Return whether a failed save may delete its data folder: True if the manifest does not refer to this folder.

    A save can also fail after it has replaced the manifest. Returns False if the manifest cannot be read.
    """
    try:
        return Manifest.read(target.folder).data != target.data
    except MissingCheckpointError:
        return True
    except CheckpointError:
        return False


def _name(target: Target, process: int) -> str:
    """Return the name of the files of a process, which do not depend on the number of planes."""
    others = [other for other in range(target.num_processes) if other not in target.numbered]
    return f"part-{[*target.numbered, *others].index(process):05}"


def _write_part(target: Target, name: str, part: CheckpointPart) -> None:
    file = f"{name}.safetensors"
    entries = {key: entry.in_file(file) for key, entry in part.entries.items()}
    written = write_tensors(target.data_folder / file, part.tensors, sharding_info(entries), part.wholes)
    values = {
        "file": {file: asdict(written)},
        "tensors": {key: entry.to_dict() for key, entry in entries.items()},
        "values": part.values,
    }
    write_whole(target.data_folder / f"{name}.json", dumped(values))


def _report(target: Target, error: CheckpointError) -> None:
    """Report to the first process that this process failed, and delete the files that this process wrote."""
    name = _name(target, target.process)
    for path in (f"{name}.safetensors", f"{name}.json"):
        with suppress(OSError):
            (target.data_folder / path).unlink()
    with suppress(OSError):
        write_whole(target.data_folder / f"{name}.failed", str(error).encode())


def _parts(target: Target, others: Others, *, others_only: bool = False) -> dict[str, tuple[FileEntry, Any]]:
    """Wait for the value files of all writers, and return the files' entries and contents, keyed by file name.

    With ``others_only``, does not wait for the file of this process.

    Raises OthersFailedError if a process failed, or if no process has written anything for too long.
    """
    found: dict[str, tuple[FileEntry, Any]] = {}
    errors: dict[int, str] = {}
    writers = [process for process in target.writers if not others_only or process != target.process]
    waiting = {_name(target, process): process for process in writers}
    pause_s = _FIRST_PAUSE_S
    progress: Any = None
    since_s = time.monotonic()
    while waiting:
        names = _listed(target.data_folder)
        for name, process in [*waiting.items()]:
            path = target.data_folder / f"{name}.json"
            if f"{name}.failed" in names:
                errors[process] = path.with_suffix(".failed").read_text()
            elif process in others.errors:
                errors[process] = others.errors[process]
            elif path.name in names:
                data = path.read_bytes()
                found[path.name] = FileEntry(len(data), hash_of(path)), parsed(data, path)
            else:
                continue
            del waiting[name]
        if not waiting:
            break
        _check_wanted(target, others)
        sizes = _sizes(target.data_folder)
        if sizes != progress:
            progress, since_s = sizes, time.monotonic()
        patience_s = min(target.timeout_s, _HURRIED_S) if others.has_failed() else target.timeout_s
        if time.monotonic() - max(since_s, others.compared_s) > patience_s:
            late = ", ".join(target.names[process] for process in waiting.values())
            raise OthersFailedError(
                f"all ranks must finish a save; {late} failed: exited, or wrote nothing for {patience_s:g} s; the "
                f"previous checkpoint is intact; load it"
            )
        advance()  # this wait has a limit of its own
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if errors:
        texts = [f"{target.names[process]} failed: {text}" for process, text in errors.items()]
        raise OthersFailedError(f"all ranks must finish a save; {'; '.join(texts)}")
    return found


def _listed(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _sizes(folder: Path) -> list[tuple[str, int]]:
    sizes = []
    for name in sorted(_listed(folder)):
        with suppress(OSError):
            sizes.append((name, (folder / name).stat().st_size))
    return sizes


def _manifest(target: Target, facts: Facts, parts: Mapping[str, tuple[FileEntry, Any]]) -> Manifest:
    files: dict[str, FileEntry] = {}
    entries = []
    for name, (entry, content) in sorted(parts.items()):
        files[name] = entry
        files.update({file: FileEntry(**own) for file, own in content["file"].items()})
        entries.append({key: TensorEntry.from_dict(own) for key, own in content["tensors"].items()})
    return Manifest(
        pipesched=sys.modules[__name__.partition(".")[0]].__version__,
        torch=torch.__version__,
        data=target.data,
        step=facts.step,
        seed=str(facts.seed),
        settings=facts.settings,
        plan=facts.plan,
        files=files,
        tensors=merged_entries(entries, str(target.folder)),
    )


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Convert file-system errors in the ``with`` block into CheckpointErrors that suggest a remedy."""
    try:
        yield
    except OSError as error:
        free = ""
        with suppress(OSError):
            free = f", {quote_bytes(shutil.disk_usage(folder if folder.exists() else folder.parent).free)} free"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space" if full else "correct the cause"
        raise CheckpointError(
            f"a checkpoint must be written completely; writing {error.filename or folder} failed ({error.strerror}"
            f"{free}); the previous checkpoint, if there was one, is intact; {remedy}, or pass another path"
        ) from error
