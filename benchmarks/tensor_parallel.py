"""Tensor parallelism: predicted step times beside measured ones, with layers that sleep and links of a given speed.

    python benchmarks/tensor_parallel.py [--steps 9] [--layer-ms 10] [--latency-us 3000] [--mb-per-s 20]

Two stages over tensor groups of 2 and 4 ranks. A block has a layer that sleeps, a linear layer that is split by
columns, and a linear layer that is split by rows, as in Megatron-LM. The ranks of a tensor group exchange real tensors,
and each exchange is stretched to the time that the link takes: latency for each serial round, and bytes over bandwidth.
The prediction knows the link only from `Search(links=...)`, and the layers from rank 0, which measures them alone.
"planned" is the prediction of `tune_profile`, from a profile of whole layers and those of a split copy in one process.
"bytes sent" is what a rank sends in collectives in a step, counted in the run; "by the formula" is 2 (P - 1)/P n bytes
for each of two all-reduces of a block and a micro-batch.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import pipesched
from benchmarks.measure import in_ranks, machine
from benchmarks.sleeping import WIDTH, Sleeping, wake_in_time
from pipesched import Distributed, Link, Links, Pipeline, Search
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.traffic_counter import Traffic
from pipesched.profiling.tensor_link import collective_s

STAGES, BLOCKS, MICROBATCHES, ROWS = 2, 8, 8, 64
SPLIT = {"*.up": "column", "*.down": "row"}
SHAPES = ((2, "1f1b"), (2, "zb-h1"), (4, "1f1b"))


class Block(nn.Module):
    """A layer that sleeps, a linear layer split by columns, and one split by rows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sleeping = Sleeping(seconds)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows of WIDTH numbers."""
        return self.down(self.up(self.sleeping(x)))


def model_of(seconds: float) -> nn.Sequential:
    """Return the whole model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(seconds) for _ in range(BLOCKS)))


def links_of(size: int, link: Link) -> Links:
    """Return the links, with one host for each stage."""
    return Links(inside=link, hosts=tuple(stage for stage in range(STAGES) for _ in range(size)))


def planned(size: int, schedule: str, link: Link, seconds: float) -> float:
    """Return the step time that `tune` predicts, in one process."""
    x = torch.randn(ROWS, WIDTH)
    known = pipesched.profile(
        model_of(seconds),
        x,
        loss_fn=functional.mse_loss,
        target=x,
        rows=[ROWS],
        thorough=False,
        ranks_are="processes",
        tensor_parallel=SPLIT,
        tensor_size=size,
    )
    plan = pipesched.tune_profile(
        known,
        num_ranks=STAGES * size,
        batch_size=ROWS * MICROBATCHES,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        axes={"pipeline": STAGES, "replicate": 1, "tensor": size},
        links=links_of(size, link),
    )
    return plan.alternatives[0].step_s


def stretch(link: Link) -> None:
    """Let each exchange between the ranks of a tensor group take as long as the link says."""
    took_s = collective_s(link)
    run, exchanges = TensorGroup._run, TensorGroup._exchanges
    due: list[float] = [0.0]

    def counted(group: TensorGroup, kind: str, traffic: Traffic, tensor: Tensor) -> bool:
        due[0] = took_s(traffic)
        return exchanges(group, kind, traffic, tensor)

    def stretched(group: TensorGroup, *args: Any) -> None:
        end_s = time.perf_counter() + due[0]
        run(group, *args)
        time.sleep(max(0.0, end_s - time.perf_counter()))

    TensorGroup._exchanges = counted  # type: ignore[method-assign]
    TensorGroup._run = stretched  # type: ignore[method-assign]


def trained(rank: int, size: int, schedule: str, link: Link, seconds: float, steps: int) -> tuple[float, float, int]:
    """Return the predicted and the measured step time, and the bytes that this rank sends in collectives in a step."""
    stretch(link)
    wake_in_time()
    mesh = init_device_mesh("cpu", (STAGES, size), mesh_dim_names=("pp", "tp"))
    model = model_of(seconds)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    with Pipeline(
        model,
        x[:ROWS],
        loss_fn=functional.mse_loss,
        mesh=mesh,
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        search=Search(links=links_of(size, link)),
        distributed=Distributed(tensor_parallel=SPLIT),
    ) as pipe:
        took_s = []
        group = pipe._running.host.tensor
        assert group is not None
        for _ in range(steps + 1):
            group.counter.clear()
            pipe.zero_grad()
            begin = time.perf_counter()
            float(pipe.step(x, target=x))
            took_s.append(time.perf_counter() - begin)
        predicted = pipe.predicted
        assert predicted is not None
        return predicted.makespan_s, median(took_s[1:]), group.counter.total().sent_bytes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--layer-ms", type=float, default=10.0)
    parser.add_argument("--latency-us", type=float, default=3000.0)
    parser.add_argument("--mb-per-s", type=float, default=20.0)
    args = parser.parse_args()
    link = Link(args.latency_us / 1e6, args.mb_per_s * 1e6)
    heads = ("tensor ranks", "schedule", "predicted", "planned", "measured", "errors", "bytes sent", "by the formula")
    table = Table(*heads)
    for size, schedule in SHAPES:
        job = size, schedule, link, args.layer_ms / 1e3, args.steps
        planned_s = planned(size, schedule, link, args.layer_ms / 1e3)
        predicted_s, measured_s, sent = in_ranks(STAGES * size, trained, *job)[0]
        passes = 2 * (BLOCKS // STAGES) * MICROBATCHES  # forward and backward
        due = passes * 2 * (size - 1) * ROWS * WIDTH * 4 // size
        table.add_row(
            str(size),
            schedule,
            f"{predicted_s * 1e3:.1f} ms",
            f"{planned_s * 1e3:.1f} ms",
            f"{measured_s * 1e3:.1f} ms",
            f"{predicted_s / measured_s - 1:+.1%}, {planned_s / measured_s - 1:+.1%}",
            f"{sent:,}",
            f"{due:,}",
        )
    print(machine())
    Console().print(table)


if __name__ == "__main__":
    main()
