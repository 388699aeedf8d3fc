"""Jobs of test_redundancy_options: pipelines with redundancy= over a mesh."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD

from pipesched import Distributed, Pipeline
from pipesched.errors import ExecutionError, InputError
from tests.support.refused_pipelines import linears, mse


def made(group: Any, **options: Any) -> Pipeline:
    given = {"redundancy": "neighbour"} | options
    return Pipeline(
        linears(),
        torch.ones(4, 3),
        loss_fn=mse,
        schedule="1f1b",
        num_microbatches=4,
        optimizer=lambda params: SGD(params, lr=0.1),
        mesh=DeviceMesh.from_group(group, "cpu"),
        distributed=Distributed(**given),
    )


def refusal(group: Any, **options: Any) -> str:
    """Return the error of making a pipeline, which may be that of another rank that was earlier."""
    try:
        made(group, **options)
    except (InputError, ExecutionError) as error:
        return str(error)
    raise AssertionError("the pipeline was made")


def refusals(group: Any, choices: list[dict[str, Any]]) -> list[str]:
    return [refusal(group, **options) for options in choices]


def recovers_without_a_loss(group: Any) -> tuple[str, bool]:
    """Return the error of recover(), and whether the losses around it are those of a pipeline without copies."""
    x, y = torch.arange(12.0).view(4, 3), torch.ones(4, 3)
    losses = []
    for redundancy in (None, "neighbour"):
        torch.manual_seed(3)
        with made(group, redundancy=redundancy) as pipe:
            own = [pipe.step(x, target=y)]
            try:
                pipe.recover()
            except InputError as error:
                said = str(error)
            losses.append([*own, pipe.step(x, target=y)])
    return said, all(map(torch.equal, *losses))
