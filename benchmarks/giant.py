"""Giant: compares the peak memory of four processes that share a large model with that of a single process.

A GPT of 1.34 GB is built on the meta device, cut, and initialized: first by reset_parameters, then from safetensors
files that the ranks saved. The script prints the peak memory of each process (VmHWM in /proc/self/status) minus its
peak before the model was built.

    python benchmarks/giant.py [--layers 24] [--width 1024]
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import in_ranks, machine
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Pipeline

RANKS, VOCABULARY, LENGTH = 4, 32_768, 32
TEXT = torch.arange(8 * LENGTH).view(8, LENGTH) % VOCABULARY


class Block(nn.Module):
    """A decoder block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (-1, 64)).transpose(1, 2) for part in self.mix(self.first(x)).chunk(3, 2))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A GPT whose head shares the weights of the embedding, and whose positions are computed when it is built."""

    place: Tensor

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.register_buffer("place", torch.linspace(0, 1, LENGTH)[:, None].expand(-1, width), persistent=False)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(layers)), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def peak_bytes() -> int:
    """Return the peak memory of this process. (ru_maxrss would also count the process that started this one.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def measured(make: Callable[[], Any], step: Callable[[Any], Any]) -> tuple[Any, tuple[float, ...]]:
    """Build a model and run a step; return the model and the measurements.

    The measurements are the peak bytes after building, the peak bytes after the step, and the seconds of building.
    """
    gc.collect()
    before, begin_s = peak_bytes(), time.perf_counter()
    model = make()
    took_s, made = time.perf_counter() - begin_s, peak_bytes() - before
    step(model)
    return model, (made, peak_bytes() - before, took_s)


def pipelined(rank: int, folder: str, init: str, shape: tuple[int, int]) -> tuple[float, ...]:
    """Build a pipeline and run a step on one rank; return the bytes of the rank's weights, and the measurements."""
    mesh = DeviceMesh.from_group(distributed.group.WORLD, "cpu")
    choices: dict[str, Any] = {
        "loss_fn": loss,
        "num_microbatches": 4,
        "seed": 0,
        "mesh": mesh,
        "distributed": Distributed(timeout=200.0),
    }
    make = lambda: Pipeline(lambda: GPT(*shape), TEXT[:2], init=init, **choices)  # noqa: E731
    pipe, found = measured(make, lambda pipe: pipe.step(TEXT, target=TEXT))
    share = {id(p): p.nbytes for layer in pipe.model.modules() for p in layer.parameters() if not p.is_meta}
    if init == "reset":
        save(pipe.state_dict(), Path(folder) / f"part-{rank}.safetensors")
    pipe.close()
    return sum(share.values()), *found


def save(state: Mapping[str, Tensor], path: Path) -> None:
    """Save a state dict in which the tied weight is stored once."""
    from safetensors.torch import save_file

    save_file({name: value for name, value in state.items() if name != "head.weight"}, path)


def whole(rank: int, shape: tuple[int, int]) -> tuple[float, ...]:
    """Build the whole model and run a step in one process; return the bytes of all weights, and the measurements."""
    model, found = measured(lambda: GPT(*shape), lambda model: loss(model(TEXT), TEXT).backward())
    return sum(p.nbytes for p in model.parameters()), *found


def row(name: str, share: float, made: float, stepped: float, took_s: float) -> None:
    """Print a row of the table."""
    print(f"{name:32}{share / 1e6:>12.0f}{made / 1e6:>14.0f}{stepped / 1e6:>14.0f}{took_s:>10.1f}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    shape = options.layers, options.width
    print(machine())
    print(f"{'MB':32}{'weights':>12}{'peak: making':>14}{'peak: step':>14}{'seconds':>10}")
    row("whole, in one process", *in_ranks(1, whole, shape)[0])
    with tempfile.TemporaryDirectory() as folder:
        for init in ("reset", folder):
            for rank, found in enumerate(in_ranks(RANKS, pipelined, folder, init, shape)):
                row(f"{'reset' if init == 'reset' else 'safetensors'}, rank {rank} of {RANKS}", *found)


if __name__ == "__main__":
    main()
