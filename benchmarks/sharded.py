"""Sharded: steps of 2x2 gloo ranks (2 replicas of 2 ranks), 8 blocks that fully_shard divides, and 8 micro-batches.

    python benchmarks/sharded.py [--pairs 15] [--schedules 1f1b interleaved-1f1b zb-h1 zb-v] [--width 256] [--tokens 8]

"once": a step gathers and reduces each block once. "flags": ``Distributed(gather_once=False)``, where fully_shard
gathers for each forward and backward and reduces in each backward, as pipesched did before it had the option. "torch":
torch.distributed.pipelining with fully_shard and reshard_after_forward=False, in the same four processes. The variants
run in turn (A B C A B C ...); every step begins with a barrier, and the time of the slowest rank is used. The script
prints the gathers and reductions of each rank in a step, the median times, the milliseconds of a rank's W actions, and
the medians of the paired ratios with a 95 % bootstrap interval. Gradients of all variants are compared before any
timing.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import in_ranks, machine, ratio, slowest_s
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.program.actions import Kind

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.collectives import counted

REPLICAS, RANKS, BLOCKS, M = 2, 2, 8, 8
RIVALS = {  # our schedule -> (torch's class, stages on each rank, whether the stages are placed in a V)
    "1f1b": (schedules.Schedule1F1B, 1, False),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, 2, False),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, 2, True),
}
CHUNKS = {"1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "interleaved-zb": 2, "zb-v": 2}


class Block(nn.Module):
    """A residual block; not an nn.Sequential, so that it is one layer of the pipeline."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + y


def blocks(width: int) -> nn.Sequential:
    """All layers of the model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def sharded(module: nn.Module, shards: DeviceMesh, **options: Any) -> nn.Module:
    """Shard each block, and then the stage, which has no weights of its own."""
    for part in list(module.modules()):
        if isinstance(part, Block):
            fully_shard(part, mesh=shards, **options)
    return fully_shard(module, mesh=shards, **options)


def own(name: str, width: int, meshes: tuple[DeviceMesh, DeviceMesh], gather_once: bool, rows: int) -> Pipeline:
    """Make a pipeline."""
    shards, ranks = meshes
    count = RANKS * CHUNKS[name]
    return Pipeline(
        blocks(width),
        torch.ones(rows, width),
        loss_fn=functional.mse_loss,
        mesh=ranks,
        schedule=name,
        num_microbatches=M,
        boundaries=[BLOCKS * stage // count for stage in range(1, count)],
        wrap=lambda module, _: sharded(module, shards),
        distributed=Distributed(gather_once=gather_once),
    )


def rival(name: str, width: int, meshes: tuple[DeviceMesh, DeviceMesh]) -> tuple[Callable[..., None], list[nn.Module]]:
    """Make a function that runs a step of torch's pipeline, and its stages."""
    made, chunks, in_a_v = RIVALS[name]
    shards, ranks = meshes
    rank, count = ranks.get_local_rank(), RANKS * chunks
    size = BLOCKS // count
    numbers = [rank, count - 1 - rank] if in_a_v else [rank + RANKS * chunk for chunk in range(chunks)]
    model = blocks(width)
    parts = [sharded(model[n * size : (n + 1) * size], shards, reshard_after_forward=False) for n in numbers]
    stages = [
        PipelineStage(part, number, count, torch.device("cpu"), group=ranks.get_group())
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = made(stages[0] if chunks == 1 else stages, M, loss_fn=functional.mse_loss)
    last = rank == (0 if in_a_v else RANKS - 1)

    def step(x: Tensor, target: Tensor) -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": target} if last else {}))

    return step, parts


def shards_of(modules: list[nn.Module]) -> list[Tensor]:
    """The gradients of this process, sorted, because chunks lie in different orders."""
    grads = [p.grad.to_local() for module in modules for p in module.parameters()]
    return sorted(grads, key=lambda grad: (grad.numel(), float(grad.abs().sum())))


def weight_gradient_s(pipe: Pipeline) -> float:
    """The seconds of the W actions of a rank in the last step, on average."""
    spans = pipe.gather_trace().spans
    return sum(span.end_s - span.start_s for span in spans if span.action.kind is Kind.W) / RANKS


def compare(rank: int, name: str, pairs: int, width: int, tokens: int) -> str:
    """Compare the variants under one schedule; returns the lines to print."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("shard", "pp"))
    meshes = mesh["shard"], mesh["pp"]
    torch.manual_seed(1 + mesh["shard"].get_local_rank())
    x, y = torch.randn(2, M * tokens, width)
    with own(name, width, meshes, True, tokens) as once, own(name, width, meshes, False, tokens) as flags:
        modules: dict[str, list[nn.Module]] = {"once": [once], "flags": [flags]}
        steps = {"once": lambda: once.step(x, target=y), "flags": lambda: flags.step(x, target=y)}
        failed = ""
        if name in RIVALS:
            theirs, modules["torch"] = rival(name, width, meshes)
            steps["torch"] = lambda: theirs(x, y)
        counts = {}
        for variant in list(steps):
            try:
                for _ in range(2):  # the first one sets up
                    for module in modules[variant]:
                        module.zero_grad()
                    with counted() as calls:
                        steps[variant]()
            except Exception as error:
                if variant != "torch":
                    raise
                failed = f"torch fails: {type(error).__name__}: {str(error).splitlines()[0]}"
                del steps[variant]
                continue
            counts[variant] = f"{calls['gather']} + {calls['reduce']}"
        due = shards_of(modules["once"])
        equal = {
            variant: all(
                torch.allclose(a, b, rtol=1e-4, atol=1e-6)
                for a, b in zip(due, shards_of(modules[variant]), strict=True)
            )
            for variant in steps
        }
        times: dict[str, list[float]] = {variant: [] for variant in steps}
        w_s: dict[str, float] = {}
        for _ in range(pairs):
            for variant, step in steps.items():
                for module in modules[variant]:
                    module.zero_grad()
                times[variant].append(slowest_s(step))
        for variant, pipe in (("once", once), ("flags", flags)):
            w_s[variant] = weight_gradient_s(pipe)
    lines = []
    for variant in steps:
        compared = ratio(times["once"], times[variant])
        w = f"{w_s[variant] * 1e3:.1f}" if variant in w_s else ""
        against = "" if variant == "once" else f"{compared!s}"
        lines.append(
            f"| {name} | {variant} | {counts[variant]} | {compared.second * 1e3:.0f} | {w} | {against} | "
            f"{'yes' if equal[variant] else 'NO'} |"
        )
    return "\n".join(lines + ([f"| {name} | {failed} |"] if failed else []))


def main() -> None:
    """Run the comparison for each schedule, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--schedules", nargs="+", default=list(CHUNKS), choices=CHUNKS)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8, help="rows of a micro-batch")
    options = parser.parse_args()
    print(
        f"{machine()}; {BLOCKS} blocks of width {options.width}, {options.tokens} rows in each of {M} micro-batches\n"
    )
    print("| schedule | variant | gathers + reductions | ms | W, ms | once / variant | same gradients |")
    print("|---|---|---|---|---|---|---|")
    for name in options.schedules:
        print(in_ranks(REPLICAS * RANKS, compare, name, options.pairs, options.width, options.tokens)[0], flush=True)


if __name__ == "__main__":
    main()
