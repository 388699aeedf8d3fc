"""README's blocks run, and print what they say."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipesched import schedules
from pipesched.simulation.costs import Costs
from pipesched.simulation.simulator import simulate

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PACKAGE = ROOT / "docs" / "package.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_python_blocks_run(
    code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where plans are saved
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_commands_run(tmp_path: Path) -> None:
    for command in COMMANDS:
        program, *rest = shlex.split(command)
        assert program == "pipesched"
        target = rest[rest.index(">") + 1 :] if ">" in rest else []
        words = rest[: rest.index(">")] if target else rest
        ran = subprocess.run(
            [sys.executable, "-m", "pipesched.cli", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(README.parent), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=True,
        )
        if target:
            (tmp_path / target[0]).write_text(ran.stdout)
        shown = next(text for kind, text in BLOCKS if kind == "text")
        if command == "pipesched show zb-h1 --ranks 4 --microbatches 8":
            assert shown in ran.stdout


def test_the_table_of_schedules_is_complete_and_right() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*?([\d.]+) % \|", README.read_text(), re.MULTILINE))
    assert sorted(rows) == schedules.names()
    for name, percent in rows.items():
        program = schedules.get(name).program(4, 8)
        ratio = simulate(program, Costs.uniform(program.num_stages)).bubble_ratio
        assert f"{ratio:.1%}" == f"{percent}%"


def test_links_and_pictures_of_the_readme_are_there() -> None:
    for place in re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text()):
        assert (ROOT / place).is_file(), place


def test_the_page_for_package_indexes_stands_alone() -> None:
    """It has no links. Its code is README's, whose blocks run."""
    text = PACKAGE.read_text()
    assert "](" not in text
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert ("python", code) in BLOCKS
    (commands,) = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert set(commands.splitlines()) <= set(COMMANDS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["readme"] == "docs/package.md"
    assert set(re.findall(r"pipesched\[(\w+)\]", text)) <= set(project["optional-dependencies"])
