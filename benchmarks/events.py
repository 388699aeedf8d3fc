"""Plays a trace of losses and returns of processes over a job that trains, and compares its weights at the end.

    python benchmarks/events.py [--processes 6] [--events 30] [--seed 0] [--every 2.0]

Each event kills a process, or starts one that joins the job. The job never has fewer than 2 processes. At the end, the
losses that all processes have seen, and the weights, must equal those of an undisturbed run in one process to the bit.
"""

import argparse
import json
import os
import random
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from tests.support import slow_imports  # noqa: F401
from tests.support.jobs import joins as jobs
from tests.support.jobs.joins import Script
from tests.support.rank_processes import FORKED

PAUSE_S = 0.05  # each step lasts at least this long


class Job:
    """The processes of a job, which are killed and started as a trace states."""

    def __init__(self, folder: Path, count: int, script: Script) -> None:
        self._folder = folder
        self._script = script
        store = distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=1), wait_for_workers=False)
        self._store = store
        self.processes: list[Any] = []
        for rank in range(count):
            self._add(jobs.member, rank, count, store.port)

    def _add(self, job: Any, *args: Any) -> None:
        process = FORKED.Process(target=job, args=(str(self._folder), *args, self._script))
        process.start()
        self.processes.append(process)

    @property
    def alive(self) -> list[Any]:
        return [process for process in self.processes if process.is_alive()]

    def lose(self, chance: random.Random) -> str:
        """Kill one of the processes that have made their pipeline. Return what happened."""
        ready = [process for process in self.alive if (self._folder / f"{process.pid}.ready").exists()]
        if len(ready) < 3:
            return "nobody is lost, because fewer than 3 processes train"
        process = chance.choice(ready)
        os.kill(process.pid, 9)
        process.join()
        return f"{process.pid} is lost, {len(ready) - 1} train"

    def join(self) -> str:
        """Start a process that joins. Return what happened."""
        self._add(jobs.newcomer)
        return f"{self.processes[-1].pid} joins, {len(self.alive)} processes"

    def results(self) -> list[Any]:
        """Wait for the end of all processes, and return what those have written that have not been killed."""
        for process in self.processes:
            process.join()
        files = [self._folder / f"{process.pid}.done" for process in self.processes]
        return [json.loads(file.read_text()) for file in files if file.exists()]


def trace(count: int, events: int, every_s: float, chance: random.Random) -> list[tuple[float, str]]:
    """Return random events as (pause before it in seconds, "down" or "up"), for at most ``count`` processes."""
    alive, found = count, []
    for _ in range(events):
        kind = "up" if alive <= 3 or (alive < count and chance.random() < 0.5) else "down"
        alive += 1 if kind == "up" else -1
        found.append((every_s * (0.5 + chance.random()), kind))
    return found


def main() -> None:
    """Play the trace, and print its events and the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=2.0, help="mean time between two events, in seconds")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    plan = trace(args.processes, args.events, args.every, chance)
    steps = int((sum(pause for pause, _ in plan) + 15) / PAUSE_S / 2)
    losses, weights = jobs.undisturbed(steps)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), args.processes, Script(num_steps=steps, pause_s=PAUSE_S))
        while len(list(Path(folder).glob("*.ready"))) < args.processes:
            time.sleep(0.1)
        begun_s = time.monotonic()
        for pause_s, kind in plan:
            time.sleep(pause_s)
            said = job.lose(chance) if kind == "down" else job.join()
            print(f"{time.monotonic() - begun_s:6.1f} s  {kind:4}  {said}", flush=True)
        results = job.results()
    errors = [found["error"] for found in results if "error" in found]
    good = [found for found in results if "error" not in found]
    equal = [
        found
        for found in good
        if found["weights"] == weights and all(losses[int(step)] == loss for step, loss in found["losses"].items())
    ]
    told = [one for found in good for one in found["told"]]
    seconds = [float(one.rpartition(", ")[2].partition(" s")[0]) for one in told]
    print(f"{steps} steps; {len(good)} processes reached the end, {len(equal)} with the bits of an undisturbed run")
    median_s = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    print(f"{len(told)} changes told; they took {median_s:.2f} s (median), at most {max(seconds, default=0.0):.2f} s")
    for error in errors:
        print(error)


if __name__ == "__main__":
    main()
