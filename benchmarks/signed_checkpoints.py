"""Signed checkpoints: loads checkpoints with a changed file whose hashes are right, and checks that a refusal changes
nothing.
"""

import copy
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipesched import Numerics, Pipeline
from pipesched.errors import PipeschedError
from pipesched.saving.chunks import Rows
from pipesched.saving.manifest import MANIFEST, Manifest, dumped
from pipesched.saving.saved_run import CheckpointPart, merged_entries
from pipesched.saving.tensor_files import sharding_info, write_tensors

__all__ = ["KINDS", "RefusedButChangedError", "load_changed", "seeds"]

#: The kinds of checkpoints.
KINDS = ("with a scheduler and extra objects", "with a scaler", "in chunks")
_VALUES, _TENSORS = "part-00000.json", "part-00000.safetensors"


class RefusedButChangedError(Exception):
    """A load was refused, but has changed something."""


class _Kept(nn.Module):
    """A layer with a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(2))
        self.kept: Any = {"seen": 3, "names": ("a", None), "table": torch.arange(3)}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.sum()

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = {"seen": state["seen"], "names": state["names"], "table": state["table"]}


class _Average:
    """An object with a state: averaged weights, and how many."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.count = 5

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count, "array": np.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for name, value in state["values"].items():
            self.values[name].copy_(value)


class Run:
    """A pipeline with everything that a checkpoint of a kind holds."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), _Kept(), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        options: dict[str, Any] = {}
        self.scaler = None
        if kind == "with a scaler":
            self.scaler = torch.amp.GradScaler("cpu")
            options = {"optimizer": torch.optim.AdamW, "numerics": Numerics(scaler=self.scaler)}
        self.pipe = Pipeline(
            self.model,
            x[:4],
            loss_fn=nn.functional.mse_loss,
            devices=["cpu"] * 2,
            schedule="1f1b",
            boundaries=[1],
            num_microbatches=2,
            seed=3,
            **options,
        )
        self.pipe.step(x, target=x)
        self.given: dict[str, Any] = {}
        if kind != "with a scaler":
            weights, biases = ([p for p in self.model.parameters() if p.dim() == dims] for dims in (2, 1))
            groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step] * 2)
            optimizer.step()
            scheduler.step()
            self.given = {"optimizer": optimizer, "scheduler": scheduler, "extra": {"average": _Average(self.model)}}

    @property
    def state(self) -> Any:
        """A copy of everything that a load may change."""
        own = [optimizer.state_dict() for optimizer in self.pipe.optimizers.values()] if self.scaler else []
        given = [one.state_dict() for one in (*self.given.values(), self.scaler) if hasattr(one, "state_dict")]
        extra = [one.state_dict() for one in self.given.get("extra", {}).values()]
        return copy.deepcopy([self.model.state_dict(), own, given, extra])

    def save(self, folder: Path) -> None:
        """Save everything."""
        extra = {**self.given.get("extra", {}), "note": [1, 2.5, "x", (True, None), np.float32(2)]}
        self.pipe.save(folder, **{**self.given, "extra": extra})


@cache
def _saved(kind: str) -> Path:
    """Return the folder of a checkpoint of a kind."""
    folder = Path(tempfile.mkdtemp())
    Run(kind).save(folder)
    if kind == "in chunks":
        _divide(folder)
    return folder


def _divide(folder: Path) -> None:
    """Divide the first weight of a checkpoint into two chunks, in files of their own, as with ``zero=``."""
    manifest = Manifest.read(folder)
    entry = manifest.tensors["parameter/0.weight"]
    whole = torch.randn(entry.shape)
    files, parts = dict(manifest.files), []
    for number, rows in enumerate((Rows(0, 1), Rows(1, entry.shape[0])), 1):
        part = CheckpointPart()
        part.add_rows(
            entry.kind, entry.name, {"parameter/0.weight": whole[rows.start : rows.end]}, rows, entry.shape[0]
        )
        name = f"part-{number:05}.safetensors"
        parts.append({key: one.in_file(name) for key, one in part.entries.items()})
        files[name] = write_tensors(folder / manifest.data / name, part.tensors, sharding_info(parts[-1]))
    rest = {key: own for key, own in manifest.tensors.items() if key != "parameter/0.weight"}
    tensors = merged_entries([rest, *parts], str(folder))
    (folder / MANIFEST).write_bytes(Manifest(**{**vars(manifest), "files": files, "tensors": tensors}).text())


def seeds(kind: str, file: str) -> list[str | bytes]:
    """Return the valid file of a checkpoint: "manifest", "values" or "tensors"."""
    folder = _saved(kind)
    manifest = Manifest.read(folder)
    if file == "manifest":
        values = json.loads((folder / MANIFEST).read_text())
        del values["digest"]
        return [json.dumps(values)]
    data = (folder / manifest.data / (_VALUES if file == "values" else _TENSORS)).read_bytes()
    return [data.decode() if file == "values" else data]


def load_changed(kind: str, file: str, path: Path) -> None:
    """Put a changed file into a checkpoint, sign the checkpoint again, and load it.

    Raises PipeschedError if the load was refused, and RefusedButChangedError if it has changed something all the same.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        shutil.copytree(_saved(kind), folder)
        values = json.loads((folder / MANIFEST).read_text())
        if file == "manifest":
            text = path.read_bytes()
            try:
                values = json.loads(text)
                signed = _signed(values)
            except (ValueError, AttributeError, RecursionError):
                signed = text
            (folder / MANIFEST).write_bytes(signed)
        else:
            name = _VALUES if file == "values" else _TENSORS
            (target,) = folder.glob(f"data-*/{name}")
            target.write_bytes(path.read_bytes())
            digest = hashlib.sha256(target.read_bytes()).hexdigest()
            values["files"][name] = {"bytes": target.stat().st_size, "sha256": digest}
            (folder / MANIFEST).write_bytes(_signed(values))
        _check(kind, folder)


def _signed(values: Any) -> bytes:
    own = {name: value for name, value in values.items() if name != "digest"}
    return dumped({**own, "digest": hashlib.sha256(dumped(own)).hexdigest()})


def _check(kind: str, folder: Path) -> None:
    run, before = _run(kind)
    try:
        run.pipe.load(folder, **run.given)
    except PipeschedError:
        changed = _difference(before, run.state)
        if changed:
            _run.cache_clear()
            raise RefusedButChangedError(f"refused, but changed {changed}") from None
        raise
    except Exception as error:
        changed = _difference(before, run.state)
        _run.cache_clear()
        if changed:
            raise RefusedButChangedError(f"refused, but changed {changed}") from None
        if any("was loading its state" in note for note in getattr(error, "__notes__", ())):
            raise PipeschedError(f"refused by the user's own code: {error!r}") from error
        raise
    _run.cache_clear()  # the load has changed the run


@cache
def _run(kind: str) -> tuple[Run, Any]:
    run = Run(kind)
    for parameter in run.model.parameters():
        parameter.data.fill_(7.0)
    return run, run.state


def _difference(one: Any, other: Any, place: str = "state") -> str:
    """Return the place of the first difference between two states; "" if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (_difference(one[key], other[key], f"{place}/{key}") for key in one)), "")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (_difference(*pair, f"{place}/{at}") for at, pair in pairs)), "")
    same: Callable[[Any, Any], Any] = torch.equal if isinstance(one, Tensor) else np.array_equal
    return "" if type(one) is type(other) and same(one, other) else place
