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


#: A kind with a queue and a sort of memory of its own, and the kind that waits for the ends of its actions.
STARTED = """
    SQUEEZE = KindRow(
        text="SQUEEZE",
        lane=Lane.COPY,
        handler="squeeze",
        needs=(Need(At.OWN, "F"),),
        queue=Queue.SQUEEZES,
        takes=Holding.SQUEEZED,
    )
    AWAIT = KindRow(text="AWAIT", lane=Lane.COPY, handler="await_squeeze", needs=(Need(At.OWN, "SQUEEZE"),))
"""
REAL_HANDLERS = """
    def squeeze(self, microbatch: int) -> None:
        self._squeezing = threading.Timer(0.01, lambda: None)
        self._squeezing.start()

    def await_squeeze(self, microbatch: int) -> None:
        self._squeezing.join()
        assert self._squeezing.finished.is_set()
"""
FAKE_HANDLERS = """
    def squeeze(self, microbatch: int) -> None:
        seconds = self._costs.seconds(Action(self.index, Kind.SQUEEZE, microbatch))
        self._squeezed = self._clock.copy(Kind.SQUEEZE, seconds)

    def await_squeeze(self, microbatch: int) -> None:
        self._clock.reach(self._squeezed)
"""
STARTED_EXAMPLE = """
import torch

from pipesched import Costs, Kind, Pipeline, Program, simulate
from pipesched.simulation.memory import rank_memory
from pipesched.testing import run_fake

program = Program.parse('''
    microbatches 3
    rank 0: 0F0 0B0 0F1 0SQUEEZE1 0AWAIT1 0B1 0F2 0SQUEEZE2 0AWAIT2 0B2
    rank 1: 1F0 1B0 1F1 1SQUEEZE1 1AWAIT1 1B1 1F2 1SQUEEZE2 1AWAIT2 1B2
''')
costs = Costs.uniform(2, other_s={"SQUEEZE": 4}, squeezed_bytes=8)
trace = simulate(program, costs)
assert [span.end_s - span.start_s for span in trace.spans if span.action.kind is Kind.SQUEEZE] == [4] * 4
assert trace.makespan_s == run_fake(program, costs).makespan_s == 6 + 2 * (1 + 1 + 4 + 2 + 2)
assert [own.gathered for own in rank_memory(program, costs)] == [8, 8]

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
x = torch.randn(6, 4)
with Pipeline(model, x, loss_fn=torch.nn.functional.mse_loss, schedule=program, devices=["cpu"] * 2) as pipe:
    pipe.step(x, target=x)
assert sum(span.action.kind is Kind.AWAIT for span in pipe.trace.spans) == 4
print("all done")
"""


def extended(path, line, more):
    """Add code behind a line of a file."""
    source = path.read_text(encoding="utf-8")
    assert source.count(line) == 1
    path.write_text(source.replace(line, line + more), encoding="utf-8")


def test_a_kind_with_a_queue_and_memory_of_its_own_is_simulated_as_it_is_faked_and_run(tree):
    actions = tree / "pipesched/program/actions.py"
    added(actions, "Kind", STARTED)
    added(actions, "Queue", "    SQUEEZES = auto()\n")
    added(actions, "Holding", '    SQUEEZED = "squeezed"\n')
    extended(actions, "_EVERYTHING = (", "Holding.SQUEEZED, ")
    costs = tree / "pipesched/simulation/costs.py"
    extended(costs, "    gather_s: tuple[float, ...] = ()\n", "    squeezed_bytes: tuple[int, ...] = ()\n")
    extended(costs, "            Holding.GATHERED: self.gathered_bytes,\n", "Holding.SQUEEZED: self.squeezed_bytes,\n")
    stage = tree / "pipesched/runtime/stage/stage.py"
    added(stage, "Stage", REAL_HANDLERS)
    extended(stage, "import torch\n", "import threading\n")
    added(tree / "pipesched/testing/fake_executor.py", "FakeStage", FAKE_HANDLERS)

    done = run(STARTED_EXAMPLE, tree)

    assert done.stderr == ""
    assert done.stdout == "all done\n"


@pytest.mark.exhaustive
def test_without_its_row_the_kind_of_the_page_is_unknown():
    assert "got '0ROUND0'; use one of the kinds F, B," in run(EXAMPLE, ROOT).stderr
