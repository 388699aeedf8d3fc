"""Changing cluster: ranks become slow and fast again while a run goes on, and the plan follows.

    python benchmarks/changing_cluster.py [--steps 200] [--layer-ms 4] [--every 5]

Four processes train layers that sleep. After a quarter of the steps, two of the processes take twice as long for each
layer, and after three quarters they are fast again. The run has ``Distributed(replan_every=...)``. For each period, the
table compares the median step with the optimum of the period: the median step of a run under the plan that the planner
finds for the true times of the layers and the true speeds of the processes. The first steps of a period, in which the
change is noticed, are left out. The steps before which the plan was looked at are listed below the table.
"""

import argparse
import time
from itertools import pairwise, permutations
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from benchmarks.measure import in_ranks
from benchmarks.sleeping import ROWS, WIDTH, Sleeping
from pipesched import Distributed, Pipeline, Plan, Profile
from pipesched.pipeline.plan_switch import UserStates
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import find_plan

RANKS, LAYERS, MICROBATCHES = 4, 16, 8
SLOW = {1: 2.0, 2: 2.0}  #: process -> how many times slower it becomes
SKIPPED = 10  #: the number of steps of a period that may still be slower


class Cluster:
    """The layers of one process, which can become slow."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.layers = [Sleeping(seconds) for _ in range(LAYERS)]

    def become(self, factor: float) -> None:
        """Let each layer take this many times as long."""
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


def true_optimum(seconds: float, is_slow: bool) -> tuple[Plan, tuple[int, ...]]:
    """Return the plan with the shortest simulated step for the true times, and the processes in the order of ranks.

    All orders of slow and fast processes are tried.
    """
    row = {"forward_ms": seconds * 1e3, "backward_ms": 2e3 * seconds, "weight_grad_ms": seconds * 1e3}
    row |= {"parameter_bytes": 4 * WIDTH**2, "output_bytes": 4 * ROWS * WIDTH, "activation_bytes": 4 * ROWS * WIDTH}
    profile = Profile.from_table([{"name": str(layer), **row} for layer in range(LAYERS)], rows=ROWS, optimizer="sgd")
    pins = Pins(profile.layers)
    factors = [SLOW.get(process, 1.0) if is_slow else 1.0 for process in range(RANKS)]
    found = {}
    for order in set(permutations(factors)):
        left = list(range(RANKS))
        ranks = [left.pop(next(at for at, process in enumerate(left) if factors[process] == own)) for own in order]
        speeds = {rank: 1 / own for rank, own in enumerate(order) if own != 1}
        request = SearchRequest(
            profile, pins, RANKS, ROWS * MICROBATCHES, [MICROBATCHES], ranks_are="processes", speeds=speeds
        )
        plan = find_plan(request)
        found[tuple(ranks)] = plan
    ranks = min(found, key=lambda order: found[order].alternatives[0].step_s)
    return found[ranks], ranks


def optimal(rank: int, seconds: float, is_slow: bool, steps: int, plan: Plan, ranks: tuple[int, ...]) -> list[float]:
    """Run steps under the plan that is optimal for the true times, and return their times."""
    mesh = DeviceMesh("cpu", range(RANKS), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    cluster = Cluster(seconds)
    cluster.become(SLOW.get(rank, 1.0) if is_slow else 1.0)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    with pipeline(cluster, mesh, schedule="1f1b") as pipe:
        pipe._replanner._switched(plan, UserStates(), (ranks,))
        return [timed_step(pipe, x) for _ in range(steps + 2)][2:]


def main() -> None:
    """Print the plans and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layer-ms", type=float, default=4.0)
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    seconds = args.layer_ms / 1000
    best = {is_slow: true_optimum(seconds, is_slow) for is_slow in (False, True)}
    due = {
        is_slow: median(in_ranks(RANKS, optimal, seconds, is_slow, 30, *best[is_slow])[0]) for is_slow in (False, True)
    }
    times, plans = in_ranks(RANKS, changing, args.steps, seconds, args.every)[0]
    for step, plan in plans:
        print(f"from step {step}: {plan}")
    table = Table("steps", "two processes are", "median step", "optimum of the period", "ratio")
    starts = [0, args.steps // 4, 3 * args.steps // 4, args.steps]
    for number, (first, last) in enumerate(pairwise(starts)):
        own = [own for step, own in enumerate(times[first:last]) if step >= SKIPPED and (first + step) % args.every]
        table.add_row(
            f"{first + SKIPPED} to {last - 1}",
            ("fast", "2x slower", "fast again")[number],
            f"{median(own) * 1e3:.1f} ms",
            f"{due[number == 1] * 1e3:.1f} ms",
            f"{median(own) / due[number == 1]:.3f}",
        )
    Console().print(table)
    asked = [own for step, own in enumerate(times) if step and step % args.every == 0]
    print(f"steps before which the plan was looked at: median {median(asked) * 1e3:.1f} ms, longest {max(asked):.2f} s")


if __name__ == "__main__":
    main()
