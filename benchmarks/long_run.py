"""Long run: checks that memory, Python objects, threads and open files do not grow during many steps and saves.

    python benchmarks/long_run.py [--steps 20000] [--save-every 100]

The run clips gradients, schedules the learning rate, evaluates, logs and saves asynchronously: first in one process,
then on a mesh of two ranks. After each tenth of the run, rank 0 prints a line. The last save before a line is not
asynchronous, so that no save is running while the line is measured. The script fails if the number of objects, threads
or files grows with the number of saves in the second half of a run.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import elsewhere, in_ranks, machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pipesched

_LINES = 10


class Usage(NamedTuple):
    """The memory of a process in KiB, and the numbers of its Python objects, threads and open files."""

    kib: int
    objects: int
    threads: int
    files: int


def usage() -> Usage:
    """Return the memory, Python objects, threads and open files of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    threads, files = int(status["Threads"]), len(os.listdir("/proc/self/fd"))
    return Usage(int(status["VmRSS"].split()[0]), len(gc.get_objects()), threads, files)


def train(rank: int, folder: str, steps: int, save_every: int, place: dict[str, Any]) -> list[Usage]:
    """Train, and return the usage at each tenth of the run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh()]
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    found = []
    with pipesched.Pipeline(
        nn.Sequential(*layers), x[:2], loss_fn=nn.functional.mse_loss, num_microbatches=2, schedule="1f1b", **place
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.999)
        log = pipesched.StepLog(pipe, every=100, show=lambda _: None)
        begun_s = time.monotonic()
        for step in range(1, steps + 1):
            log(pipe.step(x, target=y), step=step)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % save_every == 0:
                pipe.eval().evaluate(x, target=y)
                pipe.train()
                counted = step % (steps // _LINES) == 0
                pipe.save(folder, optimizer=optimizer, scheduler=scheduler, keep=2, asynchronous=not counted)
            if step % (steps // _LINES) == 0:
                found.append(usage())
                if not rank:
                    kib, objects, threads, files = found[-1]
                    print(
                        f"{step:7,} steps, {step // save_every:4} saves, {time.monotonic() - begun_s:5.0f} s: "
                        f"{kib:,} KiB, {objects:,} objects, {threads} threads, {files} files",
                        flush=True,
                    )
    return found


def train_rank(rank: int, *args: Any) -> list[Usage]:
    """Train on one rank of a mesh; return the usage at each tenth of the run."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    return train(rank, *args, {"mesh": mesh["pp"]})


def main() -> None:
    """Run in one process, then over a mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()
    print(machine())
    grown = False
    for name in ("one process", "mesh of two"):
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if name == "one process":
                all_found = [elsewhere(train, 0, folder, args.steps, args.save_every, {"devices": ["cpu"] * 2})]
            else:
                all_found = in_ranks(2, train_rank, folder, args.steps, args.save_every)
        most = max(20, args.steps // args.save_every // 4)
        for rank, found in enumerate(all_found):
            middle, end = found[_LINES // 2 - 1], found[-1]
            grown |= any(now - before > most for now, before in zip(end[1:], middle[1:], strict=True))
            print(
                f"rank {rank}, growth in the second half: {end.kib - middle.kib:+} KiB, "
                f"{end.objects - middle.objects:+} objects, "
                f"{end.threads - middle.threads:+} threads, {end.files - middle.files:+} files",
                flush=True,
            )
    sys.exit(grown)


if __name__ == "__main__":
    main()
