"""Saving and loading: the folder, the names, and every error by name."""

import gc
import json
import re
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from pipesched import Numerics, Pipeline, StepLog
from pipesched.errors import CheckpointError, DamagedCheckpointError, InputError, MissingCheckpointError
from pipesched.saving import writing
from tests.support import places
from tests.support.jobs import saving as jobs
from tests.support.jobs.saving import X, Y, layers
from tests.support.models import assert_equal_bits
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def piped(model: Any = None, *, ranks: int = 2, **options: Any) -> Pipeline:
    return jobs.piped(places.OneProcess(ranks), model, **options)


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())


# ---- the folder -----------------------------------------------------------------------------------------------------


def test_a_save_replaces_the_checkpoint_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with piped() as pipe:
        for step in (1, 2):
            pipe.step(X, target=Y)
            pipe.save(tmp_path / "run")
            assert manifest(tmp_path / "run")["step"] == step
            (data,) = (tmp_path / "run").glob("data-*")
            assert {path.name for path in (tmp_path / "run").iterdir()} == {"manifest.json", data.name}
            assert {path.name for path in data.iterdir()} == {"part-00000.json", "part-00000.safetensors"}


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with piped() as pipe:
        pipe.save(tmp_path)
        (tmp_path / "data-0123456789abcdef").mkdir()
        (tmp_path / "data-0123456789abcdef" / "part-00000.safetensors").write_bytes(b"half")
        (tmp_path / "manifest.json.00ff00ff.tmp").write_bytes(b"{")
        (tmp_path / "notes.txt").write_text("the user's own")
        pipe.save(tmp_path)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["data", "manifest.json", "notes.txt"]


def test_keep_keeps_the_newest_and_load_takes_the_newest_whole_one(tmp_path: Path) -> None:
    with piped() as pipe:
        for _ in range(4):
            pipe.step(X, target=Y)
            pipe.save(tmp_path, keep=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
        shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000009")
        (tmp_path / "step-00000009" / "manifest.json").unlink()  # a save that was killed
        with pytest.warns(
            UserWarning,
            match=r"step-00000009 has none, because the save was interrupted.*; load now tries the previous",
        ):
            assert pipe.load(tmp_path).step == 4
        part = next((tmp_path / "step-00000004").rglob("*.safetensors"))
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        match = r"step-00000004/data-\w+/part-00000.safetensors is damaged: its content"
        with pytest.warns(UserWarning, match=match), pytest.warns(UserWarning, match="step-00000009"):
            assert pipe.load(tmp_path).step == 3
        pipe.step(X, target=Y)
        with pytest.raises(DamagedCheckpointError, match="step-00000004"):
            pipe.load(tmp_path / "step-00000004")
        assert pipe.load(tmp_path / "step-00000003").step == 3


def test_a_path_has_one_checkpoint_or_several(tmp_path: Path) -> None:
    with piped() as pipe:
        pipe.save(tmp_path / "one")
        pipe.save(tmp_path / "several", keep=1)
        with pytest.raises(InputError, match=r"several holds 1 folder such as step-00000000; pass keep="):
            pipe.save(tmp_path / "several")
        with pytest.raises(InputError, match=r"one is a single checkpoint; leave keep= out"):
            pipe.save(tmp_path / "one", keep=1)
        for keep in (0, True, "3"):
            with pytest.raises(InputError, match="keep= must be the number of checkpoints to keep, at least 1"):
                pipe.save(tmp_path / "several", keep=keep)  # type: ignore[arg-type]


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with piped() as pipe:
        with pytest.raises(FileNotFoundError, match="nowhere does not exist; check the path, or save a checkpoint"):
            pipe.load(tmp_path / "nowhere")
        with pytest.raises(MissingCheckpointError, match=r"has neither manifest.json nor folders with one"):
            pipe.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("plain.pt", "plain.pt"),
        ("plain", "plain"),  # a file of torch.save without a suffix
        ("weights.safetensors", "weights.safetensors"),
        ("hub/model.safetensors", "hub"),
        ("hub/pytorch_model.bin", "hub"),
        ("runs/checkpoint-500/model.safetensors", "runs"),
    ],
)
def test_weights_that_save_did_not_write_are_no_missing_checkpoint(tmp_path: Path, name: str, given: str) -> None:
    """A script that starts at step 0 if the checkpoint is missing must not do so. The remedy works."""
    weights = layers().state_dict()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(weights, tmp_path / name)
    else:
        torch.save(weights, tmp_path / name)
    with piped(layers()) as pipe:
        pipe.step(X, target=Y)
        with pytest.raises(CheckpointError, match="is a file of weights, without a step, a seed and a plan") as caught:
            pipe.load(tmp_path / given)
        assert not isinstance(caught.value, FileNotFoundError)
        remedy = re.search(r"load weights with pipe\.(load_state_dict\(.*?\)\)),", str(caught.value))[1]
        for parameter in pipe.parameters():
            parameter.data.zero_()
        eval(f"pipe.{remedy}", {"pipe": pipe, "torch": torch, "safetensors": safetensors})
        assert_equal_bits(pipe.state_dict(), weights)


def test_what_is_no_folder_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    with piped() as pipe:
        pipe.save(tmp_path / "run")
        (data,) = (tmp_path / "run").glob("data-*")
        (tmp_path / "notes.txt").write_text("the user's own")
        for path, said in (
            (
                tmp_path / "run" / "manifest.json",
                f"is a part of a checkpoint; pass the checkpoint's folder, {tmp_path}/run",
            ),
            (data, f"is a part of a checkpoint; pass the checkpoint's folder, {tmp_path}/run"),
            (
                data / "part-00000.safetensors",
                f"is a part of a checkpoint; pass the checkpoint's folder, {tmp_path}/run",
            ),
            (tmp_path / "notes.txt", "notes.txt is a file; pass a folder"),
        ):
            with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
                pipe.load(path)
            assert not isinstance(caught.value, MissingCheckpointError)
        with pytest.raises(InputError, match=r"got 'run'; pass the tensors, such as torch.load\(path\), or load a"):
            pipe.load_state_dict("run")  # type: ignore[arg-type]


def test_a_run_that_was_killed_in_its_first_save_starts_again(tmp_path: Path) -> None:
    """Also if the folder has files that are no weights, such as logs."""
    with piped() as pipe:
        pipe.save(tmp_path / "one")
        pipe.save(tmp_path / "several", keep=2)
        (tmp_path / "one" / "manifest.json").unlink()
        (tmp_path / "several" / "step-00000000" / "manifest.json").unlink()
        (tmp_path / "one" / "log.csv").write_text("step,loss")
        for name in ("one", "several"):
            with pytest.raises(MissingCheckpointError, match=r"has neither manifest.json nor folders with one"):
                pipe.load(tmp_path / name)


def test_over_a_mesh_every_rank_is_told_of_a_file_of_weights(ranks: Ranks, tmp_path: Path) -> None:
    torch.save(layers().state_dict(), tmp_path / "plain.pt")
    for said in ranks.run(2, jobs.load_error, str(tmp_path / "plain.pt")):
        assert said.startswith("CheckpointError: ")
        assert "is a file of weights" in said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("functions", [["write_tensors"], ["write_whole"], ["write_tensors", "write_whole"]])
def test_a_full_disk_leaves_the_checkpoint_and_says_so(
    tmp_path: Path, asynchronous: bool, functions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is no room for the report that the save failed. Nothing waits for that report."""

    def full(path: Path, *args: Any) -> None:
        path.write_bytes(b"some of it")
        raise OSError(28, "No space left on device", str(path))

    def waits(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    with piped() as pipe:
        pipe.save(tmp_path)
        pipe.step(X, target=Y)
        for function in functions:
            monkeypatch.setattr(writing, function, full)
        monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waits))
        match = r"part-00000\.\w+ failed \(No space left on device, .* free\); .* intact; free space, or pass"
        if asynchronous:
            pipe.save(tmp_path, asynchronous=True)
        with pytest.raises(CheckpointError, match=match):
            pipe.load(tmp_path) if asynchronous else pipe.save(tmp_path)
        assert len(list(tmp_path.glob("data-*"))) == 1
        assert pipe.load(tmp_path).step == 0


def test_an_asynchronous_save_holds_the_weights_of_its_step(tmp_path: Path) -> None:
    """Also where the user or the next step changes them before they are written; close() waits."""
    model = layers()
    pipe = piped(model, optimizer=torch.optim.Adam)
    pipe.step(X, target=Y)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(pipe.parameters())
    pipe.save(tmp_path, asynchronous=True)
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    pipe.step(X, target=Y)
    pipe.close()
    with piped(layers(3), ranks=3, optimizer=torch.optim.Adam) as other:
        assert other.load(tmp_path).step == 1
        assert_equal_bits(other.model.state_dict(), expected)


def test_steps_and_saves_leave_no_objects_behind(tmp_path: Path) -> None:
    rounds = 5
    with piped() as pipe:
        adam = torch.optim.AdamW(pipe.parameters())
        log = StepLog(pipe, every=2, show=lambda _: None)

        def count() -> Counter[str]:
            for step in range(2 * rounds):
                log(pipe.step(X, target=Y), step=step)
                pipe.clip_grad_norm_(1.0)
                adam.step()
                adam.zero_grad()
                if step % 2:
                    pipe.evaluate(X, target=Y)
                    pipe.save(tmp_path, optimizer=adam, keep=2, asynchronous=True)
            pipe.save(tmp_path, optimizer=adam, keep=2)
            gc.collect()
            return Counter(type(each).__name__ for each in gc.get_objects())

        count()
        before, after = count(), count()
    assert [kind for kind, number in (after - before).items() if number >= rounds] == []


# ---- what is saved --------------------------------------------------------------------------------------------------


class Cached(nn.Module):
    """A layer with a cache that no state_dict has, and a counter outside of its buffers."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.count = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "history": torch.arange(self.count)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["history"].tolist() == list(range(self.count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + self.cache.sum())


def test_caches_and_extra_states_of_modules_are_saved(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), Cached(), Cached()) for _ in range(2)]
    models[0][2].count = 5
    models[0][1].cache = torch.ones(3)
    with piped(models[0]) as pipe:
        pipe.save(tmp_path)
    with piped(models[1]) as pipe:
        pipe.load(tmp_path)
    assert [part.count for part in models[1][1:]] == [0, 5]
    assert models[1][1].cache.tolist() == [1, 1, 1]


def test_names_are_the_models_own_without_wrappers(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    wrapped = Wrapper(layers())
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4}
    with Pipeline(wrapped, X[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, **options) as pipe:
        pipe.save(tmp_path)
    names = [entry["name"] for entry in manifest(tmp_path)["tensors"].values()]
    assert sorted(names) == sorted(layers().state_dict())
    with piped(layers(8)) as pipe:
        pipe.load(tmp_path)
        assert_equal_bits(pipe.model.state_dict(), layers().state_dict())


def test_the_loss_module_and_its_options_belong_to_the_run(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output - target).square().mean() * self.scale.sum()

    def made(loss_fn: Any) -> Pipeline:
        return Pipeline(
            layers(), X[:2], loss_fn=loss_fn, devices=["cpu"] * 2, schedule="1f1b", boundaries=[2], num_microbatches=4
        )

    losses = [Scaled(), Scaled()]
    with torch.no_grad():
        losses[0].scale.fill_(3)
    with made(losses[0]) as pipe:
        pipe.save(tmp_path)
    with made(losses[1]) as pipe:
        pipe.load(tmp_path)
        assert losses[1].scale.tolist() == [3, 3]
    with made(nn.HuberLoss(delta=2.0)) as pipe, pytest.raises(CheckpointError, match=r"loss is '.*Scaled\(\)' in .*"):
        pipe.load(tmp_path)


def test_settings_that_determine_results_must_be_the_saved_ones(tmp_path: Path) -> None:
    with piped() as pipe:
        pipe.save(tmp_path)
    with (
        piped(num_microbatches=2) as pipe,
        pytest.raises(CheckpointError, match=r"num_microbatches is 4 in .*, but 2 "),
    ):
        pipe.load(tmp_path)
    with (
        piped(numerics=Numerics(intra_op_threads=2)) as pipe,
        pytest.raises(CheckpointError, match=r"pass numerics=Numerics\(intra_op_threads=1\) to Pipeline"),
    ):
        pipe.load(tmp_path)


def test_missing_and_foreign_tensors_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    with piped() as pipe:
        pipe.save(tmp_path)
    cases = [
        (layers(count=3), r"\(only in the checkpoint: '3.bias', '3.weight'\); build the model that was saved"),
        (layers(count=5), "only in the model: '4.bias', '4.weight'"),
        (layers().double(), r"'0.weight' is float32 of shape \[4, 4\] in .*, but float64"),
        (nn.Sequential(*layers()[:3], nn.Linear(4, 5)), r"'3.weight' .* but float32 of shape \[5, 4\]"),
    ]
    for model, match in cases:
        target = {"loss_fn": nn.functional.mse_loss, "schedule": "1f1b", "num_microbatches": 4, "boundaries": [2]}
        with Pipeline(model, X[:2].to(next(model.parameters()).dtype), devices=["cpu"] * 2, **target) as pipe:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(CheckpointError, match=match):
                pipe.load(tmp_path)
            assert_equal_bits(model.state_dict(), before)


# ---- optimizers and schedulers --------------------------------------------------------------------------------------


def groups(pipe: Pipeline, lr: float = 0.1) -> torch.optim.Optimizer:
    named = list(pipe.named_parameters())
    first = [parameter for name, parameter in named if name.endswith("bias")]
    second = [parameter for name, parameter in named if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": first, "weight_decay": 0.0}, {"params": second}], lr=lr)


def test_options_belong_to_parameters_and_a_group_takes_its_own(tmp_path: Path) -> None:
    with piped() as pipe:
        optimizer = groups(pipe)
        pipe.step(X, target=Y)
        optimizer.step()
        optimizer.param_groups[1]["lr"] = 0.05
        pipe.save(tmp_path, optimizer=optimizer)
    with piped(ranks=3) as pipe:
        other = groups(pipe, lr=9.0)
        pipe.load(tmp_path, optimizer=other)
        assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.1, 0.0), (0.05, 0.01)]
        one = torch.optim.AdamW(pipe.parameters())
        match = "'0.weight' and '0.bias' are now in one group of AdamW, but in .*, lr is 0.05 for the first and 0.1 for"
        with pytest.raises(CheckpointError, match=match):
            pipe.load(tmp_path, optimizer=one)
        with pytest.raises(
            CheckpointError,
            match=r"'0.weight' was trained by AdamW in .*, but is now in an optimizer of class Adam; use AdamW",
        ):
            pipe.load(tmp_path, optimizer=torch.optim.Adam(pipe.parameters()))
        part = torch.optim.AdamW(list(pipe.parameters())[:1])
        with pytest.raises(CheckpointError, match=r"these are not: '0.bias' and 6 more; unfreeze frozen"):
            pipe.load(tmp_path, optimizer=part)
        assert not part.state


def test_several_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    with piped() as pipe:
        parameters = list(pipe.parameters())
        pipe.step(X, target=Y)
        both = [torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9), torch.optim.Adam(parameters[2:])]
        for optimizer in both:
            optimizer.step()
        pipe.save(tmp_path, optimizer=both)
        others = [torch.optim.Adam(parameters[2:]), torch.optim.SGD(parameters[:2], lr=0.2, momentum=0.5)]
        pipe.load(tmp_path, optimizer=others)
        for one, other in zip(both, reversed(others), strict=True):
            assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
            for parameter in one.param_groups[0]["params"]:
                assert_equal_bits(other.state[parameter], one.state[parameter])
        with pytest.raises(CheckpointError, match=r"'0.weight' is in two optimizers; remove it from one"):
            pipe.save(tmp_path, optimizer=[both[0], both[0]])


def test_optimizers_that_cannot_be_divided_or_are_foreign_are_refused(tmp_path: Path) -> None:
    with piped() as pipe:
        with pytest.raises(CheckpointError, match="LBFGS has one state for all parameters"):
            pipe.save(tmp_path, optimizer=torch.optim.LBFGS(pipe.parameters()))
        with pytest.raises(CheckpointError, match=r"group 0 of SGD holds another parameter, of shape \[4, 4\]"):
            pipe.save(tmp_path, optimizer=torch.optim.SGD(layers().parameters()))
        with pytest.raises(InputError, match=r"optimizer must be a torch.optim.Optimizer, or a list or dict"):
            pipe.save(tmp_path, optimizer=3)  # type: ignore[arg-type]
        pipe.save(tmp_path)
        with pytest.raises(
            CheckpointError, match="was saved without optimizer=; leave out optimizer=, or save a checkpoint with"
        ):
            pipe.load(tmp_path, optimizer=torch.optim.SGD(pipe.parameters()))
    with piped(optimizer=torch.optim.Adam) as pipe:
        with pytest.raises(
            InputError, match="it has 2 optimizers, and a different optimizer was passed; leave optimizer= out"
        ):
            pipe.save(tmp_path, optimizer=torch.optim.Adam(pipe.parameters()))
        pipe.save(tmp_path, optimizer=pipe.optimizers)


def test_a_load_without_a_saved_optimizer_warns(tmp_path: Path) -> None:
    with piped() as pipe:
        optimizer = groups(pipe)
        scheduler = ExponentialLR(optimizer, 0.9)
        pipe.save(tmp_path, optimizer=optimizer, scheduler=scheduler, extra={"loader": optimizer, "epoch": 3})
        text = r"also holds the optimizer states of 8 parameters \(optimizer=\), the states of the schedulers"
        with pytest.warns(UserWarning, match=rf"{text} \(scheduler=\), the state of 'loader' \(extra=\); pass the"):
            assert pipe.load(tmp_path).extra["epoch"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: OneCycleLR(optimizer, 0.3, 20),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
        lambda optimizer: SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.5)], [2]),
    ],
)
def test_schedulers_continue(tmp_path: Path, make: Any) -> None:
    def train(optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        rates = []
        for step in steps:
            optimizer.step()
            scheduler.step(*([float(step % 3)] if isinstance(scheduler, ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    with piped() as pipe:
        runs = [(optimizer := groups(pipe), make(optimizer)) for _ in range(3)]
        expected = train(*runs[0], range(8))
        train(*runs[1], range(4))
        pipe.save(tmp_path, optimizer=runs[1][0], scheduler=runs[1][1])
        pipe.load(tmp_path, optimizer=runs[2][0], scheduler=runs[2][1])
        assert train(*runs[2], range(4, 8)) == expected[4:]
        with pytest.raises(CheckpointError, match=r"but StepLR was passed; pass "):
            pipe.load(
                tmp_path, optimizer=runs[2][0], scheduler=torch.optim.lr_scheduler.StepLR(runs[2][0], step_size=1)
            )


def test_the_scaler_continues_with_its_scale(tmp_path: Path) -> None:
    def made(scaler: Any) -> Pipeline:
        sgd: Any = partial(torch.optim.SGD, lr=0.1)
        return piped(optimizer=sgd, numerics=Numerics(scaler=scaler) if scaler else None)

    scaler = GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    with made(scaler) as pipe:
        for _ in range(3):
            pipe.step(X, target=Y)
        pipe.save(tmp_path)
    other = GradScaler("cpu", init_scale=2.0**9, growth_interval=7)
    with made(other) as pipe:
        pipe.load(tmp_path)
        assert other.state_dict() == scaler.state_dict()
        assert (other.get_scale(), other.state_dict()["_growth_tracker"]) == (2.0**5, 1)
    with made(None) as pipe:
        with pytest.warns(UserWarning, match=r"also holds the state of the scaler"):
            pipe.load(tmp_path)
        pipe.save(tmp_path)
    with made(other) as pipe, pytest.raises(CheckpointError, match="was saved without scaler="):
        pipe.load(tmp_path)


def test_schedulers_by_stage_that_differ_stay_with_their_stages(tmp_path: Path) -> None:
    def made(ranks: int) -> tuple[Pipeline, dict[int, Any]]:
        pipe = piped(ranks=ranks, optimizer=torch.optim.Adam)
        return pipe, {stage: ExponentialLR(own, 0.9) for stage, own in pipe.optimizers.items()}

    pipe, schedulers = made(2)
    with pipe:
        pipe.step(X, target=Y)
        schedulers[1].step()
        pipe.save(tmp_path, scheduler=schedulers)
    pipe, schedulers = made(2)
    with pipe:
        pipe.load(tmp_path, scheduler=list(schedulers.values()))
        assert [one.last_epoch for one in schedulers.values()] == [0, 1]
    pipe, schedulers = made(4)
    with pipe, pytest.raises(CheckpointError, match="different states for stage 0, stage 1, and none for stage 2"):
        pipe.load(tmp_path, scheduler=schedulers)


# ---- extra ----------------------------------------------------------------------------------------------------------


def test_extra_values_come_back_with_their_types(tmp_path: Path) -> None:
    values = {
        "numbers": [1, -(2**70), 0.1, float("inf"), -float("inf"), -0.0, True, None, "text ü"],
        "tuple": (1, (2.0, "x"), []),
        3: {(1, 2): "by tuple", "3": "text"},
        "tensors": {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor(1.5, dtype=torch.bfloat16)},
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j, -3j], dtype=torch.complex128),
        "numpy": [np.float32(0.1), np.arange(4, dtype=np.uint16).reshape(2, 2), np.empty((0, 2))],
    }
    with piped() as pipe:
        pipe.save(tmp_path, extra={"values": values, "nan": float("nan")})
        found = pipe.load(tmp_path).extra
    assert found["nan"] != found["nan"]

    def same(one: Any, other: Any) -> None:
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        elif isinstance(one, np.ndarray | np.generic):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        elif isinstance(one, dict):
            assert list(one) == list(other)
            for key in one:
                same(one[key], other[key])
        elif isinstance(one, list | tuple):
            assert len(one) == len(other)
            for pair in zip(one, other, strict=True):
                same(*pair)
        else:
            assert repr(one) == repr(other)

    same(found["values"], values)


def test_extra_values_of_other_types_are_refused_by_place_and_type(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    cases: list[tuple[Any, str]] = [
        ({"a": [1, {2}]}, r"extra/own\['a'\]\[1\] is of type builtins.set"),
        (lambda: 0, "extra/own is of type builtins.function"),
        (b"bytes", "is of type builtins.bytes"),
        ("\ud800", "is of type builtins.str"),
        (loop, "nested at most 24 levels deep"),
        (torch.zeros(2, device="meta"), "extra/own is on the meta device"),
        (torch.eye(2).to_sparse(), "extra/own is a Tensor of layout torch.sparse_coo"),
    ]
    with piped() as pipe:
        for value, match in cases:
            with pytest.raises(CheckpointError, match=match):
                pipe.save(tmp_path / "run", extra={"own": value})
        assert not (tmp_path / "run").exists()
        pipe.save(tmp_path, extra={"own": 1})
        with pytest.raises(CheckpointError, match=r"no state for 'other' \(it has: 'own'\); leave that object out"):
            pipe.load(tmp_path, extra={"other": groups(pipe)})
        with pytest.raises(InputError, match=r"'own' is 1; leave it out, and read the saved value from the result"):
            pipe.load(tmp_path, extra={"own": 1})


def test_an_object_that_refuses_its_state_leaves_the_pipeline_unchanged(tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not this one")

    with piped() as pipe:
        pipe.save(tmp_path, extra={"picky": Picky()})
        pipe.step(X, target=Y)
        with pytest.raises(ValueError, match="not this one") as caught:
            pipe.load(tmp_path, extra={"picky": Picky()})
        assert caught.value.__notes__ == ["while the object 'picky' in extra= was loading its state from a checkpoint"]
        assert pipe._running.step == 1


# ---- over a mesh ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (3, 1)])
def test_averaged_weights_follow_their_names(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    def run(count: int, job: Any) -> list[Any]:
        return ranks.run(count, job, str(tmp_path)) if count > 1 else places.run_here(2, job, str(tmp_path))

    run(before, jobs.save_average)
    found = {name: value for own in run(after, jobs.load_average) for name, value in own.items()}
    assert_equal_bits(found, {name: value * 10 for name, value in layers().state_dict().items()})


def test_extras_that_differ_between_ranks_are_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for place, noise, name, odd, way in ranks.run(2, jobs.different_extras, str(tmp_path)):
        assert "'loader' differs between rank 0 and rank 1 at loader['value']['place'][1]" in place
        assert "'loader' differs between rank 0 and rank 1 at loader['value']['noise']" in noise
        assert "'mine' was passed on rank 1, but not on rank 0" in name
        assert "extra/odd is of type builtins.object" in odd
        assert "ranks 0 to 1 passed (asynchronous, keep) = (False, None), (True, None); pass the same" in way


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write_fails_all(ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    for error, step, left in ranks.run(2, jobs.failing_rank, str(tmp_path), asynchronous):
        assert "part-00001.safetensors failed (No space left on device" in error
        assert step == 1
        assert left == ["data", "manifest.json"]


def test_a_misfit_and_a_damaged_part_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, jobs.save_steps, str(tmp_path), 1)
    for count, dtype, number in ranks.run(2, jobs.loads_misfits, str(tmp_path)):
        assert "only in the model: '4.bias', '4.weight'" in count
        assert "'3.weight' is float32" in dtype
        assert "num_microbatches is 4" in number
    part = next(tmp_path.rglob("part-00001.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x01")
    for (error,) in ranks.run(2, jobs.damaged_part, str(tmp_path)):
        assert error.startswith("DamagedCheckpointError: ")
        assert "part-00001.safetensors is damaged" in error


def test_ranks_keep_and_fall_back_together(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _keep_two, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    part = next((tmp_path / "step-00000003").rglob("part-00001.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x01")
    assert ranks.run(2, jobs.load_step, str(tmp_path)) == [2, 2]
    assert ranks.run(1, jobs.load_step, str(tmp_path)) == [2]


def _keep_two(group: Any, path: str) -> None:
    jobs.save_steps(group, path, 3, keep=2)


def test_ranks_that_do_not_share_a_file_system_say_so(ranks: Ranks, tmp_path: Path) -> None:
    for (error,) in ranks.run(2, jobs.unequal_paths, str(tmp_path / "run")):
        assert "all ranks must see the same file system" in error
        assert "does not exist on rank 1" in error
