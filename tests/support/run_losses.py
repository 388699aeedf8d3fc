"""Runs jobs/losses.py: ranks are lost, and the others go on. Checks their losses and how long they take.

    python -m tests.support.run_losses '[["SIGKILL", "F", 1]]' [--timeout 5] [--side-by-side 1]

Each case lists a fault, a moment, a rank, and optionally further fields of LossCase. Prints each outcome as a line of
JSON. This process imports torch once, and forks a process for each case, which forks the ranks.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import slow_imports  # noqa: F401
from tests.support.fault_processes import forked, kill, own_folder, store_beside
from tests.support.jobs.faults import as_script
from tests.support.jobs.losses import AT, STEPS, Files, LossCase, run_rank, write
from tests.support.network_namespaces import enter, hosts

ROOT = Path(__file__).parents[2]
START_S = 60.0  # the ranks must have begun to fail or to end after this time
PATIENCE_S = 30.0  # survivors that have not run all steps this long after the timeout are killed
NOTICED_S = 0.5  # a loss must be noticed within this time
NOTICED_LATE_S = 3.0  # a frozen rank or a cut link must be noticed this long after the timeout
SPARE_S = 1.0  # the lost step must have run again after a step and this time
_QUICK = ("SIGKILL", "sys.exit(3)", "os._exit(0)", "raise")
_GIVEN_UP = ("go on without", "gone on without", "only the larger part")
_NOTHING_LEFT = "start the job again from the last checkpoint"


class Undisturbed(NamedTuple):
    """A run in which no rank is lost: its losses, and how long a step takes, and the call that may be lost."""

    losses: list[float]
    step_s: float
    call_s: float


class LossOutcome(NamedTuple):
    """The outcome of a case.

    expected: the number of ranks that must go on. recovered: the number of ranks that went on with the right losses.
    noticed_s: the longest time from the fault until a survivor noticed it. repeated_s: the longest time from there to
    the end of the call that ran again. step_s: the time of an undisturbed step. wrong: what is not as it must be.
    late: what took too long.
    """

    case: LossCase
    expected: int
    recovered: int
    noticed_s: float
    repeated_s: float
    step_s: float
    wrong: list[str]
    late: list[str]


def outcomes(cases: Sequence[LossCase], timeout_s: float, side_by_side: int = 1) -> Iterator[LossOutcome]:
    """Run cases in a separate process that imports torch once, ``side_by_side`` cases at a time. Yields as they end."""
    command = [sys.executable, "-m", __spec__.name, json.dumps(cases)]
    command += ["--timeout", str(timeout_s), "--side-by-side", str(side_by_side)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            case, *rest = json.loads(line)
            yield LossOutcome(LossCase(*case), *rest)
    assert run.returncode == 0, f"the process that runs the cases has ended with code {run.returncode}"


def outcome(case: LossCase, timeout_s: float, undisturbed: Undisturbed) -> LossOutcome:
    """Run one case, and return its outcome."""
    with _ran(case, timeout_s) as (files, wrong):
        return _judged(case, files, timeout_s, undisturbed, wrong)


def undisturbed_run(case: LossCase, timeout_s: float) -> Undisturbed:
    """Run the script of a case without a loss."""
    with _ran(case._replace(fault="", second=None, store="rank 0"), timeout_s) as (files, wrong):
        done = [json.loads(files.done(rank).read_text()) for rank in range(case.num_ranks)]
        losses = [one["losses"] for one in done]
        assert not wrong, wrong
        assert losses == losses[:1] * case.num_ranks, losses
        assert len(losses[0]) == STEPS > AT
        lengths = [b - a for one in done for a, b in pairwise(one["ended_s"])]
        step_s = statistics.median(lengths)
        own = max(one["ended_s"][AT] - one["ended_s"][AT - 1] for one in done)
        return Undisturbed(losses[0], step_s, own if _calls_of(case) else step_s)


def kind_of(case: LossCase) -> tuple[Any, ...]:
    """Return what must be equal in a run and in the undisturbed run with which it is compared."""
    return case.schedule, case.num_ranks, case.replicas, _calls_of(case)


def _calls_of(case: LossCase) -> str:
    """Return the call between two steps that may be lost; "" if there is none."""
    return case.moment if case.moment in ("replan", "save") else ""


@contextmanager
def _ran(case: LossCase, timeout_s: float) -> Iterator[tuple[Files, list[str]]]:
    """Run the ranks of a case until all have ended. Yield their files, and what was not as it must be."""
    with own_folder() as folder, _hosts(case) as names, _store(case, folder) as port:
        files = Files(folder)
        write(files.hosts, names)
        jobs = [partial(_rank, case, rank, port, timeout_s, files, names) for rank in range(case.num_ranks)]
        started = [forked(job, folder / f"{rank}.log") for rank, job in enumerate(jobs)]
        try:
            wrong = _Watch(case, files, started, timeout_s).run()
        finally:
            for process in started:
                kill(process)
        yield files, wrong


def _rank(case: LossCase, rank: int, port: int, timeout_s: float, files: Files, names: Sequence[str]) -> int:
    if names:
        enter(names[rank])
    return as_script(lambda: run_rank(case, rank, port, timeout_s, files), files.end(rank))


@contextmanager
def _hosts(case: LossCase) -> Iterator[list[str]]:
    """Make a host for each rank if the case needs them; yield their names."""
    if not case.over_hosts:
        yield []
        return
    with hosts(case.num_ranks) as made:
        yield made.names


@contextmanager
def _store(case: LossCase, folder: Path) -> Iterator[int]:
    if case.store != "env://":
        with store_beside(case.store, folder) as port:
            yield port
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield port


class _Watch:
    """Watches the ranks of a case until all have ended."""

    def __init__(self, case: LossCase, files: Files, started: Sequence[int], timeout_s: float) -> None:
        self._case, self._files, self._started, self._timeout_s = case, files, started, timeout_s
        self._ended: set[int] = set()

    def run(self) -> list[str]:
        """Wake frozen ranks once the others have run all steps. Return what was not as it must be."""
        case, files = self._case, self._files
        ranks = range(case.num_ranks)
        frozen = [rank for rank in case.victims if case.fault == "SIGSTOP"]
        wrong = []
        begun = [files.fault(rank) for rank in case.victims]
        self._wait(lambda: all(file.exists() for file in begun) or len(self._ended) == len(ranks), START_S)
        live = set(ranks).difference(frozen)
        if not self._wait(lambda: live <= self._ended | self._done(), self._timeout_s + PATIENCE_S):
            wrong.append(f"ranks {sorted(live - self._ended - self._done())} neither go on nor end")
        before = _contents(files.checkpoint)
        for rank in frozen:
            os.kill(self._started[rank], signal.SIGCONT)
        if not self._wait(lambda: self._ended.issuperset(frozen), self._timeout_s + PATIENCE_S):
            wrong.append(f"the frozen rank {frozen} does not end after it has woken")
        if _contents(files.checkpoint) != before:
            wrong.append(f"the frozen rank {frozen} has written to the checkpoint")
        files.over.touch()
        if not self._wait(lambda: len(self._ended) == len(ranks), PATIENCE_S):
            wrong.append(f"ranks {sorted(set(ranks) - self._ended)} do not end")
        return wrong

    def _done(self) -> set[int]:
        return {rank for rank in range(self._case.num_ranks) if self._files.done(rank).exists()}

    def _wait(self, met: Any, patience_s: float) -> bool:
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            for rank, process in enumerate(self._started):
                if rank not in self._ended and os.waitpid(process, os.WNOHANG)[0]:
                    self._ended.add(rank)
            if met():
                return True
            time.sleep(0.01)
        return False


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change of each file."""
    files = [file for file in folder.parent.rglob("checkpoint*/**/*") if file.is_file()]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _judged(case: LossCase, files: Files, timeout_s: float, undisturbed: Undisturbed, wrong: list[str]) -> LossOutcome:
    ranks = range(case.num_ranks)
    done = {rank: json.loads(files.done(rank).read_text()) for rank in ranks if files.done(rank).exists()}
    errors = {rank: _error(files, rank) for rank in ranks}
    wrong += [f"rank {rank} was not lost; {errors[rank]}" for rank in case.victims if not files.fault(rank).exists()]
    expected = case.num_ranks - case.num_lost
    if len(done) != expected:
        wrong.append(f"{len(done)} ranks go on; {expected} must")
    other = [rank for rank, one in done.items() if one["losses"] != undisturbed.losses]
    if other:
        wrong.append(f"ranks {other} have other losses, first in step {_first_difference(done[other[0]], undisturbed)}")
    wrong += _wrong_errors(case, errors, done)
    noticed_s, repeated_s = _times(case, files, done)
    quick, late = case.fault in _QUICK, []
    if noticed_s > (NOTICED_S if quick else timeout_s + NOTICED_LATE_S):
        late.append(f"noticed after {noticed_s:.2f} s")
    if repeated_s > _most_again(done) * undisturbed.call_s + SPARE_S:
        late.append(f"repeated after {repeated_s:.2f} s")
    recovered, step_s = len(done) - len(other), round(undisturbed.step_s, 3)
    return LossOutcome(case, expected, recovered, noticed_s, repeated_s, step_s, wrong, late)


def _error(files: Files, rank: int) -> str:
    if not files.end(rank).exists():
        return ""
    return str(json.loads(files.end(rank).read_text()).get("error", ""))


def _first_difference(done: dict[str, Any], undisturbed: Undisturbed) -> int:
    pairs = enumerate(zip(done["losses"], undisturbed.losses, strict=False))
    return next((step for step, (own, right) in pairs if own != right), -1)


def _wrong_errors(case: LossCase, errors: dict[int, str], done: Collection[int]) -> list[str]:
    """Return the errors that do not say what they must."""
    wrong = []
    for rank, text in errors.items():
        if rank in done:
            right = not text
        elif case.is_refused and rank not in case.victims:
            right = _NOTHING_LEFT in text
        elif case.fault in _QUICK:
            right = rank in case.victims
        else:
            right = any(words in text for words in _GIVEN_UP) or (case.is_refused and _NOTHING_LEFT in text)
        if not right:
            wrong.append(f"rank {rank}: {text[:600] or 'no error'}")
    return wrong


def _times(case: LossCase, files: Files, done: dict[int, dict[str, Any]]) -> tuple[float, float]:
    """Return the longest time until a survivor noticed the fault, and from there to the end of the repeated call."""
    faults = [
        json.loads(files.fault(rank).read_text())["fault_s"] for rank in case.victims if files.fault(rank).exists()
    ]
    noticed, repeated = [0.0], [0.0]
    for one in done.values():
        seen = min(one["noticed_s"], default=None)
        if seen is None or not faults:
            continue
        noticed.append(seen - min(faults))
        last = max(one["noticed_s"])
        repeated.append(min((end for end in one["ended_s"] if end > last), default=last + 1e3) - last)
    return round(max(noticed), 3), round(max(repeated), 3)


def _most_again(done: dict[int, dict[str, Any]]) -> int:
    """Return how many steps have run again at most: two if a rank was lost before the copies of a step were sent."""
    again = [1]
    for one in done.values():
        last = max(one["noticed_s"], default=0.0)
        begun = sum(end < last for end in one["ended_s"])  # also calls other than steps, so that no rank gets too much
        found = [int(text) for said in one["said"] for text in re.findall(r"before step (\d+)", said)]
        again += [min(2, begun + 1 - step) for step in found]
    return max(again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--side-by-side", type=int, default=1)
    args = parser.parse_args()
    cases = [LossCase(*case) for case in json.loads(args.cases)]
    with multiprocessing.get_context("fork").Pool(args.side_by_side, maxtasksperchild=1) as pool:
        kinds = {kind_of(case): case for case in cases}
        found = pool.starmap(undisturbed_run, [(case, args.timeout) for case in kinds.values()], chunksize=1)
        known = dict(zip(kinds, found, strict=True))
        jobs = [(case, args.timeout, known[kind_of(case)]) for case in cases]
        for one in pool.imap(_outcome_of, jobs, chunksize=1):
            print(json.dumps(one), flush=True)


def _outcome_of(job: tuple[LossCase, float, Undisturbed]) -> LossOutcome:
    return outcome(*job)


if __name__ == "__main__":
    main()
