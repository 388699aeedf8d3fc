"""Counts: sizes of the source, and the way of one step through it, for one checkout or for two side by side.

    python benchmarks/counts.py [CHECKOUT] [--against OTHER] [--suite-seconds 380 [OTHER'S]]

Without CHECKOUT, the script counts the checkout in which it stands. Lines are split into code, docstrings, comments and
blank lines. "step" is the third step of a model with two stages: in one process with a thread per rank, and over two
gloo processes, where rank 0 counts and passes the batch for all. The calling thread changes the file whenever the next
function of the package that it calls stands in another file than the last one. Files and functions are those of the
calling thread and of the ranks' threads. A callback is a call of a function in pipesched/pipeline by a function in
pipesched/runtime. A check of the host is an isinstance() with a class of a rank, of its collectives or of its executor.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from measure import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import pipesched

Table = dict[str, int | float]

SOURCE = ("pipesched", "viz", "schedules")
OTHERS = ("viz", "schedules", "tests", "benchmarks")
LINES = ("code", "docstrings", "comments", "blank")
_NONE: Counter[str] = Counter()
PACKAGE = Path(pipesched.__file__).parent


# ---- the source ----------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    """Return the Python files under a folder, without those behind links."""
    return [Path(place, name) for place, _, names in os.walk(folder) for name in sorted(names) if name.endswith(".py")]


def source_of(checkout: Path) -> dict[Path, str]:
    """Return the text of each file of the package, and of the folders that are installed with it."""
    return {file: file.read_text() for folder in SOURCE for file in files_in(checkout / folder)}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = (one.body for one in ast.walk(tree) if isinstance(one, documented) and ast.get_docstring(one) is not None)
    return {line for body in bodies for line in range(body[0].lineno, (body[0].end_lineno or 0) + 1)}


def comment_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold nothing but a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {one.start[0] for one in tokens if one.type == tokenize.COMMENT and one.line.lstrip().startswith("#")}


def lines_of(files: Iterable[Path]) -> Counter[str]:
    """Return the number of lines of each sort."""
    counts: Counter[str] = Counter()
    for file in files:
        text = file.read_text()
        docstrings, comments = docstring_lines(ast.parse(text)), comment_lines(text)
        for number, line in enumerate(text.splitlines(), 1):
            sort = "docstrings" if number in docstrings else "comments" if number in comments else "code"
            counts[sort if line.strip() or sort == "docstrings" else "blank"] += 1
    return counts


def by_package(checkout: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the files of each package of pipesched, and of each other folder."""
    top = checkout / "pipesched"
    yield "pipesched/*.py", sorted(top.glob("*.py"))
    for folder in sorted(top.iterdir()):
        if not folder.is_symlink() and (folder / "__init__.py").exists():
            yield f"pipesched/{folder.name}", files_in(folder)
    for name in OTHERS:
        yield name, files_in(checkout / name)


def sizes(checkout: Path) -> dict[str, Counter[str]]:
    """Return the lines of each sort by package, and their sums over the source."""
    rows = {name: lines_of(files) for name, files in by_package(checkout)}
    source = sum((lines for name, lines in rows.items() if name not in ("tests", "benchmarks")), Counter())
    return rows | {"source without tests, benchmarks": source}


def host_classes(checkout: Path) -> set[str]:
    """Return the names of the classes of ranks, their collectives and their executors."""
    runtime = checkout / "pipesched" / "runtime"
    files = [*runtime.glob("*rank*.py"), *runtime.glob("*collectives*.py"), *runtime.glob("executors/executor.py")]
    return {one.name for file in files for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)}


def checks_class(call: ast.AST, names: set[str]) -> bool:
    """Return whether a piece of code is an isinstance() with one of these classes."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "isinstance"):
        return False
    named = (part for part in ast.walk(call.args[1]) if isinstance(part, ast.Name | ast.Attribute))
    return any((part.id if isinstance(part, ast.Name) else part.attr) in names for part in named)


def source_table(checkout: Path) -> Table:
    """Return the counts that the text of the source gives."""
    source = source_of(checkout)
    trees = {file: ast.parse(text) for file, text in source.items()}
    hosts = host_classes(checkout)
    checks = {file: sum(checks_class(part, hosts) for part in ast.walk(tree)) for file, tree in trees.items()}
    classes = Counter(one.name for tree in trees.values() for one in ast.walk(tree) if isinstance(one, ast.ClassDef))
    benchmarks = files_in(checkout / "benchmarks")
    return {
        "files that name REDUCE": sum(bool(re.search(r"\bREDUCE\b", text)) for text in source.values()),
        "checks of the host": sum(checks.values()),
        "files that check the host": sum(map(bool, checks.values())),
        "class names that stand twice or more": sum(count > 1 for count in classes.values()),
        "benchmarks": len(benchmarks),
        "lines of benchmarks": sum(len(file.read_text().splitlines()) for file in benchmarks),
    }


# ---- a step --------------------------------------------------------------------------------------------------------


def inside(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the package, from this frame on."""
    while frame is not None and not frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> tuple[str, str]:
    """Return the file of a frame, relative to the package, and the name of its function."""
    return os.path.relpath(frame.f_code.co_filename, PACKAGE), frame.f_code.co_qualname


class Way:
    """Records which code of the package a step runs."""

    def __init__(self) -> None:
        self.looking = False
        self.files: set[str] = set()  # of the calling thread and the ranks' threads
        self.functions: set[tuple[str, str]] = set()
        self.walked: list[str] = []  # the files of the calling thread, in the order in which it changes them
        self.callbacks = 0
        self._caller = threading.current_thread()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record one event of sys.setprofile."""
        thread = threading.current_thread()
        of_step = thread is self._caller or thread.name.startswith("pipesched rank")
        if not (self.looking and of_step and event == "call" and inside(frame) is frame):
            return
        file, function = place_of(frame)
        if function.endswith(("comp>", "<genexpr>")):
            return
        self.files.add(file)
        self.functions.add((file, function))
        caller = inside(frame.f_back)
        if caller and file.startswith("pipeline/") and place_of(caller)[0].startswith("runtime/"):
            self.callbacks += 1
        if thread is self._caller and self.walked[-1:] != [file]:
            self.walked.append(file)

    @contextmanager
    def of_new_threads(self) -> Iterator[None]:
        """A context in which threads are started that are to be followed."""
        threading.setprofile(self.note)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """A context that records the code that runs in it."""
        sys.setprofile(self.note)
        self.looking = True
        try:
            yield
        finally:
            self.looking = False
            sys.setprofile(None)

    def table(self, where: str) -> Table:
        """Return the counts."""
        return {
            f"{where}: changes of file": len(self.walked) - 1,
            f"{where}: files of the calling thread": len(set(self.walked)),
            f"{where}: files": len(self.files),
            f"{where}: functions": len(self.functions),
            f"{where}: callbacks into pipeline": self.callbacks,
        }


def walk(rank: int, where: str, **options: Any) -> Table:
    """Train a model with two stages for three steps, and return the counts of the third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x, y = torch.randn(2, 8, 8)
    if "distributed" in options:
        options["mesh"] = init_device_mesh("cpu", (2,))
    batch, target = ((x,), y) if rank == 0 else ((), None)
    way = Way()
    with way.of_new_threads():
        pipe = pipesched.Pipeline(
            model, x[:2], schedule="1f1b", num_microbatches=4, loss_fn=functional.mse_loss, **options
        )
    with pipe:
        for _ in range(2):
            pipe.step(*batch, target=target)
        with way.followed():
            pipe.step(*batch, target=target)
    return way.table(where)


def step_table() -> Table:
    """Return the counts of a step in one process, and of rank 0's step over two processes."""
    first = pipesched.Distributed(inputs="first")
    table = walk(0, "step in one process", devices=["cpu"] * 2)
    return table | in_ranks(2, _walk_over_processes, first)[0]


def _walk_over_processes(rank: int, first: Any) -> Table:
    return walk(rank, "step over two processes", distributed=first)


# ---- both ----------------------------------------------------------------------------------------------------------


def counted(checkout: Path, suite_seconds: float | None) -> Table:
    """Return the counts of a checkout, except lines. A step runs in a process that imports the checkout's package."""
    paths = [str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    steps = subprocess.run([sys.executable, __file__, "--steps"], env=environment, check=True, stdout=subprocess.PIPE)
    suite: Table = {} if suite_seconds is None else {"seconds of the suite": suite_seconds}
    return source_table(checkout) | json.loads(steps.stdout) | suite


def show(title: str, columns: dict[str, dict[str, Any]]) -> None:
    """Print one line for each row that a column has, with the columns side by side."""
    print(f"{title:50}" + "".join(f"{name:>16}" for name in columns))
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        print(f"{row:50}" + "".join(f"{column.get(row, '-'):>16}" for column in columns.values()))
    print()


def lines_table(checkouts: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Return a column for each sort of lines. A cell holds the lines of one package in all checkouts."""
    every = [sizes(checkout) for checkout in checkouts]
    rows = dict.fromkeys(row for one in every for row in one)
    return {sort: {row: " ".join(f"{one.get(row, _NONE)[sort]:6}" for one in every) for row in rows} for sort in LINES}


def main() -> None:
    """Print the lines by package, then the other counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parent.parent)
    parser.add_argument("--against", type=Path, help="a checkout of an earlier state, printed first")
    parser.add_argument("--suite-seconds", type=float, nargs="+", default=[], help="of the checkout, of the other one")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps:
        print(json.dumps(step_table()))
        return
    of_suite = dict(zip(("now", "before"), arguments.suite_seconds, strict=False))
    checkouts = {"before": arguments.against, "now": arguments.checkout}
    checkouts = {name: checkout for name, checkout in checkouts.items() if checkout}
    show(f"lines {' and '.join(checkouts)}", lines_table(checkouts.values()))
    show("counts", {name: counted(checkout, of_suite.get(name)) for name, checkout in checkouts.items()})


if __name__ == "__main__":
    main()
