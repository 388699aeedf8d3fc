"""Simulated devices: how long steps on simulated accelerators take, beside the same steps on CPU ranks.

    python benchmarks/simulated_devices.py [--pairs 25] [--ranks 64] [--steps 3]

"demo" runs the demo's model over two simulated devices and over two CPU ranks in turn, and prints the median of the
paired ratios with its 95 % interval (goal: at most 5). "wide" runs steps of 64 ranks with 64 micro-batches and one
Linear(8, 8) a stage, once per kind (goal: less than 15 s on simulated devices). Times are wall times of this process.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from tests.simulated.started import ACCELERATOR

# isort: split

import torch
from measure import machine, paired, ratio
from torch import Tensor, nn
from train_gpt import gpt, next_byte_loss

from pipesched import Pipeline

ROWS, CONTEXT, MICROBATCHES = 32, 64, 8


def timed(pipe: Pipeline, x: Tensor, y: Tensor) -> Callable[[], float]:
    """Return a function that runs a step, and returns its wall time in seconds."""

    def step() -> float:
        start_s = time.perf_counter()
        pipe.step(x, target=y)
        for device in {device for device in pipe.devices if device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start_s

    return step


def demo(pairs: int) -> None:
    """Compare the demo's step over two simulated devices with two CPU ranks."""
    text = torch.randint(256, (ROWS, CONTEXT + 1))
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    steps = []
    for kind in ("sim:0", "sim:1"), ("cpu", "cpu"):
        torch.manual_seed(0)
        given = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "boundaries": [3], "devices": kind}
        pipe = Pipeline(gpt(context=CONTEXT), x[: ROWS // MICROBATCHES], loss_fn=next_byte_loss, **given)
        steps.append(timed(pipe, x, y))
    found = ratio(*paired(*steps, pairs))
    print(f"demo, 2 ranks: {found.first * 1e3:.0f} ms simulated, {found.second * 1e3:.0f} ms on CPUs, ratio {found}")
    print(f"    violations: {len(ACCELERATOR.judge.violations)}")


def wide(ranks: int, steps: int) -> None:
    """Time steps of many small stages."""
    for kind in ("sim", "cpu"):
        devices = [
            f"sim:{rank % torch.accelerator.device_count()}" if kind == "sim" else "cpu" for rank in range(ranks)
        ]
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(ranks)))
        x = torch.randn(64 * 2, 8)
        given = {"schedule": "1f1b", "num_microbatches": 64, "boundaries": list(range(1, ranks)), "devices": devices}
        with Pipeline(model, x[:2], loss_fn=nn.MSELoss(), **given) as pipe:
            step = timed(pipe, x, x)
            step()
            times = [step() for _ in range(steps)]
        spread = f"{median(times):.1f} s [{min(times):.1f}, {max(times):.1f}]"
        print(f"wide, {ranks} ranks x 64 micro-batches, {kind}: {spread}")


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    demo(args.pairs)
    wide(args.ranks, args.steps)


if __name__ == "__main__":
    main()
