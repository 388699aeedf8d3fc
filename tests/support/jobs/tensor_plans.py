"""Jobs of the tests of plans with tensor groups: they find a plan for split layers, and train with it."""

from typing import Any

import torch
from torch.nn import functional

import pipesched
from pipesched import Link, Links, Plan
from pipesched.errors import PipeschedError
from pipesched.testing import reference_step
from tests.support import rank_processes
from tests.support.jobs.tensor_parallel import ROWS, SEED, SPLIT, Case, batch_of, mesh_of, model_of, pipeline

STEPS = 2


def found_plan(group: Any, **axes: int) -> Plan:
    """Return the plan of rank 0."""
    found: list[Any] = [None]
    if group.rank() == 0:
        x, y = batch_of()
        wanted: dict[str, Any] = {"num_ranks": 4, "batch_size": ROWS, "num_microbatches": 8 // axes["replicate"]}
        wanted |= {"loss_fn": functional.mse_loss, "target": y[:4], "links": Links(inside=Link(1e-6, 1e10))}
        found = [pipesched.tune(model_of(), x[:4], axes=axes, tensor_parallel=SPLIT, zero=0, **wanted)]
    torch.distributed.broadcast_object_list(found, group=group)
    plan: Plan = found[0]
    return plan


def runs_a_plan(group: Any) -> tuple[dict[str, int], list[float]]:
    """Train with a plan for two stages of two ranks each. Return its mesh and the differences of the losses."""
    plan = found_plan(group, pipeline=2, replicate=1, tensor=2)
    assert plan.mesh is not None
    mesh = rank_processes.mesh_of(tuple(plan.mesh.values()), tuple(plan.mesh))
    x, y = batch_of()
    expected, differences = model_of(), []
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    chosen = {"schedule": "auto", "num_microbatches": None}
    with pipeline(Case(clip=None), mesh=mesh, plan=plan, **chosen) as pipe:
        for step in range(STEPS):
            loop: dict[str, Any] = {"num_microbatches": 8, "num_replicas": 1, "seed": SEED, "step": step}
            due = reference_step(expected, x, target=y, loss_fn=functional.mse_loss, **loop)
            differences.append(abs(float(pipe.step(x, target=y)) / float(due) - 1))
            theirs.step()
            theirs.zero_grad()
    return dict(plan.mesh), differences


def refuses_a_plan(group: Any) -> str:
    """Return the error of a pipeline with fewer tensor ranks than its plan."""
    plan = found_plan(group, pipeline=1, replicate=1, tensor=4)
    try:
        with pipeline(Case(clip=None), mesh=mesh_of((1, 2, 2)), plan=plan, schedule="auto", num_microbatches=None):
            return ""
    except PipeschedError as error:
        return str(error)
