"""Exported weights: writes a model's weights in the format of Hugging Face's save_pretrained, one file per process."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipesched.runtime.rank_host import RankHost
from pipesched.saving.collective_work import agreed, in_all
from pipesched.saving.folders import sync_folder
from pipesched.saving.manifest import dumped
from pipesched.saving.tensor_files import plain, write_tensors
from pipesched.saving.whole_tensors import WholeTensors
from pipesched.saving.writing import explained
from pipesched.whole_files import write_whole

__all__ = ["export_weights"]

_INDEX = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_ONLY = "model.safetensors"  #: the name of a file that holds all weights
_METADATA = {"format": "pt"}  # required by transformers


def export_weights(
    folder: Path, weights: Mapping[str, Tensor], model: nn.Module, host: RankHost, process: int, wholes: WholeTensors
) -> None:
    """Write a model's weights to a folder: one file for each process that has weights. Collective.

    An index is added if there are several files.

    Args:
        folder: the folder. Weights that are already in the folder are replaced.
        weights: the parameters and buffers that this process writes, keyed by their names in the model's
            ``state_dict``. The processes of all planes pass the same names.
        model: the model. Its configuration is also saved if the configuration has a ``save_pretrained`` method.
        host: the RankHost that runs the ranks of this process.
        process: the index of this process.
        wholes: makes the whole tensors of those weights that are blocks.

    Raises:
        CheckpointError: writing failed. All processes raise this error.

    """

    def begin() -> tuple[list[str], int]:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: plain(tensor, repr(name)) for name, tensor in weights.items()}
        sizes = [math.prod(wholes.shape(name, own)) * own.element_size() for name, own in tensors.items()]
        return (list(tensors), sum(sizes)) if not host.grid.plane else ([], 0)

    shares = host.collectives.gathered_in_all(agreed(host, begin))
    givers = [rank for rank, (names, _) in enumerate(shares) if names]
    files = {rank: f"model-{at:05}-of-{len(givers):05}.safetensors" for at, rank in enumerate(givers, 1)}
    if len(files) == 1:
        files = dict.fromkeys(files, _ONLY)

    def write() -> None:
        try:
            if process in files:
                with explained(folder):
                    write_tensors(folder / f"{files[process]}.tmp", weights, _METADATA, wholes)
        finally:
            wholes.finish()

    def finish() -> None:
        if process == 0:
            index = {
                "metadata": {"total_size": sum(size for _, size in shares)},
                "weight_map": {name: files[rank] for rank in givers for name in shares[rank][0]},
            }
            with explained(folder):
                _finish(folder, list(files.values()), index)
            _save_configuration(folder, model)

    try:
        in_all(host, write)
    except BaseException:
        with suppress(OSError, KeyError):
            (folder / f"{files[process]}.tmp").unlink()
        raise
    in_all(host, finish)


def _finish(folder: Path, files: list[str], index: Any) -> None:
    """Rename the written files and write their index, if there are several files.

    The old index is removed first, so that no reader uses the old index with new files.
    """
    with suppress(FileNotFoundError):
        (folder / _INDEX).unlink()
    for name in files:
        os.replace(folder / f"{name}.tmp", folder / name)
    for path in (*folder.glob(_SHARDS), folder / _ONLY):
        if path.name not in files:
            path.unlink(missing_ok=True)
    if files != [_ONLY]:
        write_whole(folder / _INDEX, dumped(index))
    sync_folder(folder)


def _save_configuration(folder: Path, model: nn.Module) -> None:
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            save(folder)
