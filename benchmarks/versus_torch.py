"""A step against torch.distributed.pipelining's: 2 ranks, gloo, the same blocks, weights, micro-batches and threads.

    python benchmarks/versus_torch.py [--pairs 25] [--tiny]

Both run in the same two processes, in turn (A B A B ...); every pair begins with a barrier, and the longer of the two
ranks counts. Printed: the median of the paired ratios ours / torch with a 95 % bootstrap interval, and both medians.
Gradients are compared first. --tiny: blocks of Linear(8, 8) and 64 micro-batches: what an action costs beside its work.
"""

import argparse
import time
from typing import Any

import torch
from measure import machine, ratio
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from pipesched import Pipeline

RANKS = 2
NAMES = {  # ours -> (torch's, stages a rank, whether stages lie in a V)
    "gpipe": (schedules.ScheduleGPipe, 1, False),
    "1f1b": (schedules.Schedule1F1B, 1, False),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, 2, False),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, True),
}


def blocks(tiny: bool) -> nn.Sequential:
    """Sixteen layers."""
    torch.manual_seed(0)
    if tiny:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(16)))
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    return nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, **options) for _ in range(16)))


def torch_step(name: str, model: nn.Sequential, rank: int, m: int) -> Any:
    """A function that runs one step of torch's schedule."""
    made, chunks, in_a_v = NAMES[name]
    count = RANKS * chunks
    size = len(model) // count
    own = [rank + RANKS * chunk for chunk in range(chunks)]
    if in_a_v:
        own = [rank, count - 1 - rank]
    stages = [
        PipelineStage(model[stage * size : (stage + 1) * size], stage, count, torch.device("cpu")) for stage in own
    ]
    schedule = made(stages[0] if chunks == 1 else stages, m, loss_fn=functional.mse_loss)
    last = rank == (0 if in_a_v else RANKS - 1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if last else {}))

    return step


def seconds(step: Any) -> float:
    """How long a step takes, on the slower rank."""
    distributed.barrier()
    start = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    distributed.all_reduce(took, distributed.ReduceOp.MAX)
    return float(took)


def same_gradients(pipe: Pipeline, theirs: nn.Sequential) -> bool:
    """Whether this rank's gradients agree within rounding."""
    due = dict(theirs.named_parameters())
    return all(torch.allclose(p.grad, due[name].grad, atol=1e-5) for name, p in pipe.named_parameters())


def compare(rank: int, name: str, pairs: int, tiny: bool) -> None:
    """One schedule; rank 0 prints."""
    m, rows = (64, 64) if tiny else (8, 32)
    ours, theirs = blocks(tiny), blocks(tiny)
    shape = (rows, 8) if tiny else (rows, 64, 256)
    x, y = torch.randn(shape), torch.randn(shape)
    chunks = NAMES[name][1]
    cut = [len(ours) * stage // (RANKS * chunks) for stage in range(1, RANKS * chunks)]
    mesh = init_device_mesh("cpu", (RANKS,))
    rival = torch_step(name, theirs, rank, m)
    with Pipeline(
        ours, x[: rows // m], loss_fn=functional.mse_loss, mesh=mesh, schedule=name, num_microbatches=m, boundaries=cut
    ) as pipe:
        rival(x, y)
        pipe.step(x, target=y)
        agree = torch.tensor(float(same_gradients(pipe, theirs)))
        distributed.all_reduce(agree, distributed.ReduceOp.MIN)
        runs = []
        for _ in range(pairs):
            for model in (ours, theirs):
                model.zero_grad()
            runs.append((seconds(lambda: pipe.step(x, target=y)), seconds(lambda: rival(x, y))))
    found = ratio([a for a, _ in runs], [b for _, b in runs])
    kinds = 3 if "zb" in name else 2
    per_action = f"{found.first / (m * chunks * kinds) * 1e6:>9.0f}{found.second / (m * chunks * kinds) * 1e6:>9.0f}"
    if rank == 0:
        times = f"{found.first * 1e3:>10.1f}{found.second * 1e3:>10.1f}"
        print(f"{name:<20}{found!s:>24}{times}{per_action}  {bool(agree)}", flush=True)


def run(rank: int, store: str, pairs: int, tiny: bool) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    if rank == 0:
        print(machine())
        print(f"{'schedule':<20}{'ours / torch':>24}{'ours ms':>10}{'torch ms':>10}{'us/act.':>9}{'torch':>9}  equal")
    for name in NAMES:
        compare(rank, name, pairs, tiny)
    distributed.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    port = torch.randint(20000, 60000, (), generator=torch.Generator().manual_seed(time.time_ns() % 2**31)).item()
    multiprocessing.spawn(run, (f"tcp://127.0.0.1:{port}", args.pairs, args.tiny), nprocs=RANKS)


if __name__ == "__main__":
    main()
