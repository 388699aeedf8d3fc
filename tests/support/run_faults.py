"""Runs jobs/faults.py: measures how soon the other ranks (survivors) end after a fault, and checks their errors.

    python -m tests.support.run_faults '[["SIGSTOP", "later forward", 1]]' [--timeout 5] [--side-by-side 1]

Each case lists a fault, a phase, a rank, and optionally further fields of Case. Prints each outcome as a line of JSON.
This process imports torch once, and forks a process for each case, which forks the ranks.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import slow_imports  # noqa: F401
from tests.support.fault_processes import forked, kill, own_folder, store_beside
from tests.support.jobs.faults import Case, as_script, run_rank

ROOT = Path(__file__).parents[2]
SPARE_S = 5.0  # a survivor that ends later than this after the timeout is late
PATIENCE_S = 40.0  # survivors that still run this long after the timeout are killed
_RANK = r"rank \d+(?: \([^)]*\))?"
_BLAME = re.compile(rf"({_RANK}(?:, {_RANK})*) (?:failed:|ha(?:s|ve) not joined)")


class Outcome(NamedTuple):
    """The outcome of a case.

    happened: whether the fault occurred. seconds: the time from the fault to the last survivor's error or end.
    survivors: the number of survivors that raised an error. late: the survivors that ended late. wrong: the errors of
    survivors that do not name the failed rank, or that name another rank.
    """

    case: Case
    happened: bool
    seconds: float
    survivors: int
    late: list[int]
    wrong: list[str]


def outcomes(cases: Sequence[Case], timeout_s: float, side_by_side: int = 1, patience_s: float = 600) -> list[Outcome]:
    """Run cases in a separate process that imports torch once, ``side_by_side`` cases at a time."""
    command = [sys.executable, "-m", __spec__.name, json.dumps(cases)]
    command += ["--timeout", str(timeout_s), "--side-by-side", str(side_by_side)]
    run = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=patience_s)
    return [Outcome(Case(*case), *rest) for case, *rest in map(json.loads, run.stdout.splitlines())]


def outcome(case: Case, timeout_s: float) -> Outcome:
    """Run one case, and return its outcome."""
    with own_folder() as folder, store_beside(case.store, folder) as port:
        said = [folder / str(rank) for rank in range(case.num_ranks)]
        jobs = [_rank(case, rank, port, timeout_s, own) for rank, own in enumerate(said)]
        started = [forked(job, own) for job, own in zip(jobs, said, strict=True)]
        try:
            ended = _watched(case, started, said[case.rank], timeout_s)
        finally:
            for process in started:
                kill(process)
        return _judged(case, said, ended, timeout_s)


def _judged(case: Case, said: Sequence[Path], ended: dict[int, float], timeout_s: float) -> Outcome:
    def read(rank: int) -> dict[str, object]:
        return json.loads(said[rank].read_text()) if said[rank].exists() else {}  # type: ignore[no-any-return]

    fault_s = float(read(case.rank).get("fault_s", 0))  # type: ignore[arg-type]
    slowest, late, wrong, failed = 0.0, [], [], 0
    for rank in range(case.num_ranks):
        if rank == case.rank:
            continue
        own, text = read(rank), said[rank].with_suffix(".err").read_text()
        end_s = own.get("raised_s", own.get("ended_s", ended.get(rank)))
        seconds = 1e9 if end_s is None else float(end_s) - fault_s  # type: ignore[arg-type]
        slowest = max(slowest, seconds)
        if seconds > timeout_s + SPARE_S:
            late.append(rank)
        if "ended_s" not in own:
            failed += 1
            error = str(own.get("error") or text[text.rfind("pipesched: ") :])
            of_replicas = bool(re.search("of its pipeline[,)]", error)) == (case.by != "fully_shard")
            if _named(error) != {case.rank} or not (of_replicas or "hosts the store" in error):
                wrong.append(f"rank {rank}: {error[:600] or 'nothing'}")
    return Outcome(case, fault_s > 0, round(slowest, 2), failed, late, wrong)


def _named(error: str) -> set[int]:
    """Return the global ranks that an error names as failed."""
    found = _BLAME.search(error)
    if not found:
        return set()
    names = re.findall(_RANK, found[1])
    return {int(re.findall(r"global rank (\d+)", name)[0] if "global" in name else name.split()[1]) for name in names}


# ---- processes ------------------------------------------------------------------------------------------------------


def _rank(case: Case, rank: int, port: int, timeout_s: float, said: Path) -> Callable[[], int]:
    return lambda: as_script(lambda: run_rank(case, rank, port, timeout_s, said), said)


def _watched(case: Case, started: Sequence[int], said: Path, timeout_s: float) -> dict[int, float]:
    """Wait until all survivors have ended or are too late, and return the time at which each ended."""
    ended: dict[int, float] = {}
    end_s = time.monotonic() + 2 * PATIENCE_S
    seen = False
    while len(ended) < len(started) - 1 and time.monotonic() < end_s:
        if not seen and said.exists():
            seen, end_s = True, time.monotonic() + timeout_s + PATIENCE_S
        for rank, process in enumerate(started):
            if rank not in ended and rank != case.rank and os.waitpid(process, os.WNOHANG)[0]:
                ended[rank] = time.time()
        time.sleep(0.02)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--side-by-side", type=int, default=1)
    args = parser.parse_args()
    jobs = [(Case(*case), args.timeout) for case in json.loads(args.cases)]
    with multiprocessing.get_context("fork").Pool(args.side_by_side, maxtasksperchild=1) as pool:
        for one in pool.starmap(outcome, jobs, chunksize=1):
            print(json.dumps(one))


if __name__ == "__main__":
    main()
