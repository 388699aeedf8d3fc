"""A script that network_namespaces.py runs as one rank on each host. Rank 0 prints all results as JSON."""

import json
import os
import time
from itertools import combinations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipesched import Pipeline, probe_links
from tests.support.jobs import pipelines
from tests.support.sleeping_layers import waited

#: For each layer: the seconds of its forward (its backward takes twice as long), and its number of outputs per row.
LAYERS = ((0.01, 1_000), (0.02, 60_000), (0.02, 1_000), (0.005, 1_000), (0.005, 1_000))
CUTS = list(combinations(range(1, len(LAYERS)), 3))
MICROBATCHES, ROUNDS = 4, 3
TRAINED = ("1f1b", "zb-v")


class Sleeps(nn.Module):
    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return waited(x[:, :1], self.seconds) + self.weight


def sleeping_model() -> nn.Sequential:
    return nn.Sequential(*(Sleeps(*layer) for layer in LAYERS))


def last(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square().mean()


def steps_of(mesh: DeviceMesh, cuts: list[tuple[int, ...]]) -> list[list[float]]:
    """Return the measured makespans of ROUNDS steps for each cut. The cuts take turns, one step each."""
    x, y = torch.ones(MICROBATCHES, 1), torch.zeros(MICROBATCHES)
    pipes = [
        Pipeline(
            sleeping_model(),
            x[:1],
            loss_fn=last,
            mesh=mesh,
            schedule="1f1b",
            boundaries=list(cut),
            num_microbatches=MICROBATCHES,
            seed=0,
        )
        for cut in cuts
    ]
    took: list[list[float]] = [[] for _ in pipes]
    for _ in range(ROUNDS):
        for seconds, pipe in zip(took, pipes, strict=True):
            pipe.step(x, target=y)
            seconds.append(pipe.gather_trace().makespan_s)
    for pipe in pipes:
        pipe.close()
    return took


def main() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("pp",))
    start_s = time.perf_counter()
    links = probe_links(mesh["pp"])
    probe_s = time.perf_counter() - start_s
    pipelines.train_pipelines(mesh.get_group(), list(TRAINED), "never")
    took = steps_of(mesh["pp"], CUTS)
    if mesh.get_rank() == 0:
        print(json.dumps({"links": links.to_dict(), "probe_s": probe_s, "trained": TRAINED, "took": took}))
    distributed.destroy_process_group()
