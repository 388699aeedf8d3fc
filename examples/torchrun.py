"""Train with one process per rank: `torchrun --nproc_per_node 2 examples/torchrun.py`.

The printed losses are bit-identical for any number of processes.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Pipeline

torch.manual_seed(0)  # every process builds the same model and the same batches
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 4))
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("pp",))
options = {"loss_fn": functional.cross_entropy, "num_microbatches": 8, "schedule": "zb-h1"}
with Pipeline(model, torch.randn(4, 32), mesh=mesh["pp"], seed=0, **options) as pipe:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)  # the parameters of this rank's stages
    for step in range(5):
        x, y = torch.randn(32, 32), torch.arange(32) % 4
        loss = pipe.step(x, target=y)  # every rank gets the loss
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}")
distributed.destroy_process_group()
