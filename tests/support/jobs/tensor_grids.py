"""Jobs of the tests of pipelines whose layers are split in two and three dimensions."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline
from pipesched.program.actions import Kind
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.jobs.tensor_parallel import (
    ROWS,
    SEED,
    SPLIT,
    STEPS,
    Block,
    Trained,
    _median_s,
    batch_of,
    sgd,
)

MICROBATCHES = 4
GRID = {"0": "begin", "*.norm": "norm", **SPLIT, "5": "end"}


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), *(Block() for _ in range(4)), nn.Identity()).to(dtype)


def pipeline(shape: tuple[int, int, int], layout: str, schedule: str, dtype: torch.dtype, **options: Any) -> Pipeline:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
    x, _ = batch_of(dtype)
    given = {"timeout": 20, "tensor_parallel": GRID, "tensor_layout": layout} | options.pop("distributed", {})
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(
            model_of(dtype),
            x[: ROWS // MICROBATCHES],
            loss_fn=functional.mse_loss,
            mesh=mesh,
            schedule=schedule,
            num_microbatches=MICROBATCHES // shape[0],
            seed=SEED,
            optimizer=sgd,
            numerics=Numerics(clip_grad_norm=0.5),
            distributed=Distributed(**given),
            **options,
        )


def trained(group: Any, *options: Any) -> Trained:
    """Train, and return the whole weights."""
    dtype = options[-1]
    x, y = batch_of(dtype)
    with pipeline(*options) as pipe:
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(float(pipe.step(x, target=y)))
            norms.append(float(pipe.grad_norm))
        inputs_s, weights_s = (_median_s(pipe.trace, kind) for kind in (Kind.I, Kind.W))
        weights = {name: own.clone() for name, own in pipe.full_state_dict().items()}
    return Trained(losses, norms, weights, weights_s / (inputs_s + weights_s) if weights_s else 0.0)


@cache
def looped(dtype: torch.dtype, replicas: int = 1) -> Trained:
    """Train whole layers in a plain loop."""
    model = model_of(dtype)
    x, y = batch_of(dtype)
    optimizer = sgd(list(model.parameters()))
    losses, norms = [], []
    for number in range(STEPS):
        count = MICROBATCHES // replicas
        shape = {"num_microbatches": count, "num_replicas": replicas, "seed": SEED, "step": number}
        losses.append(float(reference_step(model, x, loss_fn=functional.mse_loss, target=y, **shape)))
        norms.append(float(clip_grad_norm_(list(model.parameters()), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: own.detach() for name, own in model.named_parameters()}, 0.0)


def saved(group: Any, path: str, *options: Any) -> float:
    """Train for a step, save, and return the loss of the next step."""
    dtype = options[-1]
    x, y = batch_of(dtype)
    with pipeline(*options) as pipe:
        pipe.step(x, target=y)
        pipe.save(path)
        return float(pipe.step(x, target=y))


def loaded(group: Any, path: str, *options: Any) -> tuple[float, dict[str, Tensor]]:
    """Load, and return the loss of the next step, and the whole weights after it."""
    dtype = options[-1]
    x, y = batch_of(dtype)
    with warnings.catch_warnings(action="ignore"), pipeline(*options) as pipe:
        pipe.load(path)
        return float(pipe.step(x, target=y)), {name: own.clone() for name, own in pipe.full_state_dict().items()}


def loaded_plain(path: str, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Load into a pipeline of whole layers in this process, and return what `loaded` returns."""
    x, y = batch_of(dtype)
    with (
        warnings.catch_warnings(action="ignore"),
        Pipeline(
            model_of(dtype),
            x[: ROWS // MICROBATCHES],
            loss_fn=functional.mse_loss,
            devices=["cpu"] * 2,
            num_microbatches=MICROBATCHES,
            seed=SEED,
            optimizer=sgd,
            numerics=Numerics(clip_grad_norm=0.5),
        ) as pipe,
    ):
        pipe.load(path)
        return float(pipe.step(x, target=y)), dict(pipe.model.state_dict())


def of_replicas(group: Any, path: str, zero: int, dtype: torch.dtype) -> tuple[Trained, float]:
    """Train two replicas of a grid, and return the last loss once more, after loading what was saved before it."""
    half = distributed.get_rank() // 4 * ROWS // 2
    x, y = (part[half : half + ROWS // 2] for part in batch_of(dtype))
    with pipeline((2, 1, 4), "2d", "1f1b", dtype, distributed={"zero": zero}) as pipe:
        losses, norms = [], []
        for number in range(STEPS):
            if number == STEPS - 1:
                pipe.save(path)
            losses.append(float(pipe.step(x, target=y)))
            norms.append(float(pipe.grad_norm))
        weights = {name: own.clone() for name, own in pipe.full_state_dict().items()}
        pipe.load(path)
        return Trained(losses, norms, weights, 0.0), float(pipe.step(x, target=y))
