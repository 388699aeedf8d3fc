"""Places: run the ranks of a test as threads of this process or as separate processes, so one test covers both.

A job is a function that runs in each process of a test. Its first argument is the process group of all ranks, or a
`OneProcess` if all ranks run in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Distributed, Pipeline, schedules
from pipesched.runtime.rank_grid import Inputs
from pipesched.runtime.stage import split_backward as backward


class OneProcess:
    """Stands in for a process group if all ranks are in this process."""

    def __init__(self, count: int) -> None:
        self._count = count

    def size(self) -> int:
        return self._count


#: A process group of torch.distributed, or a OneProcess.
Group = Any


class Run(Protocol):
    """A function that runs a job in each process of ``count`` ranks, and returns the results of all processes."""

    def __call__(self, count: int, job: Any, *args: Any) -> list[Any]: ...


def run_here(count: int, job: Any, *args: Any) -> list[Any]:
    return [job(OneProcess(count), *args)]


def is_one_process(group: Any) -> bool:
    return isinstance(group, OneProcess)


def has_last_rank(group: Any) -> bool:
    """Whether the last rank is in this process. In a chain with one stage per rank, the last rank has the outputs."""
    return is_one_process(group) or group.rank() == group.size() - 1


def place(group: Any, inputs: Inputs = "all") -> dict[str, Any]:
    if is_one_process(group):
        return {"devices": ["cpu"] * group.size()}
    distributed = Distributed(inputs=inputs, timeout=600)  # longer than the time limit of any test
    return {"mesh": DeviceMesh.from_group(group, "cpu"), "distributed": distributed}


@lru_cache
def mesh_of(replicas: int, ranks: int) -> DeviceMesh:
    """Return a mesh of all processes with these numbers of replicas and ranks. All processes must call this."""
    members = torch.arange(replicas * ranks).view(replicas, ranks)
    return DeviceMesh("cpu", members, mesh_dim_names=("dp", "pp"))


def even_boundaries(num_layers: int, num_stages: int) -> list[int]:
    return [num_layers * stage // num_stages for stage in range(1, num_stages)]


def pipeline(group: Any, model: nn.Sequential, sample: Any, *, schedule: str = "1f1b", **options: Any) -> Pipeline:
    """Return a Pipeline over the group, with the layers divided evenly by their number."""
    num_stages = group.size() * schedules.get(schedule).chunks_per_rank
    choices = {"boundaries": even_boundaries(len(model), num_stages), "num_microbatches": 4, "seed": 5, **options}
    return Pipeline(model, sample, schedule=schedule, **place(group), **choices)


@contextmanager
def every_product_deferred() -> Iterator[None]:
    """Defer the weight gradients of all matrix products to W, as in a large model, however small the products are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "PAYS_FLOPS", 0)
        yield
