"""Who runs a rank is data: no code asks which class plays the role of the collectives or of the executor."""

import ast
from pathlib import Path

import pytest

from pipesched.runtime import collectives, process_collectives, rank_host
from pipesched.runtime.executors import executor, processes, threads

PACKAGE = Path(rank_host.__file__).parents[1]
ROLES = {
    kind.__name__
    for kind in (
        rank_host.RankHost,
        collectives.RankCollectives,
        collectives.LocalCollectives,
        process_collectives.ProcessCollectives,
        executor.Executor,
        processes.ProcessExecutor,
        threads.ThreadExecutor,
    )
}


def asks_for_a_role(tree):
    """The lines on which isinstance() or issubclass() gets the class of a role."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("is"):
            names = {part.id for arg in node.args[1:] for part in ast.walk(arg) if isinstance(part, ast.Name)}
            names |= {part.attr for arg in node.args[1:] for part in ast.walk(arg) if isinstance(part, ast.Attribute)}
            if node.func.id in ("isinstance", "issubclass") and names & ROLES:
                yield node.lineno


def test_no_file_asks_which_class_runs_the_ranks():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in asks_for_a_role(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [], f"{len(found)} checks; read host.grid instead, for example host.grid.in_one_process"


@pytest.mark.parametrize("check", ["isinstance(host, ThreadExecutor)", "isinstance(a, int | rank_host.RankHost)"])
def test_a_check_is_found(check):
    assert list(asks_for_a_role(ast.parse(check))) == [1]
