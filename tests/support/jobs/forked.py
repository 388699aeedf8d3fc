"""Jobs of test_forked: child processes of a rank."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.testing import reference_step
from tests.support.forking import in_child
from tests.support.models import mixed_model

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 4


def children_of_a_rank(group: Any, schedule: str) -> dict[str, str]:
    """Use the pipeline in several ways in forked child processes. Return the error of each use.

    Checks that the losses of this rank are then still those of a plain loop.
    """
    optimizer = (lambda params: torch.optim.SGD(params, lr=0.1)) if schedule == "pipedream" else None
    options = {
        "loss_fn": functional.cross_entropy,
        "num_microbatches": 4,
        "seed": 5,
        "distributed": Distributed(timeout=20),
    }
    pipe = Pipeline(
        mixed_model(),
        X[:4],
        mesh=DeviceMesh.from_group(group, "cpu"),
        schedule=schedule,
        optimizer=optimizer,
        **options,
    )
    with pipe:
        losses = [pipe.step(X, target=Y)]
        found = {
            "step": in_child(lambda: pipe.step(X, target=Y)),
            "evaluate": in_child(lambda: pipe.evaluate(X, target=Y)),
            "gather": in_child(pipe.gather_model),
            "close": in_child(pipe.close),
            "leave": in_child(lambda: leave(pipe)),
            "drop": in_child(lambda: dropped(pipe)),
        }
        if group.rank() == 0 and schedule == "1f1b":
            found["loss"] = in_child(lambda: float(losses[0]))
        losses.append(pipe.step(X, target=Y))
        pipe.flush()
        if schedule == "1f1b":
            given = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5}
            expected = mixed_model()
            for step, loss in enumerate(losses):
                assert torch.equal(loss, reference_step(expected, X, target=Y, step=step, **given))
    return found


def leave(pipe: Pipeline) -> None:
    with pipe:
        raise KeyError("the child's own")


def dropped(pipe: Pipeline) -> None:
    pipe.__dict__.clear()
