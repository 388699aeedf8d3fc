"""A rank that closes its pipeline, and ends while a thread still brings the copy of another rank's state up to date.

python -m tests.support.jobs.copied_at_exit RANK NUM_RANKS STORE
"""

import sys
import time
from typing import Any

import torch
from torch import distributed, nn

from pipesched import Distributed, Pipeline
from pipesched.elastic.state_copy import StateCopy

SLOW_S = 0.5  # the time that a copy takes


def main(rank: int, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    mesh = distributed.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",))  # type: ignore[attr-defined]
    torch.manual_seed(0)
    replay = StateCopy.replay

    def slow_replay(copy: StateCopy, *args: Any) -> None:
        time.sleep(SLOW_S)
        replay(copy, *args)

    StateCopy.replay = slow_replay  # type: ignore[method-assign]
    pipe = Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_ranks))),
        torch.ones(1, 4),
        loss_fn=nn.functional.mse_loss,
        mesh=mesh,
        num_microbatches=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        distributed=Distributed(redundancy="neighbour"),
        schedule="1f1b",
    )
    pipe.step(torch.ones(2, 4), target=torch.ones(2, 4)).item()
    pipe.close()
    print("ran")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
