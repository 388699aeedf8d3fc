"""The examples run, and show what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = ROOT / "examples" / "own_schedule.py"
MESH = ROOT / "examples" / "torchrun.py"


def test_an_own_schedule_is_proved_trained_with_and_drawn_in_30_lines(tmp_path):
    assert len(OWN.read_text().splitlines()) <= 30
    ran = subprocess.run(
        [sys.executable, str(OWN)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "slow-link-1f1b: valid for 1..8 ranks and 1..16 micro-batches" in ran.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", ran.stdout, re.MULTILINE)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert (tmp_path / "runs" / "own_schedule.png").read_bytes().startswith(b"\x89PNG")


def torchrun(processes):
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", str(MESH)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    return re.findall(r"^step \d: loss [\d.]+$", ran.stdout, re.MULTILINE)


def test_as_many_processes_as_there_are_give_the_same_losses():
    alone = torchrun(1)
    assert len(alone) == 5
    assert torchrun(2) == alone
