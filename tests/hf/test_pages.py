"""The page about Hugging Face's Trainer: its diff works, and its table names what is refused."""

import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from pipesched.hf.refused_arguments import REFUSED, REFUSED_OPTIMIZERS
from tests.hf import jobs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "hugging-face.md").read_text()
SCRIPT = ROOT / "tests" / "hf" / "scripts" / "run_clm.py"
COMMAND = "--do_train --do_eval --use_cpu --report_to none --max_steps 4 --logging_steps 1 --learning_rate 1e-3"


def changed(text: str) -> str:
    """Apply the page's diff to a script."""
    (diff,) = re.findall(r"```patch\n(.*?)```", PAGE, re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 5
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.MULTILINE):
        before, after = (re.sub(r"^[-+]", "", part, flags=re.MULTILINE) for part in (old, new))
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def metrics(script: Path, folder: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Run a script; return its metrics that do not depend on the speed of the machine."""
    out = folder / script.stem
    given = f"--train_file {SCRIPT.parents[1] / 'jobs.py'} --output_dir {out} {COMMAND} {words}"
    monkeypatch.setattr(sys, "argv", [str(script), *given.split()])
    runpy.run_path(str(script), run_name="__main__")
    found = {
        **json.loads((out / "train_results.json").read_text()),
        **json.loads((out / "eval_results.json").read_text()),
    }
    return {name: value for name, value in found.items() if "runtime" not in name and "per_second" not in name}


def test_a_script_changes_in_five_lines(tmp_path, monkeypatch):
    script = tmp_path / "pipelined.py"
    script.write_text(changed(SCRIPT.read_text()))
    plain = metrics(SCRIPT, tmp_path, "", monkeypatch)
    pipelined = metrics(script, tmp_path, "--pipeline_devices cpu cpu --pipeline_schedule 1f1b", monkeypatch)
    worst, place = jobs.largest_difference(plain, pipelined)
    assert worst <= 1e-5, (place, plain, pipelined)


def test_the_table_names_the_arguments_that_are_refused():
    names = {field.name for field in fields(TrainingArguments)}
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", PAGE, re.MULTILINE)
    refused = {name for cell, what in rows if what.startswith("refused") for name in re.findall(r"`(\w+)`", cell)}
    assert refused == {*REFUSED, "enable_jit_checkpoint", "optim"}
    assert refused <= names
    (optimizers,) = (what for cell, what in rows if cell == "`optim`")
    assert set(re.findall(r"`(\w+)`", optimizers)) == {*REFUSED_OPTIMIZERS, "pipeline_zero", "schedule_free"}
