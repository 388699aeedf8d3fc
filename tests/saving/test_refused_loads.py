"""Loads that are refused: by name, whatever the checkpoint holds, and they change nothing."""

import copy
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from pipesched import Numerics, Pipeline
from pipesched.errors import CheckpointError, DamagedCheckpointError, InputError, PipeschedError
from pipesched.saving.manifest import dumped
from pipesched.saving.rollback import Rollback
from tests.support.jobs import refused_loads as jobs
from tests.support.jobs.refused_loads import Average
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Kept(nn.Linear):
    """A layer with an extra state that it loads only if it likes it."""

    kept: Any = 1

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state
        if state == "bad":
            raise RuntimeError("not this state")


class Run:
    """A pipeline with an optimizer, a scheduler and two objects."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Kept(4, 4), Kept(4, 4))
        options: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "boundaries": [1]}
        self.pipe = Pipeline(self.model, X[:4], loss_fn=nn.functional.mse_loss, num_microbatches=2, **options)
        self.pipe.step(X, target=X)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        optimizer.step()
        self.given: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": LambdaLR(optimizer, lambda step: 0.5**step),
            "extra": {"first": Average(likes=True), "second": Average(likes=True)},
        }

    def moved(self) -> None:
        """Change everything after a save."""
        self.pipe.step(X, target=X)
        self.given["optimizer"].step()
        self.given["scheduler"].step()
        for module in self.model:
            module.kept = 2
        for one in self.given["extra"].values():
            one.value += 1

    @property
    def state(self) -> Any:
        states = [one.state_dict() for one in (self.given["optimizer"], self.given["scheduler"])]
        own = {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
        extra = [one.value for one in self.given["extra"].values()]
        kept = [module.kept for module in self.model]
        return copy.deepcopy(repr([own, states, extra, kept, self.pipe._running.step]))


def manifest_of(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "manifest.json").read_text())
    del values["digest"]
    return values


def sign(folder: Path, values: dict[str, Any]) -> None:
    (folder / "manifest.json").write_bytes(dumped({**values, "digest": hashlib.sha256(dumped(values)).hexdigest()}))


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.pop(name)


def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values["tensors"]["parameter/1.weight"].update(changes)


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "data outside": lambda values: values.update(data=".."),
    "data with NUL": lambda values: values.update(data="data-\0"),
    "a long data name": lambda values: values.update(data="d" * 5000),
    "a step that is text": lambda values: values.update(step="x"),
    "a step below 0": lambda values: values.update(step=-5),
    "a step that is a fraction": lambda values: values.update(step=1.5),
    "a seed that is no number": lambda values: values.update(seed="x"),
    "settings that are a list": lambda values: values.update(settings=[1]),
    "no micro-batches": lambda values: values["settings"].update(num_microbatches="2"),
    "no tensors": without("tensors"),
    "no files": without("files"),
    "files that are a list": lambda values: values.update(files=[1, 2]),
    "a file outside": lambda values: values["files"].update({"../x.json": {"bytes": 1, "sha256": ""}}),
    "a size that is text": lambda values: values["files"]["part-00000.json"].update(bytes="7"),
    "an unknown field": lambda values: values.update(more=1),
    "an entry in another file": entry(file="part-00007.safetensors"),
    "an entry of text": entry(shape="44"),
    "an entry below 0": entry(shape=[-4, 4]),
    "another dtype": entry(dtype="float99"),
    "a dtype that is no dtype": entry(dtype="nn"),
    "another kind": entry(kind="weight"),
    "chunks of text": entry(chunks="x"),
    "chunks that are not the whole": entry(
        chunks=[{"file": "part-00000.safetensors", "offsets": [0, 0], "sizes": [1, 4]}]
    ),
    "chunks without dimensions": entry(chunks=[{"file": "part-00000.safetensors", "offsets": [], "sizes": []}]),
}


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    run = Run()
    run.pipe.save(tmp_path, **run.given)
    run.moved()
    yield run, tmp_path
    run.pipe.close()


def refused(run: Run, folder: Path, kind: type[Exception] = PipeschedError, match: str | None = None) -> None:
    before = run.state
    with pytest.raises(kind, match=match):
        run.pipe.load(folder, **run.given)
    assert run.state == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_wrong_and_signed_is_refused(saved: Any, name: str) -> None:
    run, folder = saved
    values = manifest_of(folder)
    MANIFESTS[name](values)
    sign(folder, values)
    refused(run, folder, CheckpointError)


VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no values": without("values"),
    "groups that are a number": lambda content: content["values"].update(groups=3),
    "no class": lambda content: content["values"]["groups"][0].pop("class"),
    "a group that does not exist": lambda content: content["values"]["parameters"]["0.weight"].update(group=9),
    "a group of text": lambda content: content["values"]["parameters"]["0.weight"].update(group="0"),
    "a learning rate of text": lambda content: content["values"]["groups"][0]["options"]["dict"].update(lr="x"),
    "options that are a list": lambda content: content["values"]["groups"][0].update(options=[1]),
    "a state without a tensor": lambda content: content["values"]["parameters"]["0.weight"].update(
        state={"dict": {"exp_avg": {"tensor": "nobody"}}}
    ),
    "a state of an unknown form": lambda content: content["values"]["modules"].update({"0": {"what": 1}}),
    "no state of a module": lambda content: content["values"]["modules"].pop("0"),
    "a scheduler without a state": lambda content: next(iter(content["values"]["schedulers"].values())).pop("state"),
    "a scheduler that misses something": lambda content: next(iter(content["values"]["schedulers"].values())).update(
        state={"dict": {}}
    ),
    "extra of text": lambda content: content["values"].update(extra="x"),
    "an object of a class that is unhashable": lambda content: content["values"]["extra"]["first"].update(
        value={"pairs": [[[1], 2]]}
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_wrong_and_signed_are_refused(saved: Any, name: str) -> None:
    run, folder = saved
    (file,) = folder.glob("data-*/part-00000.json")
    content = json.loads(file.read_text())
    VALUES[name](content)
    file.write_bytes(dumped(content))
    values = manifest_of(folder)
    values["files"][file.name] = {
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    sign(folder, values)
    refused(run, folder, CheckpointError)


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.json", "part-00000.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(saved: Any, name: str) -> None:
    run, folder = saved
    (file,) = [path for path in folder.rglob("*") if path.name == name]
    file.unlink()
    os.mkfifo(file)
    refused(run, folder, DamagedCheckpointError, "it is not a file")


def test_a_module_that_refuses_its_state_changes_nothing(tmp_path: Path) -> None:
    run = Run()
    run.model[1].kept = "bad"
    run.pipe.save(tmp_path, **run.given)
    run.moved()
    refused(run, tmp_path, RuntimeError, "not this state")


def test_an_object_that_refuses_its_state_changes_nothing(saved: Any) -> None:
    run, folder = saved
    run.given["extra"]["second"].likes = False
    refused(run, folder, KeyError, "count")


def test_an_error_of_one_rank_changes_nothing_on_any(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.one_rank_refuses, str(tmp_path)) == [("a failure of rank 1", True), ("KeyError", True)]


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800", "/proc/1/mem/x"])
def test_a_path_that_cannot_be_is_refused(saved: Any, path: str) -> None:
    run, _ = saved
    for call in (lambda: run.pipe.load(path), lambda: run.pipe.save(path), lambda: run.pipe.save_weights(path)):
        with pytest.raises((CheckpointError, InputError)):
            call()


def test_a_name_that_no_file_can_hold_is_refused(saved: Any) -> None:
    run, folder = saved
    with pytest.raises(InputError, match="names in extra must be valid Unicode"):
        run.pipe.save(folder, extra={"\ud800": 1})
    with pytest.raises(CheckpointError, match=r"is of type builtins\.str"):
        run.pipe.save(folder, extra={"kept": {"\ud800": torch.ones(2)}})


def test_a_buffer_that_a_module_changes_before_it_refuses_is_restored(tmp_path: Path) -> None:
    class Scaled(Kept):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("scale", torch.ones(2))

        def set_extra_state(self, state: Any) -> None:
            self.scale.fill_(5)
            super().set_extra_state(state)

    model = nn.Sequential(Scaled(), Scaled())
    with Pipeline(model, X[:4], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        model[1].kept = "bad"
        pipe.save(tmp_path)
        with pytest.raises(RuntimeError, match="not this state"):
            pipe.load(tmp_path)
        assert all(module.scale.tolist() == [1, 1] for module in model)


def test_a_thread_that_goes_on_after_a_rollback_is_undone_again() -> None:
    done: list[str] = []
    rollback = Rollback()
    rollback.remember(lambda: "before", done.append)
    rollback.undo()
    done.append("a late change")
    with pytest.raises(CheckpointError, match="a load that was given up"):
        rollback.check()
    assert done == ["before", "a late change", "before"]


def test_a_value_that_cannot_be_copied_does_not_prevent_the_rollback_of_others() -> None:
    state, found = {"value": torch.zeros(2), "lock": threading.Lock()}, []
    rollback = Rollback()
    rollback.remember(lambda: state, found.append)
    state["value"] += 1
    rollback.undo()
    assert found[0]["value"].tolist() == [0, 0]
    assert found[0]["lock"] is state["lock"]


def test_options_of_any_number_type_and_a_multi_step_scheduler_come_back(tmp_path: Path) -> None:
    run = Run()
    optimizer = run.given["optimizer"]
    optimizer.param_groups[0].update(lr=np.float32(0.01), mine=0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    run.pipe.save(tmp_path, optimizer=optimizer, scheduler=scheduler)
    scheduler.milestones.clear()
    optimizer.param_groups[0].update(mine=None)
    run.pipe.load(tmp_path, optimizer=optimizer, scheduler=scheduler)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["mine"]) == (np.float32(0.01), 0)
    assert scheduler.milestones == Counter({1: 2, 3: 1})


def test_a_scaler_with_more_than_plain_values_is_refused_in_save(tmp_path: Path) -> None:
    class Scaler(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"own": torch.ones(2)}

    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "numerics": Numerics(scaler=Scaler("cpu"))}
    with (
        Pipeline(nn.Sequential(nn.Linear(4, 4)), X, loss_fn=nn.functional.mse_loss, devices=["cpu"], **options) as pipe,
        pytest.raises(CheckpointError, match="the state of a scaler must hold only plain values"),
    ):
        pipe.save(tmp_path)
