"""Census: trains a tiny model of every transformers class with a head, plain and on three stages.

    python benchmarks/architectures.py [--part 1/4] [--only NAME ...] [--results FILE]    a JSON line per class
    python benchmarks/architectures.py --report [--results FILE]                          write docs/compatibility.md

A class has a head if transformers exports it as a PreTrainedModel and its name contains "For" and a task, "LMHead",
"DoubleHeads" or "WithProjection", or if its forward takes labels or return_loss. Classes that are already in the file
of results are not run again.

Each class runs in a process of its own, with limits on time and memory. `tiny_configs` shrinks its default
configuration, `model_inputs` makes inputs from the signature of its forward, and `architecture_trials` trains it.
"""

import argparse
import inspect
import json
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import transformers
except ImportError:
    sys.exit("the census needs transformers, which is not installed; pip install 'pipesched[zoo]'")

from compatibility_page import page
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "runs" / "architectures.jsonl"
LIMIT_S = 240
MEMORY_BYTES = 20 << 30
HEAD = re.compile(r"For[A-Z]|LMHead|DoubleHeads|WithProjection")


def classes() -> list[str]:
    """Return the names of all classes with heads."""
    found = []
    for name in dir(transformers):
        kind = None if name.startswith("_") else getattr(transformers, name)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and _has_head(name, kind):
            found.append(name)
    return found


def _has_head(name: str, kind: type[PreTrainedModel]) -> bool:
    if not kind.__module__.startswith("transformers.models"):
        return False
    return bool(HEAD.search(name) or {"labels", "return_loss"} & set(inspect.signature(kind.forward).parameters))


def run_all(names: Sequence[str], processes: int, batches: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Run each class in a process of its own, ``processes`` at a time, and yield the results as they come."""
    # the server imports PyTorch and transformers once, and every process starts as a copy of it
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["architecture_trials"])
    waiting = list(reversed(names))
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(there, name, batches))
            process.start()
            there.close()
            running[here] = name, process, time.monotonic() + LIMIT_S
        for ready in wait(list(running), timeout=1.0):
            name, process, _ = running.pop(ready)
            yield _answer(ready, name)
            process.join(5)
            process.kill()
        for here, (name, process, end) in list(running.items()):
            if time.monotonic() > end:
                del running[here]
                process.kill()
                yield _lost(name, f"no end in {LIMIT_S} s")


def _work(there: Connection, name: str, batches: Sequence[str] | None) -> None:
    from architecture_trials import BATCHES, trial

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        there.send(trial(name, batches or tuple(BATCHES)))
    except BaseException as error:
        there.send(_lost(name, f"{type(error).__name__}: {error}"))
    there.close()
    os._exit(0)  # without waiting for threads


def _answer(ready: Any, name: str) -> dict[str, Any]:
    try:
        return ready.recv()
    except EOFError:
        return _lost(name, "the process ended by itself")


def _lost(name: str, cause: str) -> dict[str, Any]:
    return {"name": name, "built": False, "plain": False, "cause": cause, "seconds": 0}


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a file by class. The last line of a class counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def main() -> None:
    """Run classes, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default="1/1", help="the part of the classes to run, such as 2/4")
    parser.add_argument("--only", nargs="*", help="run these classes, also if there are results of them")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--batches", nargs="*", help="default: all three")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="write docs/compatibility.md from the results")
    options = parser.parse_args()
    if options.report:
        PAGE.write_text(page(list(read(options.results).values())))
        return
    own, parts = map(int, options.part.split("/"))
    done = read(options.results)
    names = options.only or [name for name in classes()[own - 1 :: parts] if name not in done]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for number, record in enumerate(run_all(names, options.processes, options.batches), 1):
        with options.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        verdicts = [trial["verdict"] for trial in record.get("trials", {}).values()]
        print(
            f"{number}/{len(names)} {time.monotonic() - start:.0f} s  {record['name']}: {verdicts or record['cause']}"
        )


if __name__ == "__main__":
    main()
