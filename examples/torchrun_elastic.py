"""Lose hosts, and go on with those that are left, from the last checkpoint. Start this command on each of 1 to 4 hosts:

    torchrun --nnodes 1:4 --nproc_per_node 1 --max_restarts 10 --rdzv_backend c10d --rdzv_endpoint host1:29500 \
        examples/torchrun_elastic.py [--steps 100] [--save-every 10] [--folder runs/torchrun_elastic]

If a rank fails or its host is lost, torchrun stops all ranks and starts this script again on the hosts that are left.
The script then loads the last checkpoint into a pipeline with as many ranks as there are now. The folder must be on a
file system that all hosts share. The weights at the end are bit-identical to those of a run without losses.
"""

import argparse
import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.errors import MissingCheckpointError


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step. It depends on the step only, so that a resumed run sees the same batches."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(32, 32, generator=draw), torch.randint(4, (32,), generator=draw)


def main() -> None:
    """Train from the last checkpoint to the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--folder", default="runs/torchrun_elastic")
    args = parser.parse_args()

    num_ranks = int(os.environ["WORLD_SIZE"])  # may differ at each start
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 4))
    options = {"loss_fn": functional.cross_entropy, "num_microbatches": 8, "schedule": "1f1b", "seed": 0}
    lost = Distributed(timeout=30)  # the longest time until the ranks notice that one is lost
    with Pipeline(model, batch(0)[0][:4], mesh=mesh["pp"], distributed=lost, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        try:
            first = pipe.load(args.folder, optimizer=optimizer).step
        except MissingCheckpointError:
            first = 0
        if mesh.get_rank() == 0:
            print(f"{num_ranks} ranks, from step {first}", flush=True)
        for step in range(first, args.steps):
            x, y = batch(step)
            loss = pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % args.save_every == 0:
                pipe.save(args.folder, optimizer=optimizer, keep=2)
            if mesh.get_rank() == 0:
                print(f"step {step}: loss {loss:.9f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
