"""What `make check` must find, planted into a copy of the tree: a check that finds nothing proves nothing."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.torch_versions import needs_torch_types

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TREE = ("pipesched", "schedules", "viz", "docs", "pyproject.toml")
MYPY = [sys.executable, "-m", "mypy"]
LINT_IMPORTS = [
    sys.executable,
    "-c",
    "from importlinter.cli import lint_imports_command; lint_imports_command()",
    "--no-cache",
]
RUFF = [sys.executable, "-m", "ruff"]

needs_mypy = pytest.mark.skipif(not find_spec("mypy"), reason="mypy is not installed; it comes with pipesched[check]")
needs_import_linter = pytest.mark.skipif(
    not find_spec("importlinter"), reason="import-linter is not installed; it comes with pipesched[check]"
)
needs_ruff = pytest.mark.skipif(not find_spec("ruff"), reason="ruff is not installed; it comes with pipesched[check]")


@pytest.fixture
def tree(tmp_path):
    """A copy of what is checked, links kept."""
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def run(command, tree):
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def run_mypy(tree):
    """Run mypy, from the cache of the last `make check` if there was one."""
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tree / ".mypy_cache")
    return run(MYPY, tree)


def plant(tree, path, source):
    assert not (tree / path).exists()
    (tree / path).write_text(source, encoding="utf-8")


FORBIDDEN = [
    ("schedules", "import torch", "The core imports no torch"),
    ("schedules", "import numpy", "A schedule imports"),
    ("schedules", "from pipesched import Pipeline", "A schedule imports"),
    ("schedules", "from pipesched.pipeline.pipeline import Pipeline", "Data flows one way"),
    ("schedules", "from pipesched.errors import ScheduleError", "A schedule imports"),
    ("schedules", "from pipesched.schedules.gpipe import gpipe", "A schedule imports"),
    ("viz", "import torch", "The core imports no torch"),
    ("viz", "from pipesched.planning.plan import Plan", "Pictures read"),
    ("viz", "from pipesched import Program", "Inside, nobody imports the front door"),
    ("pipesched", "", "Data flows one way"),  # a module without a layer
]


@needs_import_linter
def test_forbidden_imports_are_found(tree):
    for number, (folder, line, _) in enumerate(FORBIDDEN):
        plant(tree, f"{folder}/planted_{number}.py", f"{line}\n")
    result = run(LINT_IMPORTS, tree)
    assert result.returncode == 1, result.stdout + result.stderr
    details = result.stdout.partition("Broken contracts")[2]
    for number, (folder, line, contract) in enumerate(FORBIDDEN):
        (found,) = re.findall(rf"^{contract}.*\n-+\n((?:.*\n(?!-+\n))*)", details, re.MULTILINE)
        planted = "pipesched." * (folder != "pipesched") + f"{folder}.planted_{number}"
        assert re.search(rf"\b{planted}\b", found), (line, contract, result.stdout)


@pytest.fixture
def with_example(tree):
    """The copy with the schedule that CONTRIBUTING.md shows, in the file that it names."""
    path, source = re.search(
        r"^`(schedules/\w+\.py)`:\n\n```python\n(.*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL
    ).groups()
    assert not (tree / path).exists()  # it shows how to add one that is not there yet
    (tree / path).write_text(source, encoding="utf-8")
    return tree, path


@needs_import_linter
@needs_ruff
def test_the_schedule_of_contributing_passes_every_other_check(with_example):
    tree, path = with_example
    for command in [[*RUFF, "check", path], [*RUFF, "format", "--check", path], LINT_IMPORTS]:
        result = run(command, tree)
        assert result.returncode == 0, result.stdout + result.stderr


@needs_mypy
@needs_torch_types
def test_the_schedule_of_contributing_has_no_type_errors_and_planted_ones_are_found(with_example):
    tree, _ = with_example
    plant(tree, "schedules/planted.py", 'planted: int = "not a number"\n')
    plant(tree, "viz/planted.py", "def planted(x):\n    return x\n")
    result = run_mypy(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    found = re.findall(r"^(.*): error:", result.stdout, re.MULTILINE)
    assert sorted(found) == ["pipesched/schedules/planted.py:1", "pipesched/viz/planted.py:1"], result.stdout


def test_the_schedule_of_contributing_is_found_and_valid_and_keeps_its_law(with_example):
    tree, path = with_example
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    law = dedent(re.search(r"^ {7}@quick\n(?: {7}.*\n)+", CONTRIBUTING, re.MULTILINE)[0])
    with (tree / "tests/schedules/test_schedules.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{law}")
    name = re.search(r'@schedule\("([^"]+)"', (tree / path).read_text(encoding="utf-8"))[1]
    chosen = " or ".join([name, Path(path).name, re.search(r"def (\w+)", law)[1]])
    tests = ["tests/repo/test_file_lengths.py", "tests/schedules/test_schedules.py", "-q", "-k", chosen]
    result = run([sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", *tests], tree)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^11 passed", result.stdout, re.MULTILINE), result.stdout  # 8 shapes, picture, size, law
