"""Building the backend: what lacks is named, and processes that need it at once compile it once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import build

ROOT = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
echo compiled >> {log}
for last; do :; done
echo library > "$last"
"""
ASK = "from tests.simulated import build; print(build.library())"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that only counts its calls, and an empty cache."""
    script, log = tmp_path / "compiler", tmp_path / "log"
    script.write_text(COMPILER.format(log=log))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def test_processes_that_build_at_once_compile_once(compiler):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asking = [
        subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate()[0] for process in asking}
    assert len(answers) == 1
    assert Path(answers.pop().strip()).read_text() == "library\n"
    assert compiler.read_text() == "compiled\n"


def test_a_failed_build_shows_the_compilers_words_and_leaves_no_library(compiler):
    script = Path(os.environ["CXX"])
    script.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="no such header"):
        build.library()
    script.write_text(COMPILER.format(log=compiler))
    assert build.library().exists()


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler was not found; install g++" in build.missing()
