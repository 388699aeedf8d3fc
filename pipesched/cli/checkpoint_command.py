"""Checkpoint command: prints the contents of a checkpoint, and checks its files. The command does not import torch."""

from math import prod
from pathlib import Path
from typing import Any

import click

from pipesched.errors import CheckpointError, MissingCheckpointError
from pipesched.saving.folders import check_no_weights, checkpoints_in
from pipesched.saving.manifest import KINDS, MANIFEST, Manifest, parsed
from pipesched.units import counted, quote_bytes

__all__ = ["checkpoint"]


@click.command(short_help="Print the contents of a checkpoint, and check its files.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--tensors", is_flag=True, help="Also print a line for each tensor.")
def checkpoint(path: Path, *, tensors: bool) -> None:
    """Print the contents of a checkpoint: its step, plan, tensors and optimizers.

    PATH is a checkpoint that pipe.save wrote, or a folder of checkpoints that pipe.save wrote with keep=. For a folder
    with more than one checkpoint, the command prints one line for each checkpoint. The command checks all files against
    their hashes. The exit code is 1 if a checkpoint is incomplete or damaged.

    \b
    Example:
      pipesched checkpoint runs/gpt
    """
    folders = [path] if (path / MANIFEST).exists() else checkpoints_in(path)
    if not folders:
        check_no_weights(path)
        raise MissingCheckpointError(f"PATH must contain a checkpoint; {path} has no {MANIFEST}; check the path")
    wrong = 0
    for folder in folders:
        try:
            manifest = Manifest.read(folder)
            contents = _contents(manifest, folder)
        except CheckpointError as error:
            wrong += 1
            click.echo(f"{folder}: incomplete or damaged: {error}")
            continue
        click.echo(
            f"{folder}: step {manifest.step}, complete: {counted(len(manifest.files), 'file')}, "
            f"{quote_bytes(manifest.total_bytes)}"
        )
        if len(folders) == 1:
            _print(manifest, contents)
        if tensors:
            for key, entry in sorted(manifest.tensors.items()):
                click.echo(f"  {key}: {entry.kind}, {entry.dtype} {list(entry.shape)}, {entry.file}")
    if wrong:
        raise click.exceptions.Exit(1)


def _contents(manifest: Manifest, folder: Path) -> list[Any]:
    """Check all files, and return the values of each part of the checkpoint.

    Raises DamagedCheckpointError if a file is missing or damaged.
    """
    paths = [manifest.check(folder, name) for name in sorted(manifest.files)]
    return [parsed(path.read_bytes(), path)["values"] for path in paths if path.suffix == ".json"]


def _print(manifest: Manifest, parts: list[Any]) -> None:
    plan = manifest.plan
    click.echo(
        f"seed {manifest.seed}; saved in {counted(manifest.num_parts, 'part')} by pipesched {manifest.pipesched}, "
        f"torch {manifest.torch}"
    )
    click.echo(
        f"plan: {plan['schedule']}, {counted(plan['num_ranks'], 'rank')}, {counted(len(plan['stages']), 'stage')}, "
        f"checkpoint {plan['checkpoint']!r}"
    )
    click.echo(f"settings: {', '.join(f'{name} {value!r}' for name, value in manifest.settings.items())}")
    for kind in KINDS:
        shapes = [entry.shape for entry in manifest.tensors.values() if entry.kind == kind]
        if shapes:
            click.echo(f"{kind}: {counted(len(shapes), 'tensor')}, {sum(map(prod, shapes)):,} elements")
    for part in parts:
        groups = part.get("groups", ())
        for at, group in enumerate(groups):
            count = sum(entry["group"] == at for entry in part.get("parameters", {}).values())
            if count:
                options = group["options"]["dict"]
                click.echo(f"optimizer: {group['class']} of {counted(count, 'parameter')}, lr {options.get('lr')}")
    for word in ("schedulers", "extra"):
        names = [name for part in parts for name in part.get(word, ())]
        if names:
            click.echo(f"{word}: {', '.join(names)}")
