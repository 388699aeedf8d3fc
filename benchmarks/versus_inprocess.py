"""Versus in-process: compares the time and peak memory of a step with torchgpipe and fairscale, in one process on CPUs.

    python benchmarks/versus_inprocess.py [--pairs 25] [--stages 2] [--modes except_last] [--schedules gpipe]

All three use the same transformer blocks, weights, micro-batches, cuts and checkpointing, and run in one process in
turn (A B C A B C ...). The script prints the median of the paired ratios ours / rival for the rival with the better
median, with a 95 % bootstrap interval. On CPUs both rivals run all stages in one thread, so the script first finds the
number of intra-op threads with which they are fastest; pipesched runs one thread for each rank, with one intra-op
thread each. Gradients are compared before any timing. Memory is the peak of a fresh process (VmHWM) minus its
memory after the model and the batch were built.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median

import torch
from measure import machine, ratio
from torch import nn
from torch.nn import functional

from pipesched import Pipeline

RIVALS = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn", "Pipe")}  # imported when used
LAYERS, WIDTH, TOKENS, ROWS, MICROBATCHES = 8, 256, 64, 32, 8
Step = Callable[[], None]


def blocks() -> nn.Sequential:
    """Return a sequence of transformer blocks."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(LAYERS)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and targets."""
    torch.manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH), torch.randn(ROWS, TOKENS, WIDTH)


def made(party: str, model: nn.Sequential, stages: int, mode: str) -> tuple[Step, Callable[[], None]]:
    """Return a function that runs a step of a party, and a function that closes the party.

    The party is "torchgpipe", "fairscale", or the name of a schedule of pipesched.
    """
    x, y = batch()
    size = LAYERS // stages
    if party not in RIVALS:
        pipe = Pipeline(
            model,
            x[: ROWS // MICROBATCHES],
            loss_fn=functional.mse_loss,
            devices=["cpu"] * stages,
            schedule=party,
            num_microbatches=MICROBATCHES,
            boundaries=list(range(size, LAYERS, size)),
            checkpoint=mode,
        )
        return lambda: pipe.step(x, target=y), pipe.close
    module, name = RIVALS[party]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rival_class = getattr(import_module(module), name)
    rival = rival_class(model, balance=[size] * stages, devices=["cpu"] * stages, chunks=MICROBATCHES, checkpoint=mode)
    return lambda: functional.mse_loss(rival(x), y).backward(), lambda: None


def seconds(step: Step, model: nn.Sequential) -> float:
    """Run a step and return its seconds."""
    model.zero_grad()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


class Party:
    """One side of the comparison: its model, its step and, for a rival, its fastest number of threads."""

    def __init__(self, name: str, stages: int, mode: str) -> None:
        self.name, self.model = name, blocks()
        self.step, self.close = made(name, self.model, stages, mode)
        self.threads = 1
        self.run()
        if name in RIVALS:
            self.threads = min(range(1, (os.cpu_count() or 1) + 1), key=self._with)

    def _with(self, threads: int) -> float:
        self.threads = threads
        return median(self.run() for _ in range(4))

    def run(self) -> float:
        """Run a step and return its seconds. A rival's worker threads inherit the thread count that is set here."""
        torch.set_num_threads(self.threads)
        return seconds(self.step, self.model)

    def same_gradients(self, other: "Party") -> bool:
        """Return whether the gradients of both parties' last steps agree within rounding."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in pairs)


def peak_mib(party: str, stages: int, mode: str, threads: int) -> float:
    """Return the peak memory of a fresh process in MiB, minus its memory after building the model."""
    asked = json.dumps([party, stages, mode, threads])
    done = subprocess.run([sys.executable, __file__, "--run", asked], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def peak_kib() -> int:
    """Return the peak memory of this process in KiB. (ru_maxrss would also count the process that started this one.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure_peak(party: str, stages: int, mode: str, threads: int) -> None:
    """Measure the peak in a fresh process and print it."""
    torch.set_num_threads(threads)
    model, data = blocks(), batch()
    del data
    before = peak_kib()
    step, _ = made(party, model, stages, mode)
    for _ in range(3):
        seconds(step, model)
    print((peak_kib() - before) / 1024)
    sys.stdout.flush()
    os._exit(0)  # closing the pipeline does not count


def compare(schedule: str, stages: int, mode: str, pairs: int) -> None:
    """Compare pipesched with both rivals in one setting, and print a row."""
    parties = [Party(name, stages, mode) for name in (schedule, *RIVALS)]
    ours = parties[0]
    agree = all(ours.same_gradients(rival) for rival in parties[1:])
    runs = [[party.run() for party in parties] for _ in range(pairs)]
    ours.close()
    own, *theirs = (list(column) for column in zip(*runs, strict=True))
    found = [ratio(own, column) for column in theirs]
    best = max(found, key=lambda each: each.value)
    peaks = [median(peak_mib(party.name, stages, mode, party.threads) for _ in range(3)) for party in parties]
    times = "".join(f"{each:>9.1f}" for each in (found[0].first * 1e3, *(each.second * 1e3 for each in found)))
    memory = "".join(f"{each:>9.1f}" for each in peaks)
    threads = ", ".join(str(party.threads) for party in parties[1:])
    print(f"{schedule:8}{stages:>7} {mode:12}{best!s:>22}{times}{memory}  {agree!s:6}{threads}", flush=True)


def main() -> None:
    """Print a row for each schedule, number of stages and checkpoint mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--modes", nargs="+", default=["except_last"], help="checkpoint modes: always, never or except_last"
    )
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        measure_peak(*json.loads(args.run))
        return
    print(machine())
    print(f"{LAYERS} transformer blocks, d = {WIDTH}, {TOKENS} tokens, {ROWS} rows, m = {MICROBATCHES}")
    print(f"{'':28}{'ours / better rival':>22}{'ms a step':>27}{'peak MiB':>27}  equal rivals' threads")
    names = "".join(f"{name[:8]:>9}" for name in ("ours", *RIVALS))
    print(f"{'schedule':8}{'stages':>7} {'checkpoint':12}{'':22}{names}{names}")
    for schedule in args.schedules:
        for stages in args.stages:
            for mode in args.modes:
                compare(schedule, stages, mode, args.pairs)


if __name__ == "__main__":
    main()
