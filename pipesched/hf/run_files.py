"""Run files: the part of a trainer's checkpoint folder that a pipeline writes, from which any plan resumes."""

import json
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipesched.errors import InputError
from pipesched.saving.manifest import MANIFEST, Manifest

__all__ = ["RunFiles", "random_state", "random_states", "set_random_states", "weights_in"]

_FOLDER = "pipeline"


class RunFiles:
    """The checkpoint of a pipeline in a folder that a trainer has saved."""

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint / _FOLDER

    @property
    def exist(self) -> bool:
        """Whether the trainer saved the state of the run, and not only the weights."""
        return (self.path / MANIFEST).is_file()

    def num_microbatches(self, num_replicas: int) -> int:
        """Return the number of micro-batches of a step in each of ``num_replicas`` pipelines.

        Raises InputError if the number of all replicas together cannot be divided.
        """
        total = int(Manifest.read(self.path).settings["num_microbatches"])
        if total % num_replicas:
            raise InputError(
                f"a run can resume only with the micro-batches with which it started; the run in {self.path} has "
                f"{total} in all replicas, which {num_replicas} replicas cannot share equally; use a number of "
                f"replicas that divides {total}"
            )
        return total // num_replicas


def weights_in(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read the weights that ``save_model`` wrote.

    Args:
        folder: the folder with safetensors files.
        names: the names of the model's parameters. Files of an adapter leave out the adapter's name.

    """
    saved = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    bare = {name.replace(".default.", "."): name for name in names}
    return {name if name in names else bare.get(name, name): tensor for name, tensor in saved.items()}


def random_states() -> str:
    """Return the states of the random generators of Python, numpy and torch, as JSON."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy = [kind, np.asarray(keys).tolist(), *rest]
    state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy, "cpu": torch.get_rng_state().tolist()}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        state[device.type] = torch.get_device_module(device).get_rng_state().tolist()
    return json.dumps(state)


def set_random_states(text: str) -> None:
    """Restore the result of ``random_states``."""
    state = json.loads(text)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in state:
        own = torch.tensor(state[device.type], dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(own)


@contextmanager
def random_state() -> Iterator[None]:
    """Leave the random generators as they are, whatever is drawn inside."""
    state = random_states()
    try:
        yield
    finally:
        set_random_states(state)
