"""Rank processes: processes that serve as ranks for all tests of a file. Each runs the jobs that it receives in turn.

They are forked from a server that has imported torch once, so starting them takes a tenth of a second.
"""

import datetime
import gc
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from tests.support.quick_measurements import measure_quickly
from tests.support.quick_searches import search_quickly

MINUTE = datetime.timedelta(seconds=60)
FORKED = multiprocessing.get_context("forkserver")
PRELOADED = [
    "tests.support.slow_imports",
    "tests.support.quick_measurements",
    "tests.support.quick_searches",
    "tests.support.jobs.peer",
    "tests.support.run_losses",
]
FORKED.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Import modules once, in the server, instead of in each process. Call this while tests are collected."""
    PRELOADED.extend(module for module in modules if module not in PRELOADED)
    FORKED.set_forkserver_preload(PRELOADED)


class Ranks:
    """``count`` processes, with a group for each number of ranks that jobs ask for.

    Args:
        count: the number of processes.
        begin: called first in each process with its rank; returns the backend of the groups. Default: gloo.

    """

    def __init__(self, count: int, begin: Callable[[int], str] | None = None) -> None:
        self._count = count
        self._begin = begin or _over_gloo
        self._start()

    def _start(self) -> None:
        count = self._count
        self._store = distributed.TCPStore("127.0.0.1", 0, None, True, MINUTE, wait_for_workers=False)  # a free port
        self._pipes, self.processes = [], []
        self._sizes: set[int] = set()  # those of the groups that have been made
        for rank in range(count):
            here, there = FORKED.Pipe()
            args = there, rank, count, self._store.port, self._begin
            process = FORKED.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        started = [pipe.poll(MINUTE.total_seconds()) and pipe.recv() for pipe in self._pipes]
        if not all(started):
            self.close()
            raise AssertionError(f"{started.count(True)} of {count} processes have started within a minute")

    def run(self, count: int, job: Any, *args: Any, timeout_s: float = 30) -> list[Any]:
        """Run ``job(group, *args)`` on the first ``count`` ranks, and return the results.

        Raises AssertionError if a rank raises an error or does not answer within ``timeout_s``. If an earlier job has
        ended a process, all processes are started again first.
        """
        if not all(process.is_alive() for process in self.processes):
            self.close()
            self._start()
        if count not in self._sizes:
            self._sizes.add(count)
            for pipe in self._pipes:
                pipe.send((count, None, ()))  # all processes make the group
        for pipe in self._pipes[:count]:
            pipe.send((count, job, args))
        end_s = time.monotonic() + timeout_s
        answers = [self._answer(rank, end_s) for rank in range(count)]
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            if any("no answer" in text for text in failed):
                self.close()
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]

    def _answer(self, rank: int, end_s: float) -> tuple[bool, Any]:
        try:
            if self._pipes[rank].poll(max(0, end_s - time.monotonic())):
                return self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join()
            return True, None  # the job has ended its process, which some jobs do on purpose
        return False, "no answer in time"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the first processes. All processes must call this; later jobs get the same mesh.

    A new mesh would have new process groups, whose threads would stay until the process ends.
    """
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)


def _over_gloo(rank: int) -> str:
    return "gloo"


def _serve(pipe: Any, rank: int, count: int, port: int, begin: Callable[[int], str]) -> None:
    gc.freeze()  # garbage collection would write to the imported objects, and so copy the memory pages that ranks share
    measure_quickly()
    search_quickly()
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, None, False, MINUTE)
    distributed.init_process_group(begin(rank), store=store, rank=rank, world_size=count, timeout=MINUTE)
    groups: dict[int, Any] = {}
    pipe.send(True)
    while True:
        try:
            size, job, args = pipe.recv()
        except EOFError:
            os._exit(0)
        if job is None:
            groups[size] = distributed.new_group(list(range(size)))
            continue
        torch.manual_seed(0)  # a job's random numbers do not depend on the jobs before it
        try:
            answer = True, job(groups[size], *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
        del answer, job, args
        gc.collect()  # ends the threads of process groups that nothing refers to, which wake up 100 times a second
