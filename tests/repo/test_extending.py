"""The page docs/internals/extending.md: its kind of action is added to a copy of pipesched, with no other edit."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/extending.md").read_text(encoding="utf-8")
ROW, HANDLER, EXAMPLE, PICTURE = re.findall(r"^```[a-z]*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

#: What the parts of pipesched that the example does not show make of the new kind.
THE_REST = """
import pickle

from pipesched import Action, Kind, Trace, lower
from pipesched.simulation.comparison import measured_costs
from pipesched.simulation.memory import rank_memory
from pipesched.errors import ScheduleError

last = Action(1, Kind.ROUND, 0)
assert Action.parse(str(last)) == last
assert Program.parse(str(program)) == program
assert pickle.loads(pickle.dumps(Kind.ROUND)) is Kind.ROUND is Kind("ROUND")
assert [str(need) for need in program.needs(last)] == ["1UPDATE0"]
try:
    validate(Program.parse(str(program).replace("1UPDATE0 1ROUND0", "1ROUND0 1UPDATE0")))
except ScheduleError as error:
    assert "1ROUND0 needs 1UPDATE0 before it on this rank" in str(error)
else:
    raise AssertionError("an action before the action that it needs is accepted")

lowered = lower(program)
validate(lowered)
assert last in lowered.orders[1]
assert simulate(lowered, costs).makespan_s == trace.makespan_s
plain = Program.parse(str(program).replace(" 0ROUND0", "").replace(" 1ROUND0", ""))
assert [own.transients for own in rank_memory(plain, costs)] == [0, 0]
assert [own.transients for own in rank_memory(program, costs)] == [8, 8]
assert trace.makespan_s == simulate(plain, costs).makespan_s + 2

axes = viz.plot_timeline(trace)
assert "rounding (ROUND)" in [text.get_text() for text in axes.get_legend().get_texts()]
axes.figure.savefig("timeline.png")
axes.figure.savefig("timeline.svg")
assert "#882255" in open("timeline.svg").read()

assert [span.action for span in pipe.trace.spans if span.action.kind is Kind.ROUND] == [Action(0, Kind.ROUND, 0), last]
assert Trace.from_dict(pipe.trace.to_dict()) == pipe.trace
assert min(measured_costs([pipe.trace], 2).other_s["ROUND"]) > 0
assert set(pipe.plan.program.columns) == set(program.columns)
print("all done")
"""


def added(path, name, code):
    """Add code at the end of a class."""
    source = path.read_text(encoding="utf-8")
    end = next(own.end_lineno for own in ast.parse(source).body if getattr(own, "name", "") == name)
    lines = source.splitlines(keepends=True)
    path.write_text("".join([*lines[:end], "\n", code, *lines[end:]]), encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of pipesched with the row and the handler of the page."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pipesched", "schedules", "viz"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    added(tree / "pipesched/program/actions.py", "Kind", ROW)
    added(tree / "pipesched/runtime/stage/stage.py", "Stage", HANDLER)
    return tree


def run(code, tree):
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def test_a_kind_added_as_the_page_says_is_validated_lowered_simulated_drawn_and_run(tree):
    done = run(EXAMPLE + THE_REST, tree)
    assert done.stderr == ""
    assert done.stdout == PICTURE + "all done\n"


def test_without_its_row_the_kind_of_the_page_is_unknown():
    assert "got '0ROUND0'; use one of the kinds F, B," in run(EXAMPLE, ROOT).stderr
