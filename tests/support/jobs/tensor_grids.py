"""Jobs of the tests of pipelines whose layers are split in two and three dimensions."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
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
            num_microbatches=MICROBATCHES,
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
def looped(dtype: torch.dtype) -> Trained:
    """Train whole layers in a plain loop."""
    model = model_of(dtype)
    x, y = batch_of(dtype)
    optimizer = sgd(list(model.parameters()))
    losses, norms = [], []
    for number in range(STEPS):
        shape = {"num_microbatches": MICROBATCHES, "seed": SEED, "step": number}
        losses.append(float(reference_step(model, x, loss_fn=functional.mse_loss, target=y, **shape)))
        norms.append(float(clip_grad_norm_(list(model.parameters()), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: own.detach() for name, own in model.named_parameters()}, 0.0)
