"""Whole checkpoints: which folders of a trainer hold a complete checkpoint. Trainer writes its own state last."""

import json
import os
import re
import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from pipesched.errors import DamagedCheckpointError
from pipesched.hf.run_files import RunFiles
from pipesched.saving.manifest import MANIFEST
from pipesched.units import counted

__all__ = ["begin_save", "check_whole", "newest_whole"]

_STEP = re.compile(r"checkpoint-(\d+)")
_AT_START = "leave resume_from_checkpoint out, to start from the first step"


def newest_whole(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and what newer ones lack. Returns None if there are no checkpoints.

    Raises DamagedCheckpointError if there are checkpoints, but none is complete.
    """
    lacks: list[str] = []
    for folder in _checkpoints(output_dir):
        lack = _lack(folder)
        if not lack:
            return folder, lacks
        lacks.append(f"{folder} {lack}")
    if lacks:
        raise DamagedCheckpointError(
            f"a run resumes from a checkpoint whose save has ended; {output_dir} has "
            f"{counted(len(lacks), 'checkpoint')}, and none is complete: {'; '.join(lacks)}; {_AT_START}"
        )
    return None, []


def check_whole(folder: Path) -> None:
    """Raise DamagedCheckpointError if a folder exists, and its checkpoint is not complete."""
    lack = _lack(folder) if folder.is_dir() else ""
    if lack:
        other = next((other for other in _checkpoints(folder.parent) if not _lack(other)), None)
        remedy = _AT_START if other is None else f"pass {str(other)!r}, the newest complete checkpoint beside it"
        raise DamagedCheckpointError(
            f"a run resumes from a checkpoint whose save has ended; {folder} {lack}, so its save was interrupted; "
            f"{remedy}"
        )


def begin_save(folder: Path, *, removes_others: bool) -> None:
    """Make a folder incomplete until Trainer's state is written again.

    With ``removes_others``, the incomplete checkpoints beside it are removed. Trainer counts them as checkpoints, and
    would delete complete ones in their place.
    """
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
    for other in _checkpoints(folder.parent) if removes_others else ():
        if other != folder and _lack(other):
            shutil.rmtree(other, ignore_errors=True)


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders that Trainer's checkpoints have, newest first."""
    names = os.listdir(output_dir) if output_dir.is_dir() else []
    steps = {name: int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
    return [output_dir / name for name in sorted(steps, key=lambda name: -steps[name]) if (output_dir / name).is_dir()]


def _lack(folder: Path) -> str:
    """Return what a checkpoint lacks; an empty string if it is complete."""
    run = RunFiles(folder)
    if run.path.exists() and not run.exist:
        return f"has no {run.path.name}/{MANIFEST}"
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"has no {TRAINER_STATE_NAME}"
    except ValueError:
        return f"has only a part of {TRAINER_STATE_NAME}"
    return ""
