"""README and the pages in docs/: their code runs, their commands and links exist, and their figures are right."""

import contextlib
import io
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pipesched import schedules
from pipesched.cli.main import main
from pipesched.simulation.costs import Costs
from pipesched.simulation.simulator import simulate
from tests.support.pages import blocks, python_blocks, side, torchrun_files
from tests.support.rank_processes import FORKED

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PACKAGE = ROOT / "docs" / "package.md"
BUBBLE = ROOT / "docs" / "concepts" / "bubble.md"
GENERATED = {ROOT / "docs" / "schedules.md", ROOT / "docs" / "zoo.md"}  # by docs/gallery.py, benchmarks/zoo.py
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "RESULTS.md", *sorted(ROOT.glob("docs/**/*.md"))]
WRITTEN = [page for page in PAGES if page not in GENERATED]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(page: Path) -> list[str]:
    return [line for kind, text in blocks(page) if kind == "sh" for line in text.splitlines() if line]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_command(line: str, folder: Path, page: Path) -> None:
    """Run a command of pipesched; check that every other one names a target, an extra or a file that exists."""
    program, *words = shlex.split(line, comments=True)
    if program == "pipesched":
        target = words[words.index(">") + 1 :] if ">" in words else []
        asked = words[: words.index(">")] if target else words
        ran = CliRunner().invoke(main, asked, prog_name="pipesched", env={"COLUMNS": "120"})
        assert ran.exit_code == 0, ran.output
        if target:
            (folder / target[0]).write_text(ran.stdout)
        if line == "pipesched show zb-h1 --ranks 4 --microbatches 8":
            assert next(text for kind, text in blocks(page) if kind == "text") in ran.stdout
    elif program == "make":
        assert re.search(rf"^{words[0]}:", text_of(ROOT / "Makefile"), re.MULTILINE), line
    elif program == "pip":
        assert words[0] == "install"
        assert set(re.findall(r"\[(\w+)\]", line)) <= set(PROJECT["optional-dependencies"])
    else:
        assert program in ("python", "torchrun", "sbatch"), line
        assert any((ROOT / word).is_file() for word in words if "/" in word), line


#: The pages whose blocks other tests run, because they change a copy of pipesched.
OWN_TESTS = ("CONTRIBUTING.md", "extending.md")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OWN_TESTS], ids=name_of)
def test_code_and_commands_of_a_page_run(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is one session: its blocks share their names, and its commands find the files that the blocks wrote."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in python_blocks(page):
        exec(compile(code, name_of(page), "exec"), names)
        out = capsys.readouterr().out
        assert out, code
        assert "  # True" not in code or "False" not in out
    for line in commands(page):
        run_command(line, tmp_path, page)


def by_torchrun(file: Path, num_ranks: int) -> str:
    """Run a file as its page says; the output of all ranks."""
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", file.name],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def by_forks(file: Path, num_ranks: int) -> str:
    """Run a file with torchrun's environment in processes that have imported torch; the output of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with FORKED.Pool(num_ranks) as pool:
        ranks = [pool.apply_async(run_as_rank, (file, rank, num_ranks, port)) for rank in range(num_ranks)]
        return "".join(rank.get(timeout=100) for rank in ranks)


def run_as_rank(file: Path, rank: int, num_ranks: int, port: int) -> str:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(file.parent)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(file), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("launch", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("page", [page for page in PAGES if torchrun_files(page)], ids=name_of)
def test_files_for_torchrun_run(page: Path, launch: Callable[[Path, int], str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; it comes with pipesched[zoo]")
    for option, name, code in torchrun_files(page):
        (tmp_path / name).write_text(code)
        num_ranks = int(option.split()[1])
        assert launch(tmp_path / name, num_ranks).count("tensor(") == num_ranks * 3  # every rank prints every loss
        assert "finetuned" not in code or (tmp_path / "finetuned" / "model.safetensors").is_file()


def test_the_loop_before_the_diff_gives_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """README's diff changes who computes the loss, not the loss: a user who runs both sides sees the same digits."""
    (diff,) = (text for kind, text in blocks(README) if kind == "diff")
    printed = []
    for sign in "-+":
        torch.seed()  # the code must seed itself, as in a new process
        exec(compile(side(diff, sign), "README.md", "exec"), {})
        printed.append(capsys.readouterr().out)
    assert re.fullmatch(r"\d\.\d{4,}\n", printed[0])
    assert printed[0] == printed[1]


def test_the_commands_that_install_take_the_tested_versions() -> None:
    """Without constraints, pip takes the newest release of each package, on which nothing has been tested."""
    (install,) = (line for line in commands(README) if line.startswith("pip install"))
    assert install.startswith("pip install -c constraints.txt .")
    assert (ROOT / "constraints.txt").is_file()


def test_readme_is_one_page() -> None:
    assert len(text_of(README).splitlines()) <= 150
    assert len(text_of(README).split()) <= 900


def bubbles(page: Path) -> dict[str, str]:
    return dict(re.findall(r"^\| `([\w-]+)` \|.*?([\d.]+) % \|", text_of(page), re.MULTILINE))


def test_the_table_of_schedules_is_complete_and_right() -> None:
    rows = bubbles(BUBBLE)
    assert sorted(rows) == schedules.names()
    for name, percent in rows.items():
        program = schedules.get(name).program(4, 8)
        ratio = simulate(program, Costs.uniform(program.num_stages)).bubble_ratio
        assert f"{ratio:.1%}" == f"{percent}%"


def test_the_five_schedules_of_the_readme_are_right() -> None:
    rows = bubbles(README)
    assert len(rows) == 5
    assert rows.items() <= bubbles(BUBBLE).items()
    for name, held in re.findall(r"^\| `([\w-]+)` \| [\d.]+ % \| ([\d.]+) \|", text_of(README), re.MULTILINE):
        program = schedules.get(name).program(4, 8)
        chunks = program.num_stages // program.num_ranks
        assert max(simulate(program, Costs.uniform(program.num_stages)).peak_in_flight) / chunks == float(held)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_pictures_and_scripts_of_a_page_exist(page: Path) -> None:
    text = text_of(page)
    for place in re.findall(r"\]\(([^)\s]+)\)", text):
        if place.startswith("https://"):
            continue
        path, _, anchor = place.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), place
        if anchor:
            assert anchor in anchors(target), place
    for script in re.findall(r"\b(?:benchmarks|docs|examples|tests)/[\w/]+\.(?:py|sh|md)\b", text):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_prose_is_wrapped_at_100_columns(page: Path) -> None:
    prose = re.sub(r"^```\w*\n.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r"\||    |!\[", line)]
    assert [line for line in lines if len(line) > 100] == []


def lines_of(code: str) -> list[str]:
    return [line for line in code.splitlines() if line]


def test_the_page_for_package_indexes_stands_alone() -> None:
    """It has no links. Its code is README's."""
    text = text_of(PACKAGE)
    assert "](" not in text
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert lines_of(code) in map(lines_of, python_blocks(README))
    assert PROJECT["readme"] == "docs/package.md"
    assert set(re.findall(r"pipesched\[(\w+)\]", text)) <= set(PROJECT["optional-dependencies"])
