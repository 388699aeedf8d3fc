"""Processes with the environment that torchrun gives its processes."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from tests.support.rank_processes import FORKED


def in_processes(count: int, job: Callable[..., Any], *args: Any, timeout_s: float = 100) -> list[Any]:
    """Run ``job(*args)`` in ``count`` new processes of one job, and return the result of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with FORKED.Pool(count) as pool:
        calls = [(rank, count, port, job, args) for rank in range(count)]
        return pool.starmap_async(_as_rank, calls, chunksize=1).get(timeout_s)


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
