"""Jobs of the tests of pipelines whose layers are split in two and three dimensions."""

import os
import signal
import subprocess
import time
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline
from pipesched.errors import ExecutionError
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.program.actions import Kind
from pipesched.simulation.tensor_layout import TensorLayout
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
    said,
    sgd,
)
from tests.support.rank_processes import mesh_of

MICROBATCHES = 4
GRID = {"0": "begin", "*.norm": "norm", **SPLIT, "5": "end"}


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), *(Block() for _ in range(4)), nn.Identity()).to(dtype)


def pipeline(shape: tuple[int, int, int], layout: str, schedule: str, dtype: torch.dtype, **options: Any) -> Pipeline:
    mesh = mesh_of(shape, ("dp", "pp", "tp"))
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


class Seen(NamedTuple):
    """What a rank saw of a fault: the error, and after how many seconds."""

    error: str
    seconds: float


def with_a_fault(group: Any, layout: str, shape: tuple[int, int, int], fault: str, collective: str) -> Seen:
    """Run two steps. In the second, the last rank has a fault inside a collective of a layer."""
    dtype = torch.float32
    x, y = batch_of(dtype)
    faulty = distributed.get_rank() == distributed.get_world_size() - 1
    with pipeline(shape, layout, "zb-h1", dtype, distributed={"timeout": 5}) as pipe:
        pipe.step(x, target=y)
        own = getattr(TensorGroup, collective)
        if faulty:
            setattr(TensorGroup, collective, _faulty(own, fault))
        begin_s = time.monotonic()
        try:
            pipe.step(x, target=y)
        except (ExecutionError, ValueError) as error:
            return Seen(str(error), time.monotonic() - begin_s)
        finally:
            setattr(TensorGroup, collective, own)
        return Seen("", time.monotonic() - begin_s)


def _faulty(own: Any, fault: str) -> Any:
    def collective(group: TensorGroup, *args: Any) -> Any:
        if fault == "raise":
            raise ValueError("a fault of the test")
        if fault == "exit":
            os._exit(0)
        if fault == "freeze":
            subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {os.getpid()}"])  # so that the test can go on
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "hang":
            time.sleep(12)
        if not late:  # once
            late.append(True)
            time.sleep(1)
        return own(group, *args)

    late: list[bool] = []
    return collective


def refused(group: Any) -> dict[str, str]:
    """Return the errors of options that a grid does not allow."""
    edges = {"0": "begin", "5": "end"}
    options: dict[str, dict[str, Any]] = {
        "ranks": {"tensor_layout": "3d"},
        "size": {"tensor_layout": TensorLayout(kind="2d", shape=(3, 3))},
        "auto": {"tensor_parallel": "auto"},
        "word": {"tensor_layout": "4d"},
        "gathered": {"tensor_parallel": {**edges, "*.norm": "norm", "*.up": "column-gathered"}},
        "a norm without a style": {"tensor_parallel": {**edges, **SPLIT}},
        "no norm": {"tensor_parallel": {**edges, **SPLIT, "*.inner": "norm"}},
        "edge": {"tensor_parallel": {**SPLIT, "*.norm": "begin"}},
    }
    return {
        name: said(lambda own=own: pipeline((1, 1, 4), "2d", "1f1b", torch.float32, distributed=own))
        for name, own in options.items()
    }
