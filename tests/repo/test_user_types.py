"""The Python code of README, CONTRIBUTING and docs pass `mypy --strict` as a user's files."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.pages import sessions
from tests.support.torch_versions import needs_torch_types

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "internals" / "extending.md")  # its blocks change a copy of pipesched
FRONT_DOOR = """
    from typing import Any, assert_type

    import torch

    import pipesched

    pipe = pipesched.Pipeline(torch.nn.Linear(2, 2), torch.ones(2, 2), devices=["cpu"])
    x = torch.ones(2, 2)
    assert_type(pipe.step(x, target=x), torch.Tensor)
    assert_type(pipe.step(x, target=x, return_outputs=False), torch.Tensor)
    assert_type(pipe.step(x, target=x, return_outputs=True), tuple[torch.Tensor, Any])
    both = bool(x.sum() > 0)
    assert_type(pipe.step(x, target=x, return_outputs=both), torch.Tensor | tuple[torch.Tensor, Any])
    assert_type(pipe.evaluate(x, target=x), torch.Tensor)
    assert_type(pipe.evaluate(x, target=x, return_outputs=True), tuple[torch.Tensor, Any])
    assert_type(pipe.evaluate(x, target=x, return_outputs=both), torch.Tensor | tuple[torch.Tensor, Any])
    assert_type(pipe.step(x, target=x, mask=x), torch.Tensor)  # the model's own keyword
    assert_type(pipe.trace, pipesched.Trace)
    assert_type(pipe.gather_trace(), pipesched.Trace)
    try:
        pipe.step(x)
    except pipesched.errors.InputError as error:
        assert_type(error, pipesched.errors.InputError)
    assert_type(pipesched.testing.reference_step(torch.nn.Linear(2, 2), x), torch.Tensor)
    """
#: A planted mistake, which the same run must find.
MISTAKE = """
    import pipesched

    pipesched.simulate("1f1b", pipesched.Costs.uniform(2))
    pipesched.errors.NoSuchError
    """


@pytest.mark.one_in(2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("others", [False, True], ids=["of pipesched alone", "with transformers"])
@pytest.mark.skipif(not find_spec("mypy"), reason="mypy is not installed; it comes with pipesched[check]")
@needs_torch_types
def test_the_pages_python_blocks_pass_strict_mypy(tmp_path, others):
    """By the strict rules of this repository. Blocks with transformers apart: mypy reads it for half a minute."""
    (tmp_path / "front_door.py").write_text(dedent(FRONT_DOOR))
    (tmp_path / "mistake.py").write_text(dedent(MISTAKE))
    for page in PAGES:
        for number, code in enumerate(sessions(page)):
            if ("transformers" in code) != others:
                continue
            (tmp_path / f"{page.stem.replace('-', '_')}_{number}.py").write_text(code)
    files = sorted(tmp_path.glob("*.py"))
    assert len(files) > 2
    cache = tmp_path / "cache"
    if (ROOT / ".mypy_cache").is_dir():  # of the last `make check`: half a minute saved
        shutil.copytree(ROOT / ".mypy_cache", cache)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache, *files],
        cwd=ROOT,  # the cache is of files as they are called from here
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.removeprefix(f"{tmp_path}/") for line in ran.stdout.splitlines()]
    assert [line for line in found if ": error:" in line and not line.startswith("mistake.py")] == [], ran.stdout
    assert [line.split(": error: ")[0] for line in found if line.startswith("mistake.py")] == [
        "mistake.py:4",
        "mistake.py:5",
    ], ran.stdout + ran.stderr
