"""Memory: compares the predicted with the measured peak memory of each rank: `python benchmarks/memory.py`.

The measured peak is the most memory that a rank holds in the third step, including the batch. On CPUs
`pipesched.testing.MemoryMeter` measures it, without the batch, whose size is added; on two accelerators their
allocators do.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Pipeline, schedules
from pipesched.devices.selection import default_devices
from pipesched.devices.streams import is_accelerator
from pipesched.testing import MemoryMeter

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.models import TransformerBlock

RANKS, MICROBATCHES = 2, 8
WIDTH, TOKENS, WORDS = 128, 64, 1000


def gpt() -> tuple[nn.Sequential, Tensor]:
    """Return a GPT (eight blocks, and a head over a large vocabulary) and its inputs."""
    blocks = [TransformerBlock(WIDTH) for _ in range(8)]
    ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, *ends), torch.arange(TOKENS)


def mlp() -> tuple[nn.Sequential, Tensor]:
    """Return twelve linear layers and their inputs."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WORDS)), torch.rand(TOKENS, WIDTH)


def conv() -> tuple[nn.Sequential, Tensor]:
    """Return twelve convolutions and their inputs."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), *((16, 16),) * 11):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, WORDS)
    return nn.Sequential(*layers, *head), torch.rand(8, 3, 16, 16)


ADAM = partial(torch.optim.Adam, lr=1e-3)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
CASES: list[tuple[Any, str, dict[str, Any]]] = [
    *((make, name, {}) for make in (gpt, mlp, conv) for name in ("gpipe", "1f1b", "interleaved-1f1b")),
    *((gpt, name, {}) for name in ("zb-h1", "zb-v", "chimera", "dualpipe")),
    *((gpt, name, {"checkpoint": "always"}) for name in ("gpipe", "1f1b", "zb-h1")),
    (gpt, "1f1b", {"optimizer": MOMENTUM}),
    (gpt, "1f1b", {"optimizer": ADAM}),
    (gpt, "1f1b", {"optimizer": partial(torch.optim.AdamW, foreach=True)}),
    (gpt, "pipedream", {"optimizer": MOMENTUM}),
]
OVER_A_MESH = [(make, name, {}) for make in (gpt, mlp) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")]


def measured(make: Any, name: str, where: dict[str, Any], **options: Any) -> Iterator[str]:
    """Run steps of one case; yield a table row for each rank of this process."""
    torch.manual_seed(0)
    model, sample = make()
    chunks = 1 if name in ("chimera", "dualpipe") else schedules.get(name).chunks_per_rank
    boundaries = [len(model) * stage // (RANKS * chunks) for stage in range(1, RANKS * chunks)]
    choices = {"num_microbatches": MICROBATCHES, "boundaries": boundaries, "seed": 1, **options}
    batch, targets = torch.cat([sample] * MICROBATCHES), torch.randint(WORDS, (len(sample) * MICROBATCHES,))
    with Pipeline(model, sample, loss_fn=functional.cross_entropy, schedule=name, **where, **choices) as pipe:
        predicted, meter = pipe.predicted_memory, MemoryMeter(pipe)
        for _ in range(3):
            meter.mark()
            pipe.step(batch, target=targets)
            pipe.flush()
            model.zero_grad()
        by_allocator = is_accelerator(next(model.parameters()).device)
        for rank, peak in meter.peak_bytes.items():
            own = predicted[rank]
            size = peak if by_allocator else peak + own.batch
            said = " ".join(value if isinstance(value, str) else value.func.__name__ for value in options.values())
            figures = f"{own.total_bytes:>12,} {size:>12,} {own.total_bytes / size:>7.3f}"
            yield f"{f'{make.__name__} {name} {said}':<40} {rank:>4} {figures}"


def over_a_mesh(rank: int, port: int) -> None:
    """Measure all cases on one rank of a process group, and print the rank's rows."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    for make, name, options in OVER_A_MESH:
        for row in measured(make, name, {"mesh": mesh["pp"]}, **options):
            print(row, flush=True)
        distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Measure all cases and print the table."""
    devices = default_devices(RANKS)
    print(f"{'in one process, on ' + devices[0].split(':')[0]:<40} rank    predicted     measured   ratio")
    for make, name, options in CASES:
        for row in measured(make, name, {"devices": devices}, **options):
            print(row, flush=True)
    print(f"{RANKS} gloo ranks")
    multiprocessing.spawn(over_a_mesh, (29_741,), nprocs=RANKS)


if __name__ == "__main__":
    main()
