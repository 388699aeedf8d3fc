"""Changing cluster: ranks become slow and fast again while a run goes on, and the plan follows.

    python benchmarks/changing_cluster.py [--steps 200] [--layer-ms 2] [--every 5]

Four processes train layers that sleep. After a quarter of the steps, two of the processes take twice as long for each
layer, and after three quarters they are fast again. The run has ``Distributed(replan_every=...)``. For each period, the
table compares the median step with the optimum of the period: the median step of a run under the plan that the planner
finds for the true times of the layers and the true speeds of the processes. The first steps of a period, in which the
change is noticed, are left out.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from benchmarks.measure import in_ranks
from benchmarks.sleeping import ROWS, WIDTH, Sleeping
from pipesched import Distributed, Pipeline

RANKS, LAYERS, MICROBATCHES = 4, 16, 8
SLOW = {1: 2.0, 2: 2.0}  #: process -> how many times slower it becomes
SKIPPED = 10  #: the number of steps of a period that may still be slower


class Cluster:
    """The layers of one process, which can become slow."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.layers = [Sleeping(seconds) for _ in range(LAYERS)]

    def become(self, factor: float) -> None:
        for layer in self.layers:
            layer.timer.seconds = self.seconds * factor


def pipeline(cluster: Cluster, mesh: DeviceMesh, **options: Any) -> Pipeline:
    """Return a pipeline of the layers over all processes."""
    return Pipeline(
        nn.Sequential(*cluster.layers),
        torch.randn(ROWS, WIDTH),
        mesh=mesh,
        loss_fn=functional.mse_loss,
        optimizer=torch.optim.SGD,
        num_microbatches=MICROBATCHES,
        **options,
    )


def timed_step(pipe: Pipeline, x: Tensor) -> float:
    """Return the time of a step in seconds, until its loss is known."""
    distributed.barrier()
    begin = time.perf_counter()
    float(pipe.step(x, target=x))
    return time.perf_counter() - begin


def described(pipe: Pipeline) -> str:
    """Return the plan as text: the schedule, and the number of layers in each process."""
    plan = pipe.plan
    ranks = pipe._running.host.grid.rows[0]
    held = dict.fromkeys(range(RANKS), 0)
    for rank, names in zip(plan.program.placement, plan.stages, strict=True):
        held[ranks[rank]] += len(names)
    return f"{plan.schedule}, {len(plan.stages)} stages, layers of each process {list(held.values())}"


def changing(rank: int, steps: int, seconds: float, every: int) -> tuple[list[float], list[tuple[int, str]]]:
    """Train while processes change; return the time of each step, and the plans with the steps where they began."""
    mesh = DeviceMesh("cpu", range(RANKS), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    cluster = Cluster(seconds)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    times: list[float] = []
    plans: list[tuple[int, str]] = []
    with pipeline(cluster, mesh, distributed=Distributed(replan_every=every)) as pipe:
        for step in range(steps):
            is_slow = steps // 4 <= step < 3 * steps // 4
            cluster.become(SLOW.get(rank, 1.0) if is_slow else 1.0)
            times.append(timed_step(pipe, x))
            if not plans or plans[-1][1] != described(pipe):
                plans.append((step, described(pipe)))
    return times, plans


def optimal(rank: int, seconds: float, is_slow: bool, steps: int) -> tuple[list[float], str]:
    """Run the plan that the search finds for the true times of the layers and the true speeds of the processes."""
    mesh = DeviceMesh("cpu", range(RANKS), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    cluster = Cluster(seconds)
    cluster.become(SLOW.get(rank, 1.0) if is_slow else 1.0)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    with pipeline(cluster, mesh) as pipe:
        known = dict.fromkeys(map(str, range(LAYERS)), LayerCosts(forward_s=seconds, input_grad_s=seconds, weight_grad_s=seconds))
        for _ in range(5):
            timed_step(pipe, x)
        for _ in range(3):
            pipe.replan()
            for _ in range(5):
                timed_step(pipe, x)
        return [timed_step(pipe, x) for _ in range(steps)], described(pipe)
