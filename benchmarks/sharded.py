"""Sharded: compares ways to divide weights and states over 2 replicas of 2 gloo ranks, with 8 blocks.

    python benchmarks/sharded.py [--pairs 15] [--schedules 1f1b interleaved-1f1b zb-h1 zb-v] [--width 256] [--tokens 8]

"once": fully_shard divides the blocks, and a step gathers and reduces each block once. "flags":
``Distributed(gather_once=False)``, where fully_shard gathers for each forward and backward and reduces in each
backward, as earlier versions of pipesched did. "zero2" and "zero3": ``Distributed(zero=2)`` and 3 without fully_shard.
"torch": torch.distributed.pipelining with fully_shard and reshard_after_forward=False, in the same four processes.

All variants update the weights with AdamW in each step. They run in turn (A B C A B C ...); every step begins with a
barrier, and the time of the slowest rank is used. The script prints the gathers and reductions of each rank in a step,
the median times, the milliseconds of a rank's W actions, the most memory that a rank holds in a step and the memory
predicted for it, and the medians of the paired ratios with a 95 % bootstrap interval. The memory of "once" and "flags"
does not include the optimizer's states, because in these variants the optimizer runs outside the pipeline. The weights
of all variants are compared after two steps, before any timing.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from measure import in_ranks, machine, ratio, slowest_s
from torch import Tensor, distributed, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.program.actions import Kind
from pipesched.testing import MemoryMeter

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
    """Return all layers of the model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def sharded(module: nn.Module, shards: DeviceMesh, **options: Any) -> nn.Module:
    """Call fully_shard on each block and then on the stage, which has no weights of its own; return the stage."""
    for part in list(module.modules()):
        if isinstance(part, Block):
            fully_shard(part, mesh=shards, **options)
    return fully_shard(module, mesh=shards, **options)


class Variant(NamedTuple):
    """A way to train: a function that runs a step and an update, the trained modules, and pipesched's pipeline."""

    step: Callable[[], Any]
    modules: list[nn.Module]
    pipe: Pipeline | None = None
    zero: int = 0


def adamw(parameters: Iterable[nn.Parameter]) -> optim.AdamW:
    """Return the optimizer that all variants use."""
    return optim.AdamW(parameters, lr=1e-3, foreach=False)


def pipeline(name: str, width: int, mesh: DeviceMesh, rows: int, **options: Any) -> Pipeline:
    """Make pipesched's pipeline of the blocks."""
    count = RANKS * CHUNKS[name]
    return Pipeline(
        blocks(width),
        torch.ones(rows, width),
        loss_fn=functional.mse_loss,
        mesh=mesh,
        schedule=name,
        num_microbatches=M,
        boundaries=[BLOCKS * stage // count for stage in range(1, count)],
        **options,
    )


def own(name: str, mesh: DeviceMesh, batch: tuple[Tensor, Tensor], gather_once: bool) -> Variant:
    """Make the variant with pipesched's pipeline and stages that fully_shard divides."""
    x, y = batch
    shards = mesh["shard"]
    pipe = pipeline(
        name,
        x.shape[-1],
        mesh["pp"],
        len(x) // M,
        wrap=lambda module, _: sharded(module, shards),
        distributed=Distributed(gather_once=gather_once),
    )
    optimizer = adamw(pipe.parameters())

    def step() -> None:
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()

    return Variant(step, [pipe], pipe)


def divided(name: str, mesh: DeviceMesh, batch: tuple[Tensor, Tensor], zero: Literal[2, 3]) -> Variant:
    """Make the variant with pipesched's pipeline and ``Distributed(zero=...)``."""
    x, y = batch
    axes = {"pipeline": "pp", "replicate": "shard"}
    pipe = pipeline(
        name, x.shape[-1], mesh, len(x) // M, axes=axes, optimizer=adamw, distributed=Distributed(zero=zero)
    )
    return Variant(lambda: pipe.step(x, target=y), [pipe], pipe, zero)


def rival(name: str, mesh: DeviceMesh, batch: tuple[Tensor, Tensor]) -> Variant:
    """Make the variant with torch's pipeline and stages that fully_shard divides."""
    x, y = batch
    made, chunks, in_a_v = RIVALS[name]
    ranks = mesh["pp"]
    rank, count = ranks.get_local_rank(), RANKS * chunks
    size = BLOCKS // count
    numbers = [rank, count - 1 - rank] if in_a_v else [rank + RANKS * chunk for chunk in range(chunks)]
    model = blocks(x.shape[-1])
    parts = [sharded(model[n * size : (n + 1) * size], mesh["shard"], reshard_after_forward=False) for n in numbers]
    stages = [
        PipelineStage(part, number, count, torch.device("cpu"), group=ranks.get_group())
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = made(stages[0] if chunks == 1 else stages, M, loss_fn=functional.mse_loss)
    last = rank == (0 if in_a_v else RANKS - 1)
    optimizer = adamw(parameter for part in parts for parameter in part.parameters())

    def step() -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return Variant(step, parts)


def weights_of(variant: Variant) -> list[Tensor]:
    """Return the whole weights of this rank, sorted, because pipesched and torch store chunks in different orders."""
    if variant.pipe is not None and variant.zero == 3:
        variant.pipe.gather_model()  # the next step divides the weights again
    held = [parameter.detach() for module in variant.modules for parameter in module.parameters()]
    whole = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in held]
    return sorted((weight.clone() for weight in whole), key=lambda weight: (weight.numel(), float(weight.abs().sum())))


def weight_gradient_s(pipe: Pipeline) -> float:
    """Return the seconds that the W actions of a rank took in the last step, averaged over the ranks."""
    spans = pipe.gather_trace().spans
    return sum(span.end_s - span.start_s for span in spans if span.action.kind is Kind.W) / RANKS


def warmed_up(variant: Variant) -> tuple[str, str]:
    """Run two steps; return the numbers of gathers and reductions in the second step, and its memory, both as text.

    The memory has two numbers of MiB: the most that a rank holds, and the prediction for this rank. It is empty for
    torch's variant.
    """
    with ExitStack() as stack:
        meter = None if variant.pipe is None else stack.enter_context(MemoryMeter(variant.pipe))
        for _ in range(2):  # the first one sets up
            if meter is not None:
                meter.mark()
            with counted() as calls:
                variant.step()
    counts = f"{calls['gather']} + {calls['reduce']}"
    if meter is None or variant.pipe is None:
        return counts, ""
    ((rank, held),) = meter.peak_bytes.items()
    predicted = variant.pipe.predicted_memory[rank]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, (held + predicted.batch, predicted.total_bytes))
    return counts, " / ".join(f"{size / 2**20:.1f}" for size in max(found))


def compare(rank: int, name: str, pairs: int, width: int, tokens: int) -> str:
    """Compare the variants under one schedule; return the table rows as text."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("shard", "pp"))
    torch.manual_seed(1 + mesh["shard"].get_local_rank())
    x, y = torch.randn(2, M * tokens, width)
    batch = x, y
    variants = {
        "once": own(name, mesh, batch, True),
        "flags": own(name, mesh, batch, False),
        "zero2": divided(name, mesh, batch, 2),
        "zero3": divided(name, mesh, batch, 3),
    }
    if name in RIVALS:
        variants["torch"] = rival(name, mesh, batch)
    counts = {}
    sizes = {}
    failed = ""
    for label, variant in list(variants.items()):
        try:
            counts[label], sizes[label] = warmed_up(variant)
        except Exception as error:
            if label != "torch":
                raise
            failed = f"torch fails: {type(error).__name__}: {str(error).splitlines()[0]}"
            del variants[label]
            continue
    due = weights_of(variants["once"])
    equal = {
        label: all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(due, weights_of(variant), strict=True))
        for label, variant in variants.items()
    }
    times: dict[str, list[float]] = {label: [] for label in variants}
    for _ in range(pairs):
        for label, variant in variants.items():
            times[label].append(slowest_s(variant.step))
    lines = []
    for label, variant in variants.items():
        w = "" if variant.pipe is None else f"{weight_gradient_s(variant.pipe) * 1e3:.3f}"
        once = ratio(times["once"], times[label])
        zero = ratio(times["zero2"], times[label])
        lines.append(
            f"| {name} | {label} | {counts[label]} | {once.second * 1e3:.0f} | {w} | {sizes[label]} | "
            f"{once if label != 'once' else ''} | {zero if label != 'zero2' else ''} | "
            f"{'yes' if equal[label] else 'NO'} |"
        )
    for variant in variants.values():
        if variant.pipe is not None:
            variant.pipe.close()
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
    print(
        "| schedule | variant | gathers + reductions | step, ms | W, ms | held / predicted, MiB | "
        "time of once / of variant | time of zero2 / of variant | same weights |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.schedules:
        print(in_ranks(REPLICAS * RANKS, compare, name, options.pairs, options.width, options.tokens)[0], flush=True)


if __name__ == "__main__":
    main()
