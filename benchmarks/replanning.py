"""Replanning: a run over six processes changes between plans of 1 to 6 ranks, while it trains.

    python benchmarks/replanning.py [--width 512] [--layers 48] [--changes 200]

The first table has the time of ``pipe.replan(plan)`` for all pairs of 1 to 6 ranks, with an optimizer of the user
(AdamW). The time is that of the slowest process. After each change, the loss of the next step is compared with the loss
of a run in one process that never changes; all bits must be equal. The bytes sent are compared with the bytes of
weights and optimizer states whose process changes. Then the run changes its plan many times, and the table shows the
memory, threads and open files of the processes after the first quarter of the changes and at the end.
"""

import argparse
import gc
import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from benchmarks.measure import in_ranks
from pipesched import Pipeline, Plan, schedules

RANKS, MICROBATCHES, ROWS = 6, 8, 16


def model(layers: int, width: int) -> nn.Sequential:
    """Return equal linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def plan_of(ranks: int, layers: int) -> Plan:
    """Return a plan that divides the layers evenly."""
    program = schedules.get("1f1b").program(ranks, MICROBATCHES)
    cuts = [layers * stage // ranks for stage in range(ranks + 1)]
    stages = tuple(tuple(map(str, range(*pair))) for pair in pairwise(cuts))
    return Plan(stages=stages, schedule="1f1b", program=program, checkpoint="never")


def batches(width: int) -> Iterator[Tensor]:
    """Yield batches for ever."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(ROWS, width, generator=generator)


def resources() -> tuple[float, int, int]:
    """Return the resident memory of this process in MB, and the numbers of its threads and open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, threading.active_count(), len(os.listdir("/proc/self/fd"))


class Run:
    """A run over all processes that can change its plan."""

    def __init__(self, layers: int, width: int) -> None:
        self.layers = layers
        mesh = DeviceMesh("cpu", range(RANKS), mesh_dim_names=("pp",))
        self.pipe = Pipeline(
            model(layers, width),
            torch.randn(ROWS // MICROBATCHES, width),
            mesh=mesh,
            loss_fn=functional.mse_loss,
            plan=plan_of(1, layers),
            seed=0,
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters())
        self.data = batches(width)
        self.ranks = 1
        gc.collect()  # of the many objects that the import of AdamW has made, which are no part of a change

    def step(self) -> float:
        """Run a step, and return its loss."""
        x = next(self.data)
        loss = float(self.pipe.step(x, target=x))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def change(self, ranks: int) -> tuple[float, int]:
        """Change the plan; return the time of the slowest process, and the number of bytes sent."""
        distributed.barrier()
        begin = time.perf_counter()
        found = self.pipe.replan(plan_of(ranks, self.layers), optimizer=self.optimizer)
        seconds = torch.tensor(time.perf_counter() - begin)
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
        self.ranks = ranks
        return float(seconds), found.moved_bytes


def all_pairs(rank: int, layers: int, width: int) -> list[tuple[int, int, float, int, float]]:
    """Change between all pairs of numbers of ranks; return (before, after, seconds, bytes, loss of the next step)."""
    run = Run(layers, width)
    found = []
    run.step()
    for before, after in product(range(1, RANKS + 1), repeat=2):
        if before != after:
            if run.ranks != before:
                run.change(before)
            found.append((before, after, *run.change(after), run.step()))
    return found


def due_losses(layers: int, width: int, steps: int) -> list[float]:
    """Return the losses of a run in one process that never changes."""
    module = model(layers, width)
    data = batches(width)
    with Pipeline(
        module,
        torch.randn(ROWS // MICROBATCHES, width),
        loss_fn=functional.mse_loss,
        devices=["cpu"],
        num_microbatches=MICROBATCHES,
        schedule="1f1b",
        seed=0,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        losses = []
        for _ in range(steps):
            x = next(data)
            losses.append(float(pipe.step(x, target=x)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def must_move(before: int, after: int, layers: int, width: int) -> int:
    """Return the bytes of weights and states whose process changes."""
    homes = [
        {name: rank for rank, names in enumerate(plan_of(ranks, layers).stages) for name in names}
        for ranks in (before, after)
    ]
    of_layer = 3 * 4 * (width * width + width)  # the weights and two states of AdamW
    return of_layer * sum(homes[0][name] != homes[1][name] for name in homes[0])


def many(rank: int, layers: int, width: int, changes: int) -> list[tuple[float, int, int]]:
    """Change the plan many times; return the resources after a quarter of the changes and at the end."""
    run = Run(layers, width)
    found = []
    for change in range(changes):
        run.change(1 + (change * 5 + 3) % RANKS)
        run.step()
        if change in (changes // 4 // RANKS * RANKS, (changes - 1) // RANKS * RANKS):  # under the same plan
            found.append(resources())
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--changes", type=int, default=200)
    args = parser.parse_args()
    size: Any = (args.layers, args.width)
    console = Console()
    found = in_ranks(RANKS, all_pairs, *size)[0]
    losses = due_losses(*size, steps=1 + len(found))[1:]
    equal = sum(own[-1] == due for own, due in zip(found, losses, strict=True))
    must = [must_move(before, after, *size) for before, after, *_ in found]
    table = Table("from", *(f"to {after}" for after in range(1, RANKS + 1)), title="seconds of replan(plan)")
    times = {(before, after): seconds for before, after, seconds, *_ in found}
    for before in range(1, RANKS + 1):
        table.add_row(
            str(before),
            *(f"{times[before, after]:.3f}" if before != after else "-" for after in range(1, RANKS + 1)),
        )
    console.print(table)
    print(f"median {median(times.values()):.3f} s, longest {max(times.values()):.3f} s")
    print(f"losses equal to the last bit: {equal} of {len(found)}")
    print(
        f"bytes sent / bytes that must move: {sum(own[3] for own in found) / sum(must):.4f}, "
        f"{sum(own[3] == due for own, due in zip(found, must, strict=True))} of {len(found)} equal"
    )
    if args.changes:
        first, last = zip(*in_ranks(RANKS, many, *size, args.changes), strict=True)
        title = f"after {args.changes // 4} and {args.changes} changes"
        table = Table("process", "MB", "threads", "open files", title=title)
        for rank, (one, other) in enumerate(zip(first, last, strict=True)):
            table.add_row(str(rank), *(f"{a:.0f} -> {b:.0f}" for a, b in zip(one, other, strict=True)))
        console.print(table)


if __name__ == "__main__":
    main()
