"""Jobs of the tests of reduction_order="tree"."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import Optimizer

from pipesched import Distributed, Numerics
from pipesched.testing import reference_step
from tests.support.added_losses import Experts
from tests.support.jobs.replicas import mesh_of, own_rows, pipeline, plain_batch, plain_model, said, sgd, small_model

MICROBATCHES, SEED, STEPS = 8, 3, 2
IN_TREE = Numerics(reduction_order="tree")


class Case(NamedTuple):
    """The options of a training run. dims: the numbers of replicas and of ranks per replica.

    If ``zero`` is None, steps make no updates and gradients accumulate.
    """

    dims: tuple[int, int]
    schedule: str
    zero: int | None = None
    inputs: Literal["all", "first"] = "all"


def momentum(parameters: list[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def looped(num_replicas: int = 1, *, updates: bool, order: Any = "tree") -> dict[str, Any]:
    """Train in a plain loop. Return the losses, and each parameter's value and gradient."""
    model = plain_model()
    x, y = plain_batch()
    optimizer = momentum(list(model.parameters()))
    losses = []
    for step in range(STEPS):
        options: dict[str, Any] = {"num_microbatches": MICROBATCHES // num_replicas, "num_replicas": num_replicas}
        options |= {"seed": SEED, "step": step, "reduction_order": order}
        losses.append(float(reference_step(model, x, target=y, loss_fn=functional.mse_loss, **options)))
        if updates:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, **state_of(model)}


def state_of(model: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    return {name: (parameter.detach(), parameter.grad) for name, parameter in model.named_parameters()}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple):
        return all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def differing(group: Any, cases: list[Case]) -> list[list[str]]:
    """Return, for each case, the names of this rank's values that differ from a plain loop without replicas."""
    expected = {updates: looped(updates=updates) for updates in (False, True)}
    return [_differing(group, case, expected[case.zero is not None]) for case in cases]


def _differing(group: Any, case: Case, expected: dict[str, Any]) -> list[str]:
    mesh = mesh_of(case.dims)
    x, y = plain_batch()
    own = own_rows(mesh.get_local_rank("dp"), case.dims[0])
    with pipeline(
        mesh,
        plain_model(),
        x[:2],
        loss_fn=functional.mse_loss,
        schedule=case.schedule,
        num_microbatches=MICROBATCHES // case.dims[0],
        optimizer=None if case.zero is None else momentum,
        numerics=IN_TREE,
        distributed=Distributed(timeout=20, zero=case.zero or 0, inputs=case.inputs),
    ) as pipe:
        if case.inputs == "all":
            losses = [float(pipe.step(x[own], target=y[own])) for _ in range(STEPS)]
        else:
            losses = [float(pipe.step() if group.rank() else pipe.step(x, target=y)) for _ in range(STEPS)]
        if case.zero == 3:
            pipe.gather_model()
        found = {"losses": losses, **state_of(pipe)}
        return [name for name, value in found.items() if not same(value, expected[name])]


def metrics(group: Any, dims: tuple[int, int]) -> dict[str, float]:
    """Return the loss and the metrics of a step whose layers add losses."""
    mesh = mesh_of(dims)
    x, y = plain_batch()
    own = own_rows(mesh.get_local_rank("dp"), dims[0])
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": MICROBATCHES // dims[0], "numerics": IN_TREE}
    with pipeline(mesh, small_model(Experts), x[:2], loss_fn=functional.mse_loss, **options) as pipe:
        loss = pipe.step(x[own], target=y[own], metrics=lambda outputs, target: {"error": (outputs - target).mean()})
        return {"loss": float(loss), **{name: float(value) for name, value in pipe.metrics.items()}}


def refused(group: Any) -> dict[str, str]:
    """Return the errors of pipelines whose gradients cannot be added as a tree over replicas."""
    mesh = mesh_of((2, 2))
    x, _ = plain_batch()
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "schedule": "1f1b"}
    clips = Numerics(reduction_order="tree", clip_grad_norm=1.0)

    def error(axes: dict[str, str] | None = None, **given: Any) -> str:
        here = mesh if axes is None else mesh_of((2, 2), ("fsdp", "pp"))
        return said(lambda: pipeline(here, plain_model(), x[:2], axes=axes, **options | {"numerics": IN_TREE} | given))

    def shard(module: nn.Module, stage: int) -> nn.Module:
        return fully_shard(module, mesh=mesh_of((2, 2), ("fsdp", "pp"))["fsdp"])

    return {
        "clipping": error(numerics=clips, optimizer=sgd, distributed=Distributed(timeout=20, zero=2)),
        "shards": error({"pipeline": "pp", "shard": "fsdp"}, wrap=shard),
    }
