"""GPU: measures steps and memory on CUDA devices, and compares steps with torch.distributed.pipelining over NCCL.

    python benchmarks/gpu.py [--pairs 25] [--blocks 16] [--width 1024] [--tokens 512] [--rows 32] [--bfloat16]

The script runs every measurement for which the machine has enough devices.

- One device: all stages share the device, and each rank has its own streams. The script compares a step with plain
  gradient accumulation over the same micro-batches. Then it prints for each checkpoint mode the time of a step, and the
  measured and the predicted memory in addition to weights and gradients.
- Two or four devices: the same comparison with one stage on each device, in one process. Then the script starts one
  process for each rank. In these processes, pipesched and torch's own schedules over NCCL take turns (A B A B ...).

The script prints the median of the paired ratios with a 95 % bootstrap interval. Before any timing, it compares the
gradients.
Without a CUDA device it prints only a message.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from measure import Ratio, machine, paired, ratio
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from pipesched import Pipeline
from pipesched import schedules as ours

MICROBATCHES = 8
RIVALS = {  # our schedule -> (torch's class, stages on each rank, whether the stages are placed in a V)
    "gpipe": (schedules.ScheduleGPipe, 1, False),
    "1f1b": (schedules.Schedule1F1B, 1, False),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, 2, False),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, True),
}


class Shape(NamedTuple):
    """The size of the model and of the batch."""

    blocks: int
    width: int
    tokens: int
    rows: int
    dtype: torch.dtype

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        heads = max(1, self.width // 64)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu", "dtype": self.dtype}
        layers = (nn.TransformerEncoderLayer(self.width, heads, 4 * self.width, **options) for _ in range(self.blocks))
        return nn.Sequential(*layers)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(1)
        x, y = (torch.randn(self.rows, self.tokens, self.width, generator=made).to(self.dtype) for _ in range(2))
        return x.to(device), y.to(device)


def settle(devices: list[torch.device]) -> None:
    """Wait until the devices have finished all queued work."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def timed(step: Callable[[], Any], devices: list[torch.device]) -> float:
    """Run a step and return the seconds until the devices have finished."""
    settle(devices)
    start_s = time.perf_counter()
    step()
    settle(devices)
    return time.perf_counter() - start_s


def cut(shape: Shape, stages: int) -> list[int]:
    """Return the indices of the layers at which equal stages begin, without layer 0."""
    return [shape.blocks * stage // stages for stage in range(1, stages)]


def pipeline(shape: Shape, model: nn.Sequential, name: str, x: Tensor, ranks: int, **others: Any) -> Pipeline:
    """Return a pipesched pipeline, with equal stages unless ``others`` contains other boundaries."""
    choices = {"boundaries": cut(shape, ranks * ours.get(name).chunks_per_rank), **others}
    return Pipeline(
        model,
        x[: shape.rows // MICROBATCHES],
        loss_fn=functional.mse_loss,
        schedule=name,
        num_microbatches=MICROBATCHES,
        **choices,
    )


def accumulate(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Run forward and backward of each micro-batch in a loop, so that gradients accumulate."""
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (functional.mse_loss(model(part), target) / MICROBATCHES).backward()


def alike(pipe: Pipeline, theirs: nn.Sequential) -> bool:
    """Return whether the gradients of a pipeline and of another model agree within rounding."""
    due = dict(theirs.named_parameters())
    return all(
        torch.allclose(p.grad, due[name].grad.to(p.device), rtol=0.02, atol=1e-4) for name, p in pipe.named_parameters()
    )


def in_process(shape: Shape, devices: list[torch.device], pairs: int) -> None:
    """Compare a pipeline over the devices with plain gradient accumulation on the first device; print a table."""
    print(f"\nstages in one process on {', '.join(map(str, devices))}, compared with a plain loop on {devices[0]}")
    print(f"{'schedule':<20}{'ours / loop':>24}{'ours ms':>10}{'loop ms':>10}  equal")
    x, y = shape.batch(devices[0])
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v"):
        plain, model = shape.model().to(devices[0]), shape.model()
        with pipeline(shape, model, name, x, len(devices), devices=devices) as pipe:
            accumulate(plain, x, y)
            pipe.step(x, target=y)
            settle(devices)
            agree = alike(pipe, plain)
            runs = paired(
                lambda pipe=pipe: timed(lambda: pipe.step(x, target=y), devices),
                lambda plain=plain: timed(lambda: accumulate(plain, x, y), devices),
                pairs,
            )
            show(name, ratio(*runs), agree)


def show(name: str, found: Ratio, agree: bool) -> None:
    """Print a row with the ratio and both medians."""
    print(f"{name:<20}{found!s:>24}{found.first * 1e3:>10.1f}{found.second * 1e3:>10.1f}  {agree}", flush=True)


def memory(shape: Shape, device: torch.device) -> None:
    """For each checkpoint mode, print a step's time, and its measured and predicted memory beyond weights and grads."""
    print(f"\n1f1b, two ranks on {device}: memory of a step in addition to weights and gradients")
    print(f"{'checkpoint':<14}{'ms':>10}{'allocated MiB':>16}{'predicted MiB':>16}{'ratio':>8}")
    x, y = shape.batch(device)
    for mode in ("never", "except_last", "always"):
        places = {"devices": [device] * 2, "boundaries": None}  # the prediction needs the sizes that this measures
        with pipeline(shape, shape.model(), "1f1b", x, 2, checkpoint=mode, **places) as pipe:
            for _ in range(3):
                seconds = timed(lambda pipe=pipe: pipe.step(x, target=y), [device])
            predicted = sum(pipe.predicted.peak_bytes) / 2**20
            allocated = peak_of(lambda pipe=pipe: pipe.step(x, target=y), device) / 2**20
            print(f"{mode:<14}{seconds * 1e3:>10.1f}{allocated:>16.1f}{predicted:>16.1f}{allocated / predicted:>8.3f}")


def peak_of(step: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that a step allocates at once on a GPU; 0 on a CPU, which does not report them."""
    if device.type == "cpu":
        step()
        return 0
    settle([device])
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    settle([device])
    return torch.cuda.max_memory_allocated(device) - before


# ---- one process for each rank ----


def rival_step(shape: Shape, name: str, model: nn.Sequential, rank: int, ranks: int, device: torch.device) -> Any:
    """Return a function that runs one step of torch's schedule on this rank."""
    made, chunks, in_a_v = RIVALS[name]
    count = ranks * chunks
    ends = [0, *cut(shape, count), shape.blocks]
    own = [rank, count - 1 - rank] if in_a_v else [rank + ranks * chunk for chunk in range(chunks)]
    stages = [PipelineStage(model[ends[s] : ends[s + 1]].to(device), s, count, device) for s in own]
    schedule = made(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=functional.mse_loss)
    last = rank == (0 if in_a_v else ranks - 1)

    def step(x: Tensor, y: Tensor) -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if last else {}))

    return step


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks. Collective."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return float(found)


def run_rank(rank: int, store: str, ranks: int, kind: str, shape: Shape, pairs: int) -> None:
    """Compare both pipelines on one rank of a process group; rank 0 prints."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh(kind, (ranks,))
    x, y = shape.batch(device)

    def seconds(step: Callable[[], Any]) -> float:
        slowest(0.0, device)
        return slowest(timed(step, [device]), device)

    for name in RIVALS:
        theirs = shape.model()
        rival = rival_step(shape, name, theirs, rank, ranks, device)
        with pipeline(shape, shape.model(), name, x, ranks, mesh=mesh) as pipe:
            rival(x, y)
            pipe.step(x, target=y)
            settle([device])
            agree = slowest(float(not alike(pipe, theirs)), device) == 0
            runs = paired(
                lambda pipe=pipe: seconds(lambda: pipe.step(x, target=y)),
                lambda rival=rival: seconds(lambda: rival(x, y)),
                pairs,
            )
            if rank == 0:
                show(name, ratio(*runs), agree)
    distributed.destroy_process_group()


def one_rank_a_process(shape: Shape, kind: str, ranks: int, pairs: int) -> None:
    """Start one process for each rank, and compare pipesched with torch.distributed.pipelining in these processes."""
    print(f"\n{ranks} processes with one rank each, over {'NCCL' if kind == 'cuda' else 'gloo'}, compared with torch")
    print(f"{'schedule':<20}{'ours / torch':>24}{'ours ms':>10}{'torch ms':>10}  equal", flush=True)
    port = torch.randint(20000, 60000, (), generator=torch.Generator().manual_seed(time.time_ns() % 2**31)).item()
    multiprocessing.spawn(run_rank, (f"tcp://127.0.0.1:{port}", ranks, kind, shape, pairs), nprocs=ranks)


def main() -> None:
    """Run the measurements for which the machine has enough devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    for name, default in (("blocks", 16), ("width", 1024), ("tokens", 512), ("rows", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # cpu: for trials
    args = parser.parse_args()
    shape = Shape(args.blocks, args.width, args.tokens, args.rows, torch.bfloat16 if args.bfloat16 else torch.float32)
    count = torch.cuda.device_count()
    if args.device == "cuda" and not count:
        print(
            f"no CUDA device: torch {torch.__version__} finds none; with one device, this script measures stages that "
            f"share it; with two or four devices, it also measures stages on several devices, and ranks over NCCL"
        )
        return
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(f"{machine()}, {count} CUDA devices; {shape}, {MICROBATCHES} micro-batches")
    devices = [torch.device(args.device, index) if count else torch.device("cpu") for index in range(max(count, 2))]
    in_process(shape, devices[:1] * 2, args.pairs)
    memory(shape, devices[0])
    if count == 1:
        print("\nthis machine has one CUDA device; stages on several devices and ranks over NCCL need two or four")
        return
    ranks = 4 if count >= 4 else 2
    if count:
        in_process(shape, devices[:ranks], args.pairs)
    one_rank_a_process(shape, args.device, ranks, args.pairs)


if __name__ == "__main__":
    main()
