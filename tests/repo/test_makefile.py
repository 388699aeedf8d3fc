"""The Makefile tests other versions of torch, each in its own environment, and refuses a wrong version there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINNED = next(
    line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("torch==")
)
#: Stands for the Python of an environment. It writes down the calls of pip, and its torch has the version $HAS.
PYTHON = """#!/bin/sh
case "$*" in
    *"-m pip install"*) echo "$PIP_CONFIG_FILE $PIP_CONSTRAINT $PIP_EXTRA_INDEX_URL $*" >> "$PWD/pip.txt";;
    *"import sys, torch"*)
        if [ "${HAS:-$TORCH}" != "${TORCH:-$HAS}" ]; then echo "torch $HAS instead of $TORCH" >&2; exit 1; fi;;
    *gpu_report*) echo "$PYTHONPATH $*" >> "$PWD/gpu.txt";;
    *"-m venv"*) for last; do true; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python";;
    *"-m pytest"*) echo "== 2 passed, 1 skipped in 0.10s =="; echo "$*" >> "$PWD/pytest.txt"; [ "$TORCH" != "$FAILS" ];;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def make(tree: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS", "TORCH"))
    }
    environment |= {"PYTHON": str(tree / "python"), **settings}
    return subprocess.run(["make", *words], cwd=tree, env=environment, capture_output=True, text=True, check=False)


def test_another_torch_has_its_own_environment_and_its_own_constraints(tree: Path) -> None:
    result = make(tree, "test", "TORCH=9.8.7", HAS="9.8.7", PIP_EXTRA_INDEX_URL="https://example.org")
    assert not result.returncode, result.stderr
    constraints = (tree / ".venv-torch-9.8.7/constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in constraints if line.startswith("torch==")] == ["torch==9.8.7"]
    assert any(line.startswith("numpy==") for line in constraints)
    calls = (tree / "pip.txt").read_text(encoding="utf-8").splitlines()
    assert len(calls) == 2
    for call in calls:
        assert call.startswith("/dev/null .venv-torch-9.8.7/constraints.txt https://example.org ")
    assert calls[0].endswith("torch==9.8.7+cpu")
    assert not (tree / ".venv").exists()


def test_the_default_environment_has_the_pinned_torch_and_keeps_pips_configuration(tree: Path) -> None:
    result = make(tree, "test", HAS=PINNED)  # the stub's torch is the one that make asks for
    assert (tree / ".venv/develop").exists(), result.stderr
    calls = (tree / "pip.txt").read_text(encoding="utf-8").splitlines()
    assert [call.split()[0] for call in calls] == ["constraints.txt"] * 2
    assert calls[0].endswith(f"torch=={PINNED}+cpu")


def test_a_torch_of_another_version_is_not_tested(tree: Path) -> None:
    result = make(tree, "test", "TORCH=9.8.7", HAS="9.8.6")
    assert result.returncode
    assert "torch 9.8.6 instead of 9.8.7" in result.stderr
    assert not (tree / "pytest.txt").exists()


@pytest.mark.parametrize(("fails", "status"), [("", 0), ("1.0", 1)])
def test_the_matrix_goes_on_after_a_failure_and_sums_up(tree: Path, fails: str, status: int) -> None:
    result = make(tree, "matrix", "TORCHES=1.0 2.0", HAS="", FAILS=fails)
    assert bool(result.returncode) == bool(status)
    assert len((tree / "pytest.txt").read_text(encoding="utf-8").splitlines()) == 2
    summary = result.stdout.splitlines()[-2 - status :][:2]
    assert summary == [f"torch {version}:  2 passed, 1 skipped in 0.10s " for version in ("1.0", "2.0")]


@pytest.mark.parametrize(("before", "path"), [("", "."), ("/own", ".:/own")])
def test_the_gpu_report_needs_no_environment_of_its_own(tree: Path, before: str, path: str) -> None:
    result = make(tree, "gpu", "ARGS=--parts 2 3", PYTHONPATH=before)
    assert not result.returncode, result.stderr
    assert (tree / "gpu.txt").read_text(encoding="utf-8") == f"{path} benchmarks/gpu_report.py --parts 2 3\n"
    assert not (tree / ".venv").exists()


def test_the_matrix_has_the_pinned_version_and_the_newest() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    newest = next(line.split()[-1] for line in text.splitlines() if line.startswith("NEWEST_TORCH :="))
    printed = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    torches = next(line for line in printed.splitlines() if line.startswith("TORCHES :="))
    assert torches == f"TORCHES := 2.11.0 {PINNED} 2.14.1 {newest}"
