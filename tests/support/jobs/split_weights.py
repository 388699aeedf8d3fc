"""Jobs that train, save and load models whose weights the ranks of a tensor group divide."""



import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, with_master_weights
from pipesched.parallel.layer_styles import Column
from pipesched.saving.manifest import Manifest
from pipesched.testing import clip_grad_norm_, reference_step

WIDTH, WORDS, BLOCKS, MICROBATCHES, SEED = 16, 24, 4, 4, 11
CLIP = 0.4  # most steps have a larger norm
STYLES: dict[str, Any] = {
    "embed": "vocabulary",
    "blocks.*.mixed": Column(sections=3),
    "blocks.*.out": "row",
    "head": "column-gathered",
}


class Block(nn.Module):
    """Three projections in one weight, and a projection back."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(torch.tanh(q) * torch.sigmoid(k) + v))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may share a weight."""

    def __init__(self, *, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """The ranks, the model and the options of a run."""

    #: The numbers of replicas, ranks of a pipeline, and planes. None: one process.
    dims: tuple[int, int, int] | None
    tied: bool = True
    frozen: bool = False  # whether the embedding is frozen
    dropout: float = 0.1
    zero: int = 0
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float64
    own_optimizer: bool = True  # whether the pipeline has optimizer=

    @property
    def num_ranks(self) -> int:
        dp, pp, tp = self.dims or (1, 1, 1)
        return dp * pp * tp

    def model(self, seed: int = 0) -> Net:
        torch.manual_seed(seed)
        model = Net(tied=self.tied, dropout=self.dropout).to(self.dtype)
        model.embed.weight.requires_grad_(not self.frozen)
        return model


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = 16, 5
    return torch.randint(WORDS, shape, generator=generator), torch.randint(WORDS, shape, generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


_MESHES: dict[tuple[int, int, int], DeviceMesh] = {}


def mesh_of(dims: tuple[int, int, int]) -> DeviceMesh:
    if dims not in _MESHES:
        names = ("dp", "pp", "tp") if dims[2] > 1 else ("dp", "pp")
        members = torch.arange(dims[0] * dims[1] * dims[2]).view(dims if dims[2] > 1 else dims[:2])
        _MESHES[dims] = DeviceMesh("cpu", members, mesh_dim_names=names)
    return _MESHES[dims]


def made(case: Case, model: Any, *, optimizer: Any = adam, **options: Any) -> Pipeline:
    where: dict[str, Any] = {"devices": ["cpu"] * 2}
    if case.dims is not None:
        styles = options.pop("styles", STYLES) if case.dims[2] > 1 else None
        if styles is STYLES and not case.tied:
            styles = STYLES | {"head": "column-gathered"}
        where = {
            "mesh": mesh_of(case.dims),
            "distributed": Distributed(timeout=60, zero=case.zero, tensor_parallel=styles),
        }
    num_replicas, num_ranks = (1, 2) if case.dims is None else case.dims[:2]
    layers = ["embed", *(f"blocks.{at}" for at in range(BLOCKS)), "norm", "head"]
    numerics = options.pop("numerics", Numerics(clip_grad_norm=CLIP if case.own_optimizer else None))
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(
            model,
            batch(0)[0][:2],
            loss_fn=loss_of,
            schedule=case.schedule,
            num_microbatches=MICROBATCHES // num_replicas,
            boundaries=[layers[len(layers) * rank // num_ranks] for rank in range(1, num_ranks)],
            optimizer=optimizer if case.own_optimizer else None,
            numerics=numerics,
            seed=SEED,
            **where,
            **options,
        )


class Run:
    """A pipeline with its optimizer."""

    def __init__(self, case: Case, model: Any, **options: Any) -> None:
        self.case = case
        self.pipe = made(case, model, **options)
        self.optimizer = None if case.own_optimizer else adam(self.pipe.parameters())
        self.norms: list[float] = []

    @property
    def states(self) -> dict[str, Any]:
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def train(self, steps: range) -> list[float]:
        losses = []
        dims = self.case.dims or (1, 1, 1)
        replica = 0 if dims[0] == 1 else mesh_of(dims).get_local_rank("dp")
        for step in steps:
            x, y = (rows.chunk(dims[0])[replica] for rows in batch(step))
            losses.append(float(self.pipe.step(x, target=y)))
            if self.optimizer is not None:
                self.norms.append(float(self.pipe.clip_grad_norm_(CLIP)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                self.norms.append(float(self.pipe.grad_norm))
        return losses


def first_half(
    group: Any, case: Case, path: str, steps: int = 3, **options: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train, save, and return the losses, the norms and the whole weights."""
    run = Run(case, case.model())
    with run.pipe as pipe:
        losses = run.train(range(steps))
        pipe.save(path, **run.states, **options)
        return losses, run.norms, cloned(pipe.full_state_dict())


def second_half(
    group: Any, case: Case, path: str, steps: int = 3
) -> tuple[list[float], list[float], dict[str, Tensor], list[str]]:
    """Load into a model with other weights, train on, and return the losses, the norms, the weights and warnings."""
    run = Run(case, case.model(seed=7))
    with run.pipe as pipe, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restored = pipe.load(path, **run.states)
        assert restored.step == steps
        losses = run.train(range(steps, 2 * steps))
        return losses, run.norms, cloned(pipe.full_state_dict()), [str(one.message) for one in said]


def loop(case: Case, steps: range, model: nn.Module, optimizer: Any) -> tuple[list[float], list[float]]:
    """Train in plain PyTorch, and return the losses and the norms."""
    losses, norms = [], []
    num_replicas = (case.dims or (1, 1, 1))[0]
    for step in steps:
        x, y = batch(step)
        options: dict[str, Any] = {"num_microbatches": MICROBATCHES // num_replicas, "num_replicas": num_replicas}
        losses.append(float(reference_step(model, x, target=y, loss_fn=loss_of, seed=SEED, step=step, **options)))
        norms.append(float(clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def cloned(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def files_of(path: str) -> dict[str, str]:
    """Return the digests of the data files of a checkpoint."""
    manifest = Manifest.read(Path(path))
    return {name: entry.sha256 for name, entry in manifest.files.items()}


def said(call: Callable[[], Any]) -> str:
    """Return the error of a call as text; "" without an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saved_again(group: Any, case: Case, path: str, other: str, asynchronous: bool) -> None:
    """Load a checkpoint, and save the run again without a step."""
    run = Run(case, case.model(seed=7))
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        pipe.load(path)
        pipe.save(other, asynchronous=asynchronous)


def masters_saved(group: Any, case: Case, path: str, other: str) -> None:
    """Train with float32 copies of bfloat16 weights, or load a run, and save."""
    run = Run(case, case.model(), optimizer=lambda parameters: with_master_weights(adam(parameters)))
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        if path:
            pipe.load(path)
        else:
            run.train(range(2))
        pipe.save(other)
