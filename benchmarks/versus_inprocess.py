"""Versus in-process: compares a step in one process with torchgpipe, fairscale and torch.distributed.pipelining.

    python benchmarks/versus_inprocess.py [--device cuda] [--pairs 25] [--stages 2 4] [--modes never] [--tiny]

All stages are in one process: on different accelerators if the machine has one for each stage, else on one device. Both
libraries of a row have the same transformer blocks, weights, micro-batches, cuts and checkpointing, and run in turn (A
B A B ...). Each row shows the median of the paired ratios ours / rival with a 95 % bootstrap interval, and the largest
relative difference of a parameter's gradient, which is compared before any timing.

torchgpipe and fairscale have one stage on each rank, as have gpipe and 1f1b of pipesched. In one process, torch has all
stages on one rank. So its schedules with several stages on a rank are compared with ours on one rank, on one device and
without checkpointing. A library that is not installed is named and skipped.

On CPUs, the rivals run all stages in one thread, so the script first finds the number of intra-op threads with which a
rival is fastest. pipesched runs one thread for each rank, with one intra-op thread each.

"MiB" is the most memory that a step allocates in addition to what was allocated before it (accelerators only).
"""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from block_models import Shape, gradient_error, gradients_of, pipeline
from measure import machine
from on_device import Figures, add_options, all_devices, begun, in_turn, settle, timed_s
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional

from pipesched import schedules
from pipesched.devices.memory import allocated_bytes, begin_peak, peak_bytes
from pipesched.devices.streams import is_accelerator

FULL, SMALL = Shape(16, 1024, 1024, 4, 8, "bfloat16"), Shape(8, 32, 4, 1, 8)
ON_CPU = Shape(8, 256, 64, 4, 8)
GPIPES = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn", "Pipe")}
TORCH = {
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zb": torch_schedules.ScheduleInterleavedZeroBubble,
}
Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Row:
    """One comparison: our schedule, the rival's name, the number of stages, and the checkpoint mode."""

    schedule: str
    rival: str
    stages: int
    mode: str


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield all comparisons."""
    for stages in args.stages:
        for mode in args.modes:
            for name in ("gpipe", "1f1b"):
                for rival in GPIPES:
                    yield Row(name, rival, stages, mode)
        for name in TORCH:
            yield Row(name, "torch", stages, "never")


def is_installed(rival: str) -> bool:
    """Return whether a rival can be imported."""
    try:
        return rival == "torch" or version(rival) is not None
    except PackageNotFoundError:
        return False


def own_step(row: Row, shape: Shape, model: nn.Sequential, devices: Sequence[torch.device], opened: ExitStack) -> Step:
    """Return a function that runs a step of pipesched."""
    schedule = schedules.get(row.schedule)
    if row.rival == "torch":
        schedule = schedule.with_options(chunks_per_rank=row.stages)
    x, _ = shape.batch(devices[0])
    own = {"devices": list(devices), "checkpoint": row.mode}
    pipe = opened.enter_context(pipeline(shape, model, schedule, x, len(devices), **own))
    return lambda x, y: pipe.step(x, target=y)


def rival_step(row: Row, shape: Shape, model: nn.Sequential, devices: Sequence[torch.device]) -> Step:
    """Return a function that runs a step of the rival."""
    ends = [0, *shape.cut(row.stages), shape.blocks]
    sizes = [end - start for start, end in pairwise(ends)]
    if row.rival == "torch":
        parts = [model[start:end] for start, end in pairwise(ends)]
        stages = [PipelineStage(part, at, row.stages, devices[0]) for at, part in enumerate(parts)]
        schedule = TORCH[row.schedule](stages, shape.microbatches, loss_fn=functional.mse_loss)
        return lambda x, y: schedule.step(x, target=y)
    module, name = GPIPES[row.rival]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(import_module(module), name)
    pipe = made(model, balance=sizes, devices=list(devices), chunks=shape.microbatches, checkpoint=row.mode)
    return lambda x, y: functional.mse_loss(pipe(x), y.to(devices[-1])).backward()


class Party:
    """One side of a comparison: a model and its step, which is timed with a number of intra-op threads."""

    def __init__(self, model: nn.Module, step: Callable[[], Any], devices: Sequence[torch.device]) -> None:
        self._model = model
        self._step = step
        self._devices = devices
        self.threads = 1

    def seconds(self) -> float:
        """Run a step with fresh gradients; return its seconds."""
        self._model.zero_grad()
        torch.set_num_threads(self.threads)
        return timed_s(self._step, self._devices)

    def find_threads(self) -> None:
        """Choose the number of intra-op threads with which the step is fastest."""

        def taken_s(threads: int) -> float:
            self.threads = threads
            return median(self.seconds() for _ in range(4))

        self.threads = min(range(1, (os.cpu_count() or 1) + 1), key=taken_s)

    def peak_mib(self) -> float | None:
        """Return the memory that a step allocates on the first device in addition; None on a CPU."""
        device = self._devices[0]
        if not is_accelerator(device):
            return None
        self._model.zero_grad()
        begin_peak(device)
        before = allocated_bytes(device)
        self.seconds()
        return (peak_bytes(device) - before) / 2**20


def compare(row: Row, shape: Shape, devices: Sequence[torch.device], args: argparse.Namespace) -> None:
    """Compare both libraries in one setting, and print a row."""
    x, y = shape.batch(devices[0])
    with ExitStack() as opened:
        models = shape.model(devices[0]), shape.model(devices[0])
        steps = own_step(row, shape, models[0], devices, opened), rival_step(row, shape, models[1], devices)
        ours, rival = (Party(model, partial(step, x, y), devices) for model, step in zip(models, steps, strict=True))
        for party in (ours, rival):
            party.seconds()
        error = gradient_error(gradients_of(models[0]), gradients_of(models[1]))
        if not (args.tiny or is_accelerator(devices[0])):
            rival.find_threads()
        found = in_turn(ours.seconds, rival.seconds, args.pairs, float("inf")).compared
        peaks = [party.peak_mib() for party in (ours, rival)]
    times = "".join(f"{one * 1e3:>10.1f}" for one in (found.first, found.second))
    memory = "".join(f"{'-':>10}" if peak is None else f"{peak:>10.1f}" for peak in peaks)
    print(f"{heading(row)}{found!s:>24}{times}{memory}  {error:.1e}", flush=True)
    interval = {"ratio": found.value, "low": found.low, "high": found.high}
    figures = {"ours_ms": found.first * 1e3, "rival_ms": found.second * 1e3, "peaks_mib": peaks, "error": error}
    sizes = {**vars(row), **shape._asdict(), "ranks": len(devices)}
    Figures(args.figures).add("versus", **sizes, **interval, **figures)


def heading(row: Row) -> str:
    """Return the first columns of a row."""
    return f"{row.schedule:<18}{row.rival:<12}{row.stages:>6}  {row.mode:<12}"


def main() -> None:
    """Print a row for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    modes = ["never", "except_last", "always"]
    parser.add_argument("--modes", nargs="+", default=["never", "except_last"], choices=modes, help="checkpoint modes")
    add_options(parser)
    args = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = begun(args.device or ("cpu" if accelerator is None else accelerator.type))
    shape = SMALL if args.tiny else FULL if is_accelerator(device) else ON_CPU
    if args.tiny:
        args.pairs, args.stages, args.modes = 3, [2], ["never"]
    rivals = {rival: is_installed(rival) for rival in (*GPIPES, "torch")}
    known = [f"{rival} {version(rival)}" if found else f"{rival} not installed" for rival, found in rivals.items()]
    print(f"{machine()}; {', '.join(known)}\n{shape}")
    columns = "".join(f"{name:>10}" for name in ("ours ms", "rival ms", "ours MiB", "its MiB"))
    print(f"{'schedule':<18}{'rival':<12}{'stages':>6}  {'checkpoint':<12}{'ours / rival':>24}{columns}  error")
    # torch's schedules need a group, but one rank sends no messages
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    for row in rows(args):
        if not rivals[row.rival]:
            continue
        there = all_devices(device)
        devices = [device] * row.stages if len(there) < row.stages else there[: row.stages]
        try:
            compare(row, shape, devices[:1] if row.rival == "torch" else devices, args)
        except Exception as error:  # the other rows still run
            print(f"{heading(row)}  {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
    settle([device])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
