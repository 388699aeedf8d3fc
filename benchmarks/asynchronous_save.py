"""Asynchronous save: measures how much longer a step takes while a checkpoint is written.

    python benchmarks/asynchronous_save.py [--pairs 15]

Steps without a save alternate with steps after a call of ``pipe.save(..., asynchronous=True)``. The time of a step with
a save includes the call of ``save``, which copies the tensors. The save ends before the next step without a save. The
script prints the median times, their ratio with a 95 % bootstrap interval, the bytes of the checkpoint, and a predicted
ratio. The prediction adds the time to copy these bytes, measured separately, to the time of a step. The stages either
sleep, like a host that waits for its accelerators, or compute linear layers with AdamW on all cores. Both kinds run in
one process and over a mesh of two ranks.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import in_ranks, machine, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched import Pipeline

_WARM = 3


class Sleeping(nn.Module):
    """A layer with weights. Its forward and backward sleep instead of computing."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight[0, 0], self._seconds)  # type: ignore[no-untyped-call,no-any-return]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


def model_and_batch(kind: str) -> tuple[nn.Sequential, Tensor]:
    """Return a model that sleeps or computes (``kind``), and a batch of 8 micro-batches."""
    if kind == "sleeping":
        return nn.Sequential(*(Sleeping(512, 0.01) for _ in range(4))), torch.randn(8, 64)
    width = 256
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(8 * 2048, width)


def run(kind: str, mesh: bool, pairs: int, folder: str) -> tuple[list[float], list[float], int]:
    """Return the times of steps without a save and of steps with a save, in seconds, and the bytes that are saved."""
    torch.manual_seed(0)
    model, x = model_and_batch(kind)
    half = 2 if kind == "sleeping" else 6
    where: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))} if mesh else {"devices": ["cpu"] * 2}
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 8, "boundaries": [half], "seed": 1}
    optimizer = torch.optim.SGD if kind == "sleeping" else torch.optim.AdamW
    sample = x[: len(x) // 8]
    plain, saving = [], []
    with Pipeline(
        model, sample, loss_fn=nn.functional.mse_loss, optimizer=lambda own: optimizer(own, lr=1e-4), **options, **where
    ) as pipe:
        path = Path(folder) / f"{kind}-{mesh}"
        for number in range(2 * (pairs + _WARM)):
            begin = time.perf_counter()
            if number % 2:
                pipe.save(path, asynchronous=True)
            float(pipe.step(x, target=x))
            seconds = time.perf_counter() - begin
            if number % 2:
                pipe._saver.finish(pipe._live_run())
            if number >= 2 * _WARM:
                (saving if number % 2 else plain).append(seconds)
        size = sum(tensor.nbytes for tensor in pipe.training_state()["tensors"].values())
    return plain, saving, size


def in_rank(group: Any, kind: str, pairs: int, folder: str) -> tuple[list[float], list[float], int]:
    """Call `run` on one rank of a mesh."""
    return run(kind, True, pairs, folder)


def copy_s(size: int) -> float:
    """Return the seconds that a copy of this number of bytes takes within the host's memory."""
    block = torch.ones(size, dtype=torch.uint8)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        block.clone()
        times.append(time.perf_counter() - begin)
    return median(times)


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", default=["sleeping", "real"])
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            for mesh in (False, True):
                if mesh:
                    plain, saving, size = in_ranks(2, in_rank, kind, args.pairs, folder)[0]
                else:
                    plain, saving, size = run(kind, False, args.pairs, folder)
                predicted = 1 + copy_s(size) / median(plain)
                print(
                    f"{kind} stages, {'mesh' if mesh else 'one process'}: a step takes {median(plain) * 1e3:.1f} ms, a "
                    f"step with a save {median(saving) * 1e3:.1f} ms ({size / 1e6:.1f} MB per process); "
                    f"ratio {ratio(saving, plain)}, predicted {predicted:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
