"""Measure: functions that run two alternatives in turn (A B A B ...), and statistics of their results."""

import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

__all__ = [
    "Ratio",
    "Served",
    "elsewhere",
    "in_ranks",
    "keep_freed_memory",
    "machine",
    "paired",
    "ratio",
    "serve_turns",
    "slowest_s",
]


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % bootstrap interval, and the medians of both alternatives."""

    value: float
    low: float
    high: float
    first: float
    second: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Call both functions in turn, after one warm-up call of each; return the values that each function returned."""
    first(), second()
    results = [(first(), second()) for _ in range(pairs)]
    return [a for a, _ in results], [b for _, b in results]


def ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Return the statistics of the ratios of ``first`` to ``second``, pair by pair."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return Ratio(median(ratios), medians[25], medians[974], median(first), median(second))


def in_ranks(count: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``job(rank, *args)`` in processes of one gloo group, with one thread each; return the result of each rank."""
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # port 0: any free port
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        return pool.starmap(_in_rank, [(rank, count, store.port, job, args) for rank in range(count)], chunksize=1)


def _in_rank(rank: int, count: int, port: int, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, None, False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        return job(rank, *args)
    finally:
        distributed.destroy_process_group()


class Served:
    """A process that runs a script with the pipesched of a checkout. The script calls ``serve_turns``."""

    def __init__(self, checkout: Path, *command: str) -> None:
        paths = [str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> list[Any]:
        """Run one turn, and return the result of each rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        results: list[Any] = json.loads(self._process.stdout.readline())
        return results

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


#: Makes, for a rank, the function that runs a turn and returns a result that JSON can hold.
Turns = Callable[..., AbstractContextManager[Callable[[], Any]]]


def serve_turns(count: int, turns: Turns, *args: Any) -> None:
    """Run a turn in ``count`` gloo ranks for each line of the standard input, and print the results of the ranks.

    In each rank, ``turns(rank, *args)`` returns a context that yields the function that runs a turn.
    """
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # port 0: any free port
    context = multiprocessing.get_context("spawn")
    shared = (count, store.port, _serve_rank, (turns, *args))
    others = [context.Process(target=_in_rank, args=(rank, *shared)) for rank in range(1, count)]
    for other in others:
        other.start()
    _in_rank(0, *shared)
    for other in others:
        other.join()


def _serve_rank(rank: int, turns: Turns, *args: Any) -> None:
    more = torch.zeros(1)
    with turns(rank, *args) as turn:
        while True:
            more[0] = 0 if rank else bool(sys.stdin.readline())
            distributed.broadcast(more, 0)
            if not more:
                return
            results: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(results, turn())
            if rank == 0:
                print(json.dumps(results), flush=True)


def slowest_s(step: Callable[[], Any]) -> float:
    """Run a step; return the seconds that it takes on the slowest rank. Collective over the default group."""
    distributed.barrier()
    start = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    distributed.all_reduce(took, distributed.ReduceOp.MAX)
    return float(took)


def elsewhere(job: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a separate process and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(job, args)


def keep_freed_memory() -> None:
    """Make processes that start from now on keep their freed memory (glibc).

    Otherwise, memory that a process returns and requests again causes page faults. These take 2 to 15 % of a step, and
    vary from run to run.
    """
    limits = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "4000000000")
    os.environ.update(limits)


def machine() -> str:
    """Return a line with the processor, the number of cores, the device, and the versions of Python and torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")] or [platform.processor()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "no GPU"
    if accelerator is not None:
        from pipesched.devices.selection import accelerator_name  # not in older checkouts, which scripts may measure

        device = f"{torch.accelerator.device_count()} x {accelerator_name(accelerator)}"
    return f"{names[0]} x {len(names)}, {device}, Python {platform.python_version()}, torch {torch.__version__}"
