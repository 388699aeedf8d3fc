"""``pipesched checkpoint``: what it prints of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from pipesched.cli.main import main
from tests.support import places
from tests.support.jobs.saving import X, Y, piped


def run(*args: Any) -> Any:
    return CliRunner().invoke(main, ["checkpoint", *map(str, args)])


def test_a_checkpoint_is_printed(tmp_path: Path) -> None:
    with piped(places.OneProcess(2), optimizer=torch.optim.Adam) as pipe:
        pipe.step(X, target=Y)
        pipe.save(tmp_path, extra={"epoch": 3})
    result = run(tmp_path, "--tensors")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith(f"{tmp_path}: step 1, complete: 2 files, ")
    assert lines[1].startswith("seed 5; saved in 1 part by pipesched ")
    assert lines[2:8] == [
        "plan: 1f1b, 2 ranks, 2 stages, checkpoint 'never'",
        "settings: batch_norm 'micro-batch', intra_op_threads 1, loss 'mse_loss', loss_reduction 'mean', "
        "num_microbatches 4, num_replicas 1",
        "parameter: 8 tensors, 80 elements",
        "optimizer state: 16 tensors, 160 elements",
        "optimizer: Adam of 4 parameters, lr 0.001",
        "optimizer: Adam of 4 parameters, lr 0.001",
    ]
    assert lines[8] == "extra: epoch"
    assert "  parameter/0.weight: parameter, float32 [4, 4], part-00000.safetensors" in lines


def test_several_checkpoints_have_a_line_each_and_a_torn_one_is_named(tmp_path: Path) -> None:
    with piped(places.OneProcess(2)) as pipe:
        for _ in range(2):
            pipe.step(X, target=Y)
            pipe.save(tmp_path, keep=2)
    part = next((tmp_path / "step-00000002").rglob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    result = run(tmp_path)
    assert result.exit_code == 1
    torn, whole = result.output.splitlines()
    assert (
        "step-00000002: incomplete or damaged: the files of a checkpoint must not change after they are written; "
        in torn
    )
    assert "part-00000.safetensors is damaged: its content does not match its SHA-256" in torn
    assert "step-00000001: step 1, complete: 2 files" in whole


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "has no manifest.json; check the path" in result.output
