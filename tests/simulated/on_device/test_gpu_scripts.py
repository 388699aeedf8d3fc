"""The benchmarks of devices run on simulated devices: what they measure there is no speed, but they run, race-free."""

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "line",
    [
        "gpu_memory.py",
        "gpu.py --only steps devices",
        "gpu_tune.py --ranks 2 --seconds 5",
        "gpu_training.py --plain-model",
        "versus_inprocess.py",
    ],
)
def test_a_script_runs_on_simulated_devices(sim, line, monkeypatch, tmp_path):
    script, *words = line.split()
    figures = tmp_path / "figures.jsonl"
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [script, *words, "--device", "sim", "--tiny", "--figures", str(figures)])
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    rows = [json.loads(row) for row in figures.read_text(encoding="utf-8").splitlines()]
    assert rows
    assert max(row.get("error") or 0 for row in rows if row["measurement"] != "prediction") < 1e-5
    assert not sim.judge.violations, str(sim.judge.violations[0])
