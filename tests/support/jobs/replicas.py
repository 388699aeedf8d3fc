"""What the ranks of the tests of replicas run: training in replicas, which the plain loop over all parts repeats."""

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline
from pipesched.testing import clip_grad_norm_, reference_step

ROWS, MICROBATCHES, STEPS, SEED = 16, 8, 2, 3  # rows and micro-batches of all replicas
VOCABULARY = 11
#: The parameters and buffers of a model: the value, and the gradient if there is one.
State = dict[str, tuple[Tensor, Tensor | None]]


class TiedModel(nn.Module):
    """An embedding whose weight is the head's, with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = nn.LayerNorm(16)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.dropout(torch.relu(self.first(self.embedding(tokens))))
        hidden = self.last(torch.tanh(self.third(hidden)))
        return self.head(self.norm(torch.relu(self.second(hidden))))


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(16, 4))


def tied_model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


def plain_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)


def tied_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, of which the replicas have unequal numbers."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[:5] = labels[9] = -100
    return torch.randint(0, VOCABULARY, (ROWS,), generator=generator), labels


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[[], Any]]] = {
    "plain": (plain_model, plain_batch, lambda: functional.mse_loss),
    "tied": (tied_model, tied_batch, nn.CrossEntropyLoss),
}
#: Of four ranks: (replicas, ranks of a pipeline).
MESHES = (2, 2), (4, 1), (1, 4)
SCHEDULES = "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", "chimera"


class Case(NamedTuple):
    """A way to train. The optimizer of ``updates`` is the pipeline's, and clips; otherwise gradients accumulate."""

    model: str
    mesh: tuple[int, int]
    schedule: str
    updates: bool
    inputs: Literal["all", "first"]

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh))
        return f"{self.model} {size} {self.schedule} {'optimizer' if self.updates else 'gradients'} {self.inputs}"


def cases() -> list[Case]:
    every = map(Case._make, product(MODELS, MESHES, SCHEDULES, (False, True), ("all", "first")))
    return [case for case in every if case.schedule != "chimera" or not (case.updates or case.mesh[1] == 1)]


class Trained(NamedTuple):
    losses: list[float]
    state: State
    num_reductions: int = 0


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] = ("dp", "pp")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def state_of(model: Any) -> State:
    named = {name: (p.detach().clone(), None if p.grad is None else p.grad.clone()) for name, p in named_of(model)}
    return {**named, **{name: (buffer.clone(), None) for name, buffer in model.named_buffers()}}


def named_of(model: Any) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def pipeline(mesh: DeviceMesh, model: nn.Module, sample: Any, **options: Any) -> Pipeline:
    distributed = options.pop("distributed", Distributed(timeout=20))
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(model, sample, mesh=mesh, seed=SEED, distributed=distributed, **options)


def trained(group: Any, case: Case) -> Trained:
    """Train the case's model in replicas, each on its own rows; rank 0 passes all rows if ``inputs`` is "first"."""
    make, make_batch, make_loss = MODELS[case.model]
    mesh = mesh_of(case.mesh)
    replicas = case.mesh[0]
    x, y = make_batch()
    pipe = pipeline(
        mesh,
        make(),
        x[:2],
        loss_fn=make_loss(),
        schedule=case.schedule,
        num_microbatches=MICROBATCHES // replicas,
        optimizer=sgd if case.updates else None,
        numerics=Numerics(batch_norm="mini-batch", clip_grad_norm=0.5 if case.updates else None),
        distributed=Distributed(inputs=case.inputs, timeout=20),
    )
    own = own_rows(mesh.get_local_rank("dp"), replicas)
    with pipe:
        losses = []
        for _ in range(STEPS):
            if case.inputs == "all":
                losses.append(float(pipe.step(x[own], target=y[own])))
            elif group.rank():
                losses.append(float(pipe.step()))
            else:
                losses.append(float(pipe.step(x, target=y)))
        reductions = sum(str(span.action.kind) == "REDUCE" for span in pipe.trace.spans)
        return Trained(losses, state_of(pipe), reductions)


def own_rows(replica: int, replicas: int) -> slice:
    return slice(ROWS * replica // replicas, ROWS * (replica + 1) // replicas)


@cache
def looped(name: str, replicas: int, updates: bool) -> Trained:
    """The same training in a plain loop over the micro-batches of all replicas."""
    make, make_batch, make_loss = MODELS[name]
    model = make()
    x, y = make_batch()
    optimizer = sgd(list(model.parameters()))
    losses = []
    for step in range(STEPS):
        shape = {"num_microbatches": MICROBATCHES // replicas, "num_replicas": replicas}
        options: dict[str, Any] = {**shape, "seed": SEED, "step": step, "batch_norm": "mini-batch"}
        losses.append(float(reference_step(model, x, loss_fn=make_loss(), target=y, **options)))
        if updates:
            clip_grad_norm_(list(model.parameters()), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, state_of(model))


def differing(case: Case, results: list[Trained]) -> list[str]:
    """The names of the values that differ from the loop's on any rank, or that no rank holds.

    Bits are compared, except for chimera, whose gradients are those of the loop within rounding.
    """
    expected = looped(case.model, case.mesh[0], case.updates)
    equal = close if case.schedule == "chimera" else same
    odd = ["the loss"] * any(own.losses != expected.losses for own in results)
    odd += sorted({name for own in results for name in own.state if not equal(own.state[name], expected.state[name])})
    return odd + sorted(expected.state.keys() - {name for own in results for name in own.state})


def same(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def close(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
