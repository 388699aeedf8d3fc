"""Foreign: trains random user code plain and as a pipeline, and compares the results.

    python benchmarks/foreign.py                # 2,000 cases
    python benchmarks/foreign.py --each 10      # 10 cases of every variant by itself: a table
    python benchmarks/foreign.py --seeds 152 267
    python benchmarks/foreign.py --redundancy   # only the cases over two ranks, which keep copies of their states
    python benchmarks/foreign.py --tensor 2     # only the cases over two ranks, each with its layers split over two

Each seed draws one to three kinds of code that people write (`foreign_kinds`): what losses read, weights changed in
forward, attributes, contexts, checkpointing of the model's own, ranks that differ, rows in lists. A case trains two
steps in a plain loop over the micro-batches and two steps as a pipeline, in this process or over two gloo ranks. It
ends in one of these ways:

- same bits: losses, gradients and buffers have equal bits;
- close: they differ by rounding, for a reason that the case names;
- refused: pipesched raises an error of its own at construction or in the first step.

Anything else is a failure: "silent" (other numbers without an error), "late" (an error after the first step), "raw" (an
error of torch or Python), or "hang". The exit code is 1 if a case fails.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from foreign_case import Case, Outcome, outcome_of
from foreign_kinds import KINDS, draw_case, variants
from torch import distributed

SEVERITY = ["same bits", "close", "refused", "late", "raw", "silent", "hang"]
PASSES = SEVERITY[:3]
PATIENCE_S = 90.0


class Draw(NamedTuple):
    """A case to draw."""

    seed: int
    only: str | None  #: the only "kind: variant" of the case
    redundancy: bool = False
    tensor: int = 1  #: the number of ranks over which layers are split


def drawn(task: Draw) -> Case:
    """Return the case of a task."""
    case = draw_case(task.seed, task.only)
    case.redundancy = task.redundancy
    case.tensor = task.tensor
    return case


# ---- processes -----------------------------------------------------------------------------------------------------


def _serve(connection: Connection, rank: int, world: int, tensor: int, folder: str) -> None:
    """Run the cases that the connection brings, until it ends."""
    torch.set_num_threads(1)
    mesh: Any = None
    if world > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        shape, names = ((world // tensor, tensor), ("pp", "tp")) if tensor > 1 else ((world,), ("pp",))
        mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    while True:
        task = connection.recv()
        if task is None:
            break
        outcome = outcome_of(drawn(task), rank, mesh)
        connection.send((outcome.word, outcome.detail))


class Crew:
    """Processes that run cases together, one process per rank. They start again after a failure.

    Args:
        world: the number of processes.
        tensor: the number of processes over which layers are split. Default: 1.

    """

    def __init__(self, world: int, tensor: int = 1) -> None:
        self._world = world
        self._tensor = tensor
        self._members: list[tuple[Any, Connection]] = []

    def run(self, task: Draw) -> Outcome:
        """Run a case in all processes, and return the worst outcome."""
        if not self._members:
            self._start()
        for _, connection in self._members:
            connection.send(task)
        end = time.monotonic() + PATIENCE_S
        outcomes = [self._received(connection, end) for _, connection in self._members]
        outcome = merged(outcomes)
        if outcome.word not in PASSES or (self._world > 1 and outcome.word == "refused"):
            self.stop()
        return outcome

    def _received(self, connection: Connection, end: float) -> Outcome:
        try:
            if not connection.poll(max(end - time.monotonic(), 0.1)):
                return Outcome(word="hang", detail=f"no answer within {PATIENCE_S:.0f} s")
            word, detail = connection.recv()
        except EOFError:
            return Outcome(word="raw", detail="the process ended")
        return Outcome(word=word, detail=detail)

    def _start(self) -> None:
        folder = tempfile.mkdtemp()
        spawning = multiprocessing.get_context("spawn")
        for rank in range(self._world):
            own, other = spawning.Pipe()
            process = spawning.Process(
                target=_serve, args=(other, rank, self._world, self._tensor, folder), daemon=True
            )
            process.start()
            other.close()
            self._members.append((process, own))

    def stop(self) -> None:
        """End the processes."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the worst outcome of the ranks of a case.

    If one rank refuses the case in the first step, another may learn this only in its second step.
    """
    words = {outcome.word for outcome in outcomes}
    if "refused" in words and words <= {"refused", "late"}:
        return next(outcome for outcome in outcomes if outcome.word == "refused")
    return max(outcomes, key=lambda outcome: SEVERITY.index(outcome.word))


def outcomes_of(tasks: Sequence[Draw], jobs: int) -> Iterable[tuple[Draw, Case, Outcome]]:
    """Run cases, and yield their outcomes in the order in which they end."""
    cases = {task: drawn(task) for task in tasks}
    alone = [task for task in tasks if cases[task].world == 1]
    crews = [Crew(1) for _ in range(jobs)]
    idle = list(crews)

    def run(task: Draw) -> Outcome:
        crew = idle.pop()
        try:
            return crew.run(task)
        finally:
            idle.append(crew)

    with ThreadPoolExecutor(jobs) as pool:
        for task, outcome in zip(alone, pool.map(run, alone), strict=True):
            yield task, cases[task], outcome
    for crew in crews:
        crew.stop()
    tensor = max(task.tensor for task in tasks)
    ranks = Crew(2 * tensor, tensor)
    for task in tasks:
        if cases[task].world > 1:
            yield task, cases[task], ranks.run(task)
    ranks.stop()


# ---- reports -------------------------------------------------------------------------------------------------------


def report(results: Sequence[tuple[Draw, Case, Outcome]]) -> None:
    """Print the number of cases of each kind and outcome."""
    total = len(results)
    by_kind = {kind: Counter[str]() for kind in KINDS}
    for _, case, outcome in results:
        for kind in {name.partition(":")[0] for name in case.kinds}:
            by_kind[kind][outcome.word] += 1
    words = [word for word in SEVERITY if any(counts[word] for counts in by_kind.values())]
    print(f"{'kind':34}{'drawn':>8}" + "".join(f"{word:>11}" for word in words))
    for kind, counts in by_kind.items():
        print(f"{kind:34}{counts.total() / total:>8.1%}" + "".join(f"{counts[word]:>11}" for word in words))
    counts = Counter(outcome.word for *_, outcome in results)
    several = sum(len(case.kinds) > 1 for _, case, _ in results)
    failed = total - sum(counts[word] for word in PASSES)
    print(
        f"{total} cases, {several / total:.0%} with several kinds, "
        f"{sum(case.world > 1 for _, case, _ in results)} over two ranks: "
        + ", ".join(f"{counts[word]} {word}" for word in SEVERITY if counts[word])
        + f"; {counts['refused'] / total:.1%} refused, {failed} failed"
    )


def table(results: Sequence[tuple[Draw, Case, Outcome]]) -> None:
    """Print, for each variant, its outcomes and the first seed of the worst one."""
    print("| Issue | Kind: variant | Outcomes | Seed of the worst |\n|---|---|---|---|")
    for variant in variants():
        name = f"{variant.kind}: {variant.name}"
        own = [(task, outcome) for task, case, outcome in results if task.only == name]
        if not own:
            continue
        counts = Counter(outcome.word for _, outcome in own)
        said = ", ".join(f"{counts[word]} {word}" for word in SEVERITY if counts[word])
        worst = max(own, key=lambda pair: SEVERITY.index(pair[1].word))
        print(f"| {variant.issue} | {name} | {said} | {worst[0].seed} |")


def main() -> None:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="the number of random cases (default: 2000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, nargs="+", help="run these seeds instead")
    parser.add_argument("--each", type=int, help="run this number of cases of every variant by itself")
    parser.add_argument("--only", help='with --each: only this "kind: variant"')
    parser.add_argument("--jobs", type=int, default=2, help="the number of processes (default: 2)")
    parser.add_argument("--results", type=Path, help="write the outcomes to this file, one JSON line each")
    parser.add_argument("--redundancy", action="store_true", help="only cases over two ranks, with redundancy=")
    parser.add_argument("--tensor", type=int, default=1, help="only cases over two ranks, with this tensor parallelism")
    given = parser.parse_args()
    seeds = given.seeds or range(given.first, given.first + given.cases)
    tasks = [Draw(seed, None, given.redundancy, given.tensor) for seed in seeds]
    if given.each:
        names = [f"{variant.kind}: {variant.name}" for variant in variants()]
        wanted = [name for name in names if given.only in (None, name)]
        tasks = [Draw(seed, name, given.redundancy, given.tensor) for name in wanted for seed in range(given.each)]
    if given.redundancy or given.tensor > 1:
        tasks = [task for task in tasks if drawn(task).world > 1]
    results = []
    for task, case, outcome in outcomes_of(tasks, given.jobs):
        results.append((task, case, outcome))
        if outcome.word not in PASSES or given.seeds:
            print(f"seed {task.seed}: {outcome.word}: {' + '.join(case.kinds)}: {outcome.detail}", flush=True)
        if given.results is not None:
            line = {"seed": task.seed, "kinds": case.kinds, "world": case.world, "outcome": outcome.word}
            with given.results.open("a") as file:
                file.write(json.dumps(line | {"detail": outcome.detail}) + "\n")
    if given.each:
        table(results)
    else:
        report(results)
    sys.exit(any(outcome.word not in PASSES for *_, outcome in results))


if __name__ == "__main__":
    main()
