"""Jobs that run plans with replicas."""

from typing import Any

import torch
from torch.nn import functional

import pipesched
from pipesched import Distributed, Link, Links
from pipesched.testing import reference_step
from tests.support import rank_processes
from tests.support.jobs.replicas import pipeline, plain_batch, plain_model

ROWS, SEED = 16, 3


def runs_a_plan(group: Any, zero: int) -> tuple[dict[str, int], int]:
    """Find a plan for two replicas of two ranks, and train two steps with it. Return the plan's mesh and ``zero``."""
    x, y = plain_batch()
    found: list[Any] = [None]
    if group.rank() == 0:
        profile = pipesched.profile(plain_model(), x[:2], loss_fn=functional.mse_loss, target=y[:2])
        links = Links(inside=Link(1e-6, 1e10))
        axes = {"pipeline": 2, "replicate": 2}
        wanted: dict[str, Any] = {"num_ranks": 4, "batch_size": ROWS, "num_microbatches": 4, "axes": axes}
        found = [pipesched.tune(profile, links=links, zero=zero, **wanted)]
    torch.distributed.broadcast_object_list(found, group=group)
    plan = found[0]
    assert plan.replication is not None
    mesh = rank_processes.mesh_of(tuple(plan.mesh.values()), tuple(plan.mesh))
    rows = slice(ROWS // 2 * mesh.get_local_rank("dp"), ROWS // 2 * (mesh.get_local_rank("dp") + 1))
    expected = plain_model()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    distributed = Distributed(timeout=20, zero=plan.replication.zero)
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "distributed": distributed, "plan": plan}
    with pipeline(
        mesh, plain_model(), x[:2], optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **options
    ) as pipe:
        for step in range(2):
            loop: dict[str, Any] = {"num_microbatches": 4, "num_replicas": 2, "seed": SEED, "step": step}
            due = reference_step(expected, x, target=y, loss_fn=functional.mse_loss, **loop)
            assert torch.equal(pipe.step(x[rows], target=y[rows]), due)
            theirs.step()
            theirs.zero_grad()
        whole = pipe.full_state_dict()
        assert all(torch.equal(whole[name], value) for name, value in expected.state_dict().items())
    return dict(plan.mesh), plan.replication.zero
