"""Jobs of the tests of tensor parallelism: they train split layers, and compare with whole layers in a plain loop."""

import copy
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline
from pipesched.program.actions import Kind
from pipesched.testing import clip_grad_norm_, reference_step

SEED, ROWS, LENGTH, STEPS, WIDTH = 3, 32, 16, 3, 96  # so large that the W of a linear layer pays
SPLIT = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    """Two linear layers with a dropout between them, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(functional.gelu(self.up(self.norm(x))))))


class Case(NamedTuple):
    """The options of a training run, on a mesh of (dp, pp, tp) ranks."""

    mesh: tuple[int, int, int] = (1, 2, 2)
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    inputs: str = "all"
    zero: int = 0
    clip: float | None = 0.5

    @property
    def num_microbatches(self) -> int:
        return 8 // self.mesh[0]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))).to(dtype)


def batch_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return x, y


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline(case: Case, **options: Any) -> Pipeline:
    mesh = mesh_of(case.mesh)
    x, _ = batch_of(case.dtype)
    given = {"timeout": 20, "inputs": case.inputs, "zero": case.zero, "tensor_parallel": SPLIT}
    named: dict[str, Any] = {
        "loss_fn": functional.mse_loss,
        "schedule": case.schedule,
        "num_microbatches": case.num_microbatches,
        "seed": SEED,
        "optimizer": sgd,
        "numerics": Numerics(clip_grad_norm=case.clip),
        "distributed": Distributed(**given | options.pop("distributed", {})),
    }
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(options.pop("model", None) or model_of(case.dtype), x[:2], mesh=mesh, **named | options)


def step(pipe: Pipeline, case: Case, **wanted: Any) -> Any:
    """Run a step of this rank's replica."""
    x, y = batch_of(case.dtype)
    if case.inputs == "first":
        return pipe.step(**wanted) if distributed.get_rank() else pipe.step(x, target=y, **wanted)
    replica, replicas = distributed.get_rank() // (case.mesh[1] * case.mesh[2]), case.mesh[0]
    own = slice(ROWS * replica // replicas, ROWS * (replica + 1) // replicas)
    return pipe.step(x[own], target=y[own], **wanted)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float | None]
    #: This rank's blocks of the weights of its stages, or with zero=3 the whole weights, by their names.
    weights: dict[str, Tensor]
    #: W / (I + W) of this rank's actions in seconds; 0 if there is no W.
    share: float


def trained(group: Any, case: Case) -> Trained:
    with pipeline(case) as pipe:
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(float(step(pipe, case)))
            norms.append(None if pipe.grad_norm is None else float(pipe.grad_norm))
        spans = list(pipe.trace.spans)
        took = {kind: sum(s.end_s - s.start_s for s in spans if s.action.kind is kind) for kind in (Kind.I, Kind.W)}
        if case.zero == 3:
            pipe.gather_model()
        weights = {name: own.detach().clone() for name, own in pipe.named_parameters()}
        return Trained(losses, norms, weights, took[Kind.W] / sum(took.values()) if took[Kind.W] else 0.0)


@cache
def looped(dtype: torch.dtype, replicas: int, clip: float | None) -> Trained:
    """Train whole layers in a plain loop."""
    model = model_of(dtype)
    x, y = batch_of(dtype)
    optimizer = sgd(list(model.parameters()))
    losses, norms = [], []
    for number in range(STEPS):
        shape = {"num_microbatches": 8 // replicas, "num_replicas": replicas, "seed": SEED, "step": number}
        losses.append(float(reference_step(model, x, loss_fn=functional.mse_loss, target=y, **shape)))
        norms.append(None if clip is None else float(clip_grad_norm_(list(model.parameters()), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: own.detach() for name, own in model.named_parameters()}, 0.0)


def block_of(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the block of a weight that a tensor rank holds; the whole weight if ``size`` is 1."""
    if ".up." in name:
        return whole.chunk(size)[rank]
    return whole.chunk(size, 1)[rank] if name.endswith("down.weight") else whole


def differences(case: Case, results: list[Trained]) -> dict[str, float]:
    """Return the largest relative differences from the plain loop: of losses, norms and weights."""
    due = looped(case.dtype, case.mesh[0], case.clip)
    size = 1 if case.zero == 3 else case.mesh[2]
    weights = [
        (own - (whole := block_of(name, due.weights[name], rank % size, size))).abs().max() / whole.abs().max()
        for rank, one in enumerate(results)
        for name, own in one.weights.items()
    ]
    return {
        "losses": max(_differences([one.losses for one in results], due.losses)),
        "norms": max(_differences([one.norms for one in results], due.norms), default=0.0),
        "weights": float(max(weights)),
    }


def _differences(found: list[list[Any]], due: list[Any]) -> list[float]:
    return [abs(a - b) / abs(b) for own in found for a, b in zip(own, due, strict=True) if b is not None]
