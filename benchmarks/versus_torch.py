"""Versus torch: compares a step of pipesched and of torch.distributed.pipelining on 2 gloo ranks.

    python benchmarks/versus_torch.py [--pairs 25] [--tiny | --checkpoint | --one-rank] [--schedules 1f1b zb-v ...]

Blocks, weights, micro-batches and threads are the same. Both run in the same two processes, in turn (A B A B ...).
Every round begins with a barrier, and the time of the slower rank is used. Each round also measures the ideal step:
each rank runs half of the layers over the same micro-batches, without communication. The script prints the median of
the paired ratios ours / torch with a 95 % bootstrap interval, and the ratios ours / ideal, theory / ideal and ours /
theory. "theory" is pipesched's program, simulated with the median times of this round's actions and without
communication. Gradients are compared before any timing.

--checkpoint: every block is checkpointed, in pipesched by checkpoint="always" and in torch by torch.utils.checkpoint in
the block (use_reentrant=False). --tiny: blocks of Linear(8, 8) and 64 micro-batches, to measure the overhead of
actions. --one-rank: one process without communication, with 64 micro-batches and one Linear(8, 8) in each stage. It
prints medians with quartiles of the additional processor time per compute action, in microseconds, compared with F and
B of the same layers in a plain loop ("bare calls").
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from measure import machine, ratio, slowest_s
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Pipeline, simulate
from pipesched.program.lowering import add_recompute
from pipesched.simulation.comparison import measured_costs

NAMES = {  # our schedule -> (torch's class, stages on each rank, whether the stages are placed in a V)
    "gpipe": (schedules.ScheduleGPipe, 1, False),
    "1f1b": (schedules.Schedule1F1B, 1, False),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, 2, False),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, True),
}
OURS, TORCH, IDEAL, SIMULATED = range(4)


class Checkpointed(nn.Module):
    """A block that saves only its input, and runs again in the backward (torch.utils.checkpoint)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def blocks(tiny: bool) -> nn.Sequential:
    """Return sixteen layers: transformer blocks, or tiny linear layers if ``tiny``."""
    torch.manual_seed(0)
    if tiny:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(16)))
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    return nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, **options) for _ in range(16)))


def torch_step(
    name: str, model: nn.Sequential, rank: int, ranks: int, m: int, loss_fn: Callable[..., Any] = functional.mse_loss
) -> Any:
    """Return a function that runs one step of torch's schedule, with the same number of layers in each stage."""
    made, chunks, in_a_v = NAMES[name]
    count = ranks * chunks
    size = len(model) // count
    own = [rank + ranks * chunk for chunk in range(chunks)]
    if in_a_v:
        own = [rank, count - 1 - rank]
    stages = [
        PipelineStage(model[stage * size : (stage + 1) * size], stage, count, torch.device("cpu")) for stage in own
    ]
    schedule = made(stages[0] if chunks == 1 else stages, m, loss_fn=loss_fn)
    last = rank == (0 if in_a_v else ranks - 1)

    def step(x: Tensor, y: Tensor) -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if last else {}))

    return step


def bare_step(layers: Sequence[nn.Module], m: int) -> Any:
    """Return a function that runs F of all layers and then B of all layers, for each micro-batch in turn."""

    def step(x: Tensor, y: Tensor) -> None:
        for value, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            outputs: list[Tensor] = []
            inputs: list[Tensor] = []
            for layer in layers:
                given = outputs[-1].detach().requires_grad_() if outputs else value
                inputs.append(given)
                outputs.append(layer(given))
            torch.autograd.backward(functional.mse_loss(outputs[-1], target) / m)
            for output, given in zip(outputs[-2::-1], inputs[:0:-1], strict=True):
                torch.autograd.backward(output, given.grad)

    return step


def processor_seconds(step: Callable[[], Any]) -> float:
    """Run a step and return its processor seconds, summed over all threads."""
    start = time.process_time()
    step()
    return time.process_time() - start


def simulated(pipe: Pipeline) -> float:
    """Return the makespan of the last step, simulated with its measured action times and without communication."""
    program, trace = add_recompute(pipe.plan.program, pipe.checkpoint), pipe.gather_trace()
    if trace is None:
        raise RuntimeError("a trace requires a step; no step has run yet; call step() first")
    return float(simulate(program, measured_costs([trace], program.num_stages)).makespan_s)


def same_gradients(pipe: Pipeline, theirs: nn.Sequential) -> bool:
    """Return whether this rank's gradients in pipesched and in torch agree within rounding."""
    due = {name.replace(".block.", "."): p for name, p in theirs.named_parameters()}
    pairs = [(p.grad, due[name].grad) for name, p in pipe.named_parameters()]
    return all(bool((own - other).norm() <= 1e-4 * other.norm()) for own, other in pairs)  # gradients may be tiny


def compare(rank: int, ranks: int, name: str, options: argparse.Namespace) -> None:
    """Compare pipesched and torch under one schedule; rank 0 prints a row."""
    m, rows = (64, 64) if options.tiny else (8, 32)
    ours, theirs = blocks(options.tiny), blocks(options.tiny)
    if options.checkpoint:
        theirs = nn.Sequential(*map(Checkpointed, theirs))
    shape = (rows, 8) if options.tiny else (rows, 64, 256)
    x, y = torch.randn(shape), torch.randn(shape)
    chunks = NAMES[name][1]
    cut = [len(ours) * stage // (ranks * chunks) for stage in range(1, ranks * chunks)]
    rival = torch_step(name, theirs, rank, ranks, m)
    half = len(ours) // ranks
    ideal = bare_step([theirs[rank * half : (rank + 1) * half]], m)
    kept = "always" if options.checkpoint else "never"
    mesh = init_device_mesh("cpu", (ranks,))
    with Pipeline(
        ours,
        x[: rows // m],
        loss_fn=functional.mse_loss,
        mesh=mesh,
        schedule=name,
        num_microbatches=m,
        boundaries=cut,
        checkpoint=kept,
    ) as pipe:
        rival(x, y)
        pipe.step(x, target=y)
        agree = torch.tensor(float(same_gradients(pipe, theirs)))
        distributed.all_reduce(agree, distributed.ReduceOp.MIN)
        runs: list[tuple[float, float, float, float]] = []
        for number in range(options.pairs + 1):
            for model in (ours, theirs):
                model.zero_grad()
            one = slowest_s(lambda: pipe.step(x, target=y))
            theory = simulated(pipe)
            other = slowest_s(lambda: rival(x, y))
            theirs.zero_grad()
            run = one, other, slowest_s(lambda: ideal(x, y)), theory
            runs += [run] if number else []  # the first round is a warm-up
    if rank:
        return
    columns = list(zip(*runs, strict=True))
    found, above = ratio(columns[OURS], columns[TORCH]), ratio(columns[OURS], columns[SIMULATED])
    over_ideal, allowed = (ratio(columns[which], columns[IDEAL]).value for which in (OURS, SIMULATED))
    kinds = 3 if "zb" in name else 2
    per_action = f"{found.first / (m * chunks * kinds) * 1e6:>8.0f}{found.second / (m * chunks * kinds) * 1e6:>7.0f}"
    times = f"{found.first * 1e3:>9.1f}{found.second * 1e3:>9.1f}"
    ideals = f"{over_ideal:>12.3f}{allowed:>8.3f}{above!s:>24}"
    print(f"{name:<18}{found!s:>22}{times}{per_action}{ideals}  {bool(agree)}", flush=True)


def run(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    """Run the comparison for all schedules on one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    if rank == 0:
        print(machine())
        columns = f"{'ours / torch':>22}{'ours ms':>9}{'torch ms':>9}{'us/act.':>8}{'torch':>7}"
        theory = f"{'ours / ideal':>12}{'theory':>8}{'ours / theory':>24}  equal"
        alone = "us of processor time per compute action"
        print(f"{'schedule':<18}" + (f"  {alone}" if options.one_rank else columns + theory))
    for name in options.schedules:
        if options.one_rank:
            alone_above_bare(name, options.pairs)
        else:
            compare(rank, ranks, name, options)
    distributed.destroy_process_group()


def alone_above_bare(name: str, pairs: int) -> None:
    """Print how much more processor time a compute action takes in pipesched and in torch than in a plain loop."""
    chunks, m = NAMES[name][1], 64
    models = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(chunks))) for _ in range(4)]
    x, y = torch.randn(m, 8), torch.randn(m, 8)
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "schedule": name, "num_microbatches": m}
    options["boundaries"] = list(range(1, chunks))
    with (
        Pipeline(models[0], x[:1], devices=["cpu"], **options) as local,
        Pipeline(models[1], x[:1], mesh=init_device_mesh("cpu", (1,)), **options) as meshed,
    ):
        rival, bare = torch_step(name, models[2], 0, 1, m), bare_step(list(models[3]), m)
        steps: dict[str, Callable[[], Any]] = {
            "bare": lambda: bare(x, y),
            "ours": lambda: local.step(x, target=y),
            "ours, mesh": lambda: meshed.step(x, target=y),
            "torch": lambda: rival(x, y),
        }
        rounds = [[processor_seconds(step) for step in steps.values()] for _ in range(pairs + 2)][2:]
    count = m * chunks * (3 if "zb" in name else 2)
    cells = [f"bare {median(run[0] for run in rounds) / count * 1e6:6.1f}"]
    for column, who in list(enumerate(steps))[1:]:
        above = sorted((run[column] - run[0]) / count * 1e6 for run in rounds)
        low, high = above[len(above) // 4], above[-1 - len(above) // 4]
        cells.append(f"{who} +{median(above):.1f} ({low:.1f} to {high:.1f})")
    print(f"{name:<18}  {'   '.join(cells)}", flush=True)


def main() -> None:
    """Start one process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--schedules", nargs="+", default=list(NAMES), choices=list(NAMES))
    for flag in ("--tiny", "--checkpoint", "--one-rank"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    port = torch.randint(20000, 60000, (), generator=torch.Generator().manual_seed(time.time_ns() % 2**31)).item()
    ranks = 1 if options.one_rank else 2
    multiprocessing.spawn(run, (ranks, f"tcp://127.0.0.1:{port}", options), nprocs=ranks)


if __name__ == "__main__":
    main()
