"""GPU: measures steps of stages on one accelerator or several, beside a plain loop and torch.distributed.pipelining.

    python benchmarks/gpu.py [--only steps host devices ranks] [--device cuda] [--pairs 25] [--seconds 500] [--tiny]

steps     One device: all ranks share it, and each rank has streams of its own. The script compares a step with plain
          gradient accumulation over the same micro-batches, for transformer blocks of two widths in bfloat16 and
          float32, with 8 and 16 micro-batches, on 1, 2 and 4 ranks under four schedules. "host" is the time until
          step() returns; "idle" is the share of a step in which no kernel runs, according to torch.profiler, of ours
          and of the loop; "bubble" comes from the trace of pipesched, in which ranks on one device wait for each other.
host      One rank, Linear(8, 8) as stages, and 64 micro-batches: the microseconds per forward or backward, for which
          the host's work decides.
devices   With two devices or more: like steps, with one stage on each of two or four devices, in one process.
ranks     With two devices or more: one process for each rank. pipesched and torch's own schedules over NCCL (on CPUs
          over gloo) take turns.

The script prints the median of the paired ratios with a 95 % bootstrap interval. Before any timing, it compares the
gradients: "error" is the largest relative error of a parameter's gradient, and 0 stands for equal bits. The time for
steps is divided between the cases. A case that the time does not reach is printed as not run.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from statistics import median
from typing import Any

import torch
from block_models import Shape, accumulate, gradient_error, gradients_of, pipeline
from device_traces import traced
from measure import machine, paired, ratio
from on_device import Budget, Figures, add_options, all_devices, backend_of, begun, in_turn, settle, timed_s
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from pipesched import schedules as ours
from pipesched.devices.streams import is_accelerator

NAMES = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
RIVALS = {  # our schedule -> (torch's class, stages on each rank, whether the stages are placed in a V)
    "gpipe": (schedules.ScheduleGPipe, 1, False),
    "1f1b": (schedules.Schedule1F1B, 1, False),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, 2, False),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, True),
}
#: Rows of a micro-batch by dtype, so that a device is busy in both and float32 does not take too long.
ROWS = {"bfloat16": 4, "float32": 1}
SMALL = Shape(8, 32, 4, 1, 8)


def shapes(tiny: bool) -> list[Shape]:
    """Return the sizes to measure, the most important first."""
    if tiny:
        return [SMALL]
    kinds = product((8, 16), ROWS, (1024, 2048))
    return [Shape(16, width, 1024, ROWS[dtype], count, dtype) for count, dtype, width in kinds]


# ---- one process ---------------------------------------------------------------------------------------------------


def in_process(cases: Sequence[tuple[Shape, list[torch.device], str]], args: argparse.Namespace) -> None:
    """Compare a pipeline with plain gradient accumulation on the first device; print a row for each case."""
    columns = f"{'ours / loop':>24}{'ours ms':>10}{'loop ms':>10}{'host ms':>10}{'idle':>8}{'of loop':>8}{'bubble':>8}"
    print(f"{'width':>6} {'dtype':<10}{'m':>3} {'ranks':>5} {'schedule':<18}{columns}  error", flush=True)
    budget, figures = Budget(args.seconds, len(cases)), Figures(args.figures)
    for shape, devices, name in cases:
        head = f"{shape.width:>6} {shape.dtype:<10}{shape.microbatches:>3} {len(devices):>5} {name:<18}"
        share_s = budget.share_s()
        if share_s <= 0:
            print(f"{head}  not run: the time is used up", flush=True)
            continue
        try:
            row = compared(shape, devices, name, args.pairs, share_s)
        except torch.OutOfMemoryError as error:
            print(f"{head}  out of memory: {str(error).splitlines()[0]}", flush=True)
            continue
        interval = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        times = "".join(f"{row[column]:>10.1f}" for column in ("ours_ms", "loop_ms", "host_ms"))
        shares = "".join(
            f"{'-':>8}" if row[column] is None else f"{row[column]:>8.1%}" for column in ("idle", "loop_idle", "bubble")
        )
        print(f"{head}{interval:>24}{times}{shares}  {row['error']:.1e}", flush=True)
        distinct = {str(device) for device in devices}
        figures.add("step", **shape._asdict(), schedule=name, ranks=len(devices), devices=len(distinct), **row)


def compared(shape: Shape, devices: list[torch.device], name: str, pairs: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a case."""
    x, y = shape.batch(devices[0])
    plain, model = models(shape._replace(microbatches=1), devices[0])
    with pipeline(shape, model, name, x, len(devices), devices=devices) as pipe:

        def step() -> None:
            pipe.step(x, target=y)

        loop = partial(accumulate, shape, plain, x, y)
        plain.zero_grad()
        model.zero_grad()
        loop()
        step()
        settle(devices)
        error = gradient_error(gradients_of(pipe), gradients_of(plain))
        found = in_turn(partial(timed_s, step, devices), partial(timed_s, loop, devices), pairs, seconds).compared
        host_s = median(returned_s(step, devices) for _ in range(3))
        trace = pipe.trace
        idle = [traced(run, devices[0]) for run in (step, loop)]
    return {
        **figures_of(found),
        "host_ms": host_s * 1e3,
        "idle": idle[0] and idle[0].idle_share,
        "loop_idle": idle[1] and idle[1].idle_share,
        "bubble": None if trace is None else float(trace.bubble_ratio),
        "error": error,
    }


@lru_cache(maxsize=1)
def models(shape: Shape, device: torch.device) -> tuple[nn.Sequential, nn.Sequential]:
    """Return two models with equal weights. Cases of one shape follow each other, and share them."""
    return shape.model(device), shape.model(device)


def returned_s(step: Callable[[], Any], devices: list[torch.device]) -> float:
    """Run a step on idle devices; return the seconds until it returns, which is before the devices have finished."""
    settle(devices)
    begin_s = time.perf_counter()
    step()
    return time.perf_counter() - begin_s


def figures_of(found: Any, rival: str = "loop") -> dict[str, float]:
    """Return a ratio and both medians as figures."""
    interval = {"ratio": found.value, "low": found.low, "high": found.high}
    return interval | {"ours_ms": found.first * 1e3, f"{rival}_ms": found.second * 1e3}


def host(device: torch.device, args: argparse.Namespace) -> None:
    """Print the microseconds of a forward or a backward of tiny layers, in pipesched and in a loop."""
    print(f"\none rank on {device}, Linear(8, 8) in each stage, 64 micro-batches: us per forward or backward")
    print(f"{'schedule':<18}{'ours':>10}{'loop':>10}{'more':>10}", flush=True)
    figures = Figures(args.figures)
    for name in NAMES:
        chunks = ours.get(name).chunks_per_rank
        shape = Shape(chunks, 8, 1, 1, 64)
        plain, model = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(chunks))) for _ in range(2))
        plain.to(device)
        x, y = (torch.randn(64, 8, device=device) for _ in range(2))
        with pipeline(shape, model, name, x, 1, devices=[device]) as pipe:
            runs = paired(
                lambda pipe=pipe, x=x, y=y: timed_s(lambda: pipe.step(x, target=y), [device]),
                lambda plain=plain, shape=shape, x=x, y=y: timed_s(lambda: accumulate(shape, plain, x, y), [device]),
                args.pairs,
            )
            actions = sum(str(action.kind) in "FBIW" for order in pipe.plan.program.orders for action in order)
        found = ratio(*runs)
        per_action = [seconds / actions * 1e6 for seconds in (found.first, found.second)]
        print(
            f"{name:<18}{per_action[0]:>10.1f}{per_action[1]:>10.1f}{per_action[0] - per_action[1]:>10.1f}", flush=True
        )
        figures.add("host", schedule=name, ours_us=per_action[0], loop_us=per_action[1])


# ---- one process for each rank --------------------------------------------------------------------------------------


def rival_step(shape: Shape, name: str, model: nn.Sequential, rank: int, ranks: int, device: torch.device) -> Any:
    """Return a function that runs one step of torch's schedule on this rank."""
    made, chunks, in_a_v = RIVALS[name]
    count = ranks * chunks
    ends = [0, *shape.cut(count), shape.blocks]
    own = [rank, count - 1 - rank] if in_a_v else [rank + ranks * chunk for chunk in range(chunks)]
    stages = [PipelineStage(model[ends[s] : ends[s + 1]], s, count, device) for s in own]
    schedule = made(stages[0] if chunks == 1 else stages, shape.microbatches, loss_fn=functional.mse_loss)
    last = rank == (0 if in_a_v else ranks - 1)

    def step(x: Tensor, y: Tensor) -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if last else {}))

    return step


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks. Collective."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return float(found)


def run_rank(rank: int, store: str, ranks: int, kind: str, shape: Shape, args: argparse.Namespace) -> None:
    """Compare both pipelines on one rank of a process group; rank 0 prints."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind != "cpu" else torch.device("cpu")
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    distributed.init_process_group(backend_of(device) or "gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh(kind, (ranks,))
    x, y = shape.batch(device)

    def seconds(step: Callable[[], Any]) -> float:
        slowest(0.0, device)
        return slowest(timed_s(step, [device]), device)

    for name in RIVALS:
        theirs = shape.model(device)
        rival = rival_step(shape, name, theirs, rank, ranks, device)
        with pipeline(shape, shape.model(device), name, x, ranks, mesh=mesh) as pipe:
            rival(x, y)
            pipe.step(x, target=y)
            settle([device])
            error = slowest(gradient_error(gradients_of(pipe), gradients_of(theirs)), device)
            runs = paired(
                lambda pipe=pipe: seconds(lambda: pipe.step(x, target=y)),
                lambda rival=rival: seconds(lambda: rival(x, y)),
                args.pairs,
            )
            if rank == 0:
                found = ratio(*runs)
                times = f"{found.first * 1e3:>10.1f}{found.second * 1e3:>10.1f}"
                print(f"{name:<18}{found!s:>24}{times}  {error:.1e}", flush=True)
                row = figures_of(found, "torch")
                Figures(args.figures).add("ranks", **shape._asdict(), schedule=name, ranks=ranks, error=error, **row)
    distributed.destroy_process_group()


def one_rank_a_process(shape: Shape, kind: str, ranks: int, args: argparse.Namespace) -> None:
    """Start one process for each rank, and compare pipesched with torch.distributed.pipelining in these processes."""
    print(f"\n{ranks} processes on {kind} with one rank each, compared with torch: {shape}")
    print(f"{'schedule':<18}{'ours / torch':>24}{'ours ms':>10}{'torch ms':>10}  error", flush=True)
    port = torch.randint(20000, 60000, (), generator=torch.Generator().manual_seed(time.time_ns() % 2**31)).item()
    multiprocessing.spawn(run_rank, (f"tcp://127.0.0.1:{port}", ranks, kind, shape, args), nprocs=ranks)


# ---- the measurements ----------------------------------------------------------------------------------------------


def shared_cases(device: torch.device, tiny: bool) -> Iterator[tuple[Shape, list[torch.device], str]]:
    """Yield the cases of stages that share a device."""
    for shape in shapes(tiny):
        for ranks in (2,) if tiny else (1, 2, 4):
            for name in NAMES:
                yield shape, [device] * ranks, name


def main() -> None:
    """Run the measurements for which the machine has enough devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["steps", "host", "devices", "ranks"]
    parser.add_argument("--only", nargs="+", default=parts, choices=parts)
    parser.add_argument("--pairs", type=int, default=25)
    add_options(parser, seconds=500)
    args = parser.parse_args()
    device = begun(args.device)
    devices = all_devices(device)
    print(machine())
    if args.tiny:
        args.pairs = min(args.pairs, 3)
    if "steps" in args.only:
        print(f"\nstages on {device} in one process, compared with a plain loop")
        in_process(list(shared_cases(device, args.tiny)), args)
    if "host" in args.only:
        host(device, args)
    if is_accelerator(device) and len(devices) == 1:
        if {"devices", "ranks"} & {*args.only}:
            print("\nnever run: stages on several devices, and ranks over NCCL; this machine has one device")
        return
    ranks, shape = (4 if len(devices) >= 4 else 2), shapes(args.tiny)[0]
    if "devices" in args.only and len(devices) > 1:
        print(f"\nstages on {ranks} devices in one process, compared with a plain loop on {device}")
        in_process([(shape, devices[:ranks], name) for name in NAMES], args)
    if "ranks" in args.only:
        one_rank_a_process(shape, device.type, ranks, args)


if __name__ == "__main__":
    main()
