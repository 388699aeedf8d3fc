"""Jobs of the tests of zero=: they train replicas that divide optimizer states, gradients or weights."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import Optimizer

from pipesched import Distributed, Numerics, Pipeline, with_master_weights
from pipesched.errors import PipeschedError
from pipesched.testing import MemoryMeter, clip_grad_norm_, reference_step
from tests.support import rank_processes

ROWS, MICROBATCHES, VOCABULARY, WIDTH = 16, 8, 96, 64


class Tied(nn.Module):
    """A model whose embedding and head share a weight, with dropout, a frozen layer, and a weight of 65 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.wide = nn.Linear(WIDTH, 65)
        self.drop = nn.Dropout(0.2)
        self.narrow = nn.Linear(65, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(self.embedding(x)))
        return self.head(self.frozen(self.narrow(self.drop(hidden))))


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def plain() -> nn.Module:
    """Return layers with enough rows for four replicas, and layers with too few."""
    torch.manual_seed(0)
    widths = [VOCABULARY, 256, 33, 128, 64]
    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, VOCABULARY)]
    for before, width in pairwise(widths):
        layers += [nn.Linear(before, width), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*layers)


def in_halves() -> nn.Module:
    return plain().bfloat16()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(60, (ROWS,), generator=generator)
    target[: 3 + step] = -100  # the replicas have unequal numbers of labels
    return torch.randint(VOCABULARY, (ROWS,), generator=generator), target


class Whole(torch.optim.AdamW):
    """An optimizer that uses the norm of each gradient, so replicas cannot update rows separately."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1)
        super().step()


def adamw(parameters: list[Any]) -> Optimizer:
    """Return an AdamW with two groups: parameters with several dimensions, and the others."""
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def fused(parameters: list[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def masters(parameters: list[Any]) -> Optimizer:
    return with_master_weights(torch.optim.AdamW(parameters, lr=0.01))


def momentum(parameters: list[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adafactor(parameters: list[Any]) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


def by_layer(parameters: list[Any]) -> Optimizer:
    return Whole(parameters, lr=0.01)


class Case(NamedTuple):
    """The options of a training run."""

    zero: int
    model: Callable[[], nn.Module]
    schedule: str
    optimizer: Callable[[list[Any]], Optimizer]
    clips: bool = False


def made(group: Any, dims: tuple[int, int], model: nn.Module, **options: Any) -> tuple[Pipeline, int]:
    """Return a pipeline over a mesh of replicas and ranks, and the number of this process's replica."""
    mesh = rank_processes.mesh_of(dims, ("dp", "pp"))
    chosen: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(),  # micro-batches are weighted by their number of labels
        "schedule": "1f1b",
        "num_microbatches": MICROBATCHES // dims[0],
        "seed": 3,
        **options,
    }
    sample = chosen.pop("sample", batch(0)[0][:2])
    return Pipeline(model, sample, mesh=mesh, **chosen), mesh.get_local_rank("dp")


def train(group: Any, dims: tuple[int, int], case: Case, steps: int) -> list[int]:
    """Train, and check that losses and weights are bit-identical to a plain loop.

    Returns the number of elements of the optimizer states on this rank, and the number in the plain loop.
    """
    warnings.simplefilter("ignore")
    num_replicas = dims[0]
    clip = 0.05 if case.clips else None
    pipe, replica = made(
        group,
        dims,
        case.model(),
        schedule=case.schedule,
        optimizer=case.optimizer,
        numerics=Numerics(clip_grad_norm=clip),
        distributed=Distributed(zero=case.zero, timeout=20),
    )
    model = case.model()
    optimizer = case.optimizer(list(model.parameters()))
    rows = ROWS // num_replicas
    cut = num_replicas if case.zero >= 2 and case.optimizer is not by_layer else 1
    with pipe:
        for step in range(steps):
            x, y = batch(step)
            own = slice(replica * rows, (replica + 1) * rows)
            loss = pipe.step(x[own], target=y[own])
            options: dict[str, Any] = {"seed": 3, "step": step, "num_replicas": num_replicas}
            options["num_microbatches"] = MICROBATCHES // num_replicas
            due = reference_step(model, x, loss_fn=nn.CrossEntropyLoss(), target=y, **options)
            assert torch.equal(loss, due), (case, step)
            if clip is not None:
                assert torch.equal(pipe.grad_norm, clip_grad_norm_(model.parameters(), clip, num_shards=cut)), case
            optimizer.step()
            optimizer.zero_grad()
        expected = model.state_dict()
        found = pipe.full_state_dict()
        assert found.keys() == expected.keys()
        differ = [name for name, one in found.items() if not torch.equal(one, expected[name])]
        assert not differ, (case, differ)
        assert all(one.grad is None for one in pipe.parameters()), case
        held = sum(_size(one) for one in pipe.optimizers.values())
    return [held, _size(optimizer)]


def _size(optimizer: Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() for value in tensors if value.dim())


class Held(NamedTuple):
    """The memory of a rank, in multiples of a layer's weight."""

    peak: float  #: the peak in a step
    states: float  #: the optimizer states
    weights: float  #: the weights held between steps


def measure(group: Any, dims: tuple[int, int], zero: int) -> Held:
    """Train four equal layers per rank, and measure the memory of the second step."""
    torch.manual_seed(0)
    count = 4 * dims[1]
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(count)])
    x, y = torch.randn(2, 4, 256)
    mesh = rank_processes.mesh_of(dims, ("dp", "pp"))
    pipe = Pipeline(
        model,
        x[:2],
        loss_fn=functional.mse_loss,
        mesh=mesh,
        schedule="1f1b",
        num_microbatches=1,
        boundaries=list(range(4, count, 4)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        distributed=Distributed(zero=zero, timeout=20),
    )
    weight = 256 * 256 * 4
    with pipe, MemoryMeter(pipe) as meter:
        pipe.step(x, target=y)
        meter.mark()
        pipe.step(x, target=y)
        (peak,) = meter.peak_bytes.values()
        states = sum(4 * _size(one) for one in pipe.optimizers.values())
        own = [parameter.untyped_storage().nbytes() for parameter in pipe.parameters()]
    return Held(peak / weight, states / weight, sum(own) / weight)


def overflow(group: Any, zero: int) -> None:
    """Check that no rank makes an update if the gradients of replica 1 have infinite values in rows of replica 0."""
    scaler = GradScaler("cpu", init_scale=8.0)
    pipe, replica = made(
        group,
        (2, 2),
        plain(),
        optimizer=momentum,
        numerics=Numerics(scaler=scaler),
        distributed=Distributed(zero=zero, timeout=20),
    )
    spoils = False

    def spoilt(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0] = torch.inf if spoils else grad[0]
        return grad

    for parameter in pipe.parameters():
        parameter.register_hook(spoilt)
    with pipe:
        for step in range(3):
            spoils = step == 1 and replica == 1
            before = {name: one.clone() for name, one in pipe.full_state_dict().items()}
            x, y = (one[replica * 8 : replica * 8 + 8] for one in batch(step))
            pipe.step(x, target=y)
            same = [torch.equal(one, before[name]) for name, one in pipe.full_state_dict().items()]
            assert any(same) == all(same) == (step == 1), step
        assert scaler.get_scale() == 4.0


class Partly(nn.Module):
    """A layer with a second linear layer, which is used only if an input value is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) if (x <= 0).all() else self.always(x) + self.sometimes(x)


def use_in_one_replica(group: Any, zero: int) -> None:
    """Check that a layer is updated if only one replica uses it, and that a parameter outside the optimizer is not."""
    torch.manual_seed(0)
    model = nn.Sequential(Partly(), nn.Linear(64, 64))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    left_out = model[1].bias
    x = torch.ones(8, 64)
    pipe, replica = made(
        group,
        (4, 1),
        model,
        sample=x[:2],
        whole_layers=["0"],
        loss_fn=functional.mse_loss,
        num_microbatches=1,
        optimizer=lambda params: torch.optim.SGD([one for one in params if one is not left_out], lr=0.1),
        distributed=Distributed(zero=zero, timeout=20),
    )
    with pipe:
        pipe.step(x if replica == 2 else -x, target=torch.zeros(8, 64))
        for name, one in pipe.full_state_dict().items():
            assert torch.equal(one, before[name]) == (name == "1.bias"), name
        for name, parameter in pipe.named_parameters():
            assert (parameter.grad is not None) == (parameter is left_out), name


def refuse(group: Any) -> None:
    """Check the errors of pipelines that do not support zero=."""
    with pytest.raises(PipeschedError, match=r"so it needs several replicas .* has 2 replicas and no optimizer="):
        made(group, (2, 2), plain(), distributed=Distributed(zero=1))
    with pytest.raises(PipeschedError, match="has 1 replica and an optimizer"):
        made(group, (1, 4), plain(), optimizer=momentum, distributed=Distributed(zero=2))

    def flat(parameters: list[Any]) -> Optimizer:
        optimizer = momentum(parameters)
        for parameter in parameters:
            optimizer.state[parameter]["flat"] = torch.zeros(parameter.numel())
        return optimizer

    with pytest.raises(PipeschedError, match="state 'flat' of SGD has shape"):
        made(group, (2, 2), plain(), optimizer=flat, distributed=Distributed(zero=1), boundaries=[4])
