"""Processes with the environment that torchrun gives its processes."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from tests.support.rank_processes import FORKED, preload

preload("tests.hf.jobs")  # importing transformers takes seconds


def in_processes(count: int, job: Callable[..., Any], *args: Any, timeout_s: float = 100) -> list[Any]:
    """Run ``job(*args)`` in ``count`` new processes of one job, and return the result of each."""
    port = _free_port()
    calls = [(rank, count, port, job, args) for rank in range(count)]
    with FORKED.Pool(count) as pool:
        return pool.starmap_async(_as_rank, calls, chunksize=1).get(timeout_s)


def exit_codes(
    count: int, victim: int, job: Callable[..., Any], *args: Any, kills_others: bool, timeout_s: float = 200
) -> list[int | None]:
    """Run ``job(*args)`` in ``count`` new processes of one job, and return the exit code of each.

    Raises AssertionError if the victim has not died within ``timeout_s``. Other processes that still run then are
    killed, so that their exit code is that of the signal.

    Args:
        count: the number of processes.
        victim: the rank of the process that kills itself.
        job: the function that each process runs.
        *args: the arguments of ``job``.
        kills_others: whether the other processes are killed once the victim has died, as a batch system does.
        timeout_s: how long the job may take.

    """
    port, end_s = _free_port(), time.monotonic() + timeout_s
    processes = [
        FORKED.Process(target=_as_rank, args=(rank, count, port, job, args), daemon=True) for rank in range(count)
    ]
    for process in processes:
        process.start()
    processes[victim].join(timeout_s)
    is_late = processes[victim].is_alive()
    for process in processes:
        process.join(0 if kills_others else max(0, end_s - time.monotonic()))
        process.kill()
    for process in processes:
        process.join()
    assert not is_late, f"rank {victim} has not died within {timeout_s:g} s"
    return [process.exitcode for process in processes]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _as_rank(rank: int, count: int, port: int, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    numbers |= {"OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in {**address, **numbers}.items()})
    torch.set_num_threads(1)
    try:
        return job(*args)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
