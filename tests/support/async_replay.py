"""Helpers for tests of asynchronous schedules: a model, and a plain loop with the same delayed weights.

The loop keeps a list of weight versions for each stage and uses plain autograd, without Stage objects or orders.
"""

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline, schedules
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import Key, KeyedRandom
from tests.support.models import synchronous_names

ASYNCHRONOUS = [name for name in schedules.names() if name not in synchronous_names()]
VERTICAL = schedules.get("pipedream").with_options(vertical_sync=True)
KINDS = {"pipedream": "pipedream", "vertical sync": VERTICAL, "pipedream-2bw": "pipedream-2bw"}

#: (stage, micro-batch) -> the number of updates that the weights of its forward and backward have had
VersionRule = Callable[[int, int], int]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.005, momentum=0.9)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


SEED, ROWS, CUT = 5, 7, [2, 4]


def transformer(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)

    layers = [nn.Linear(6, 8), block(), nn.LayerNorm(8), nn.Dropout(dropout), block(), nn.Linear(8, 4)]
    layers[2].bias.requires_grad_(False)  # frozen
    return nn.Sequential(*layers)


class ScaledLoss(nn.Module):
    """A loss with a trainable weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output * self.scale, target)


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, 6, generator=generator), torch.randn(rows, 3, 4, generator=generator)


class Replay:
    """Trains a model one micro-batch after the other. ``rule`` chooses the weight version that each stage uses."""

    def __init__(
        self, model: nn.Sequential, loss_fn: nn.Module, optimizer: Callable, m: int, rule: VersionRule
    ) -> None:
        self.live, self.loss_live = model, loss_fn
        self.model, self.loss_fn = copy.deepcopy(model), copy.deepcopy(loss_fn)
        self.m, self.rule = m, rule
        ends = [0, *CUT, len(model)]
        names = [[f"{layer}." for layer in range(a, b)] for a, b in itertools.pairwise(ends)]
        every = [*model.named_parameters(), *((f"loss.{name}", p) for name, p in loss_fn.named_parameters())]
        names[-1].append("loss.")
        self.stages = [[(n, p) for n, p in every if n.startswith(tuple(own))] for own in names]
        self.optimizers = [optimizer([p for _, p in stage]) for stage in self.stages]
        self.versions = [[self.snapshot(stage)] for stage in self.stages]
        self.losses: list[Tensor] = []

    @staticmethod
    def snapshot(stage: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in stage}

    def shadow(self) -> dict[str, Tensor]:
        loss = {f"loss.{name}": p for name, p in self.loss_fn.named_parameters()}
        return {**dict(self.model.named_parameters()), **loss}

    def microbatch(self, number: int, x: Tensor, y: Tensor, factor: float) -> None:
        shadow = self.shadow()
        with torch.no_grad():
            for stage, versions in enumerate(self.versions):
                for name, value in versions[self.rule(stage, number)].items():
                    shadow[name].copy_(value)
        random = KeyedRandom(torch.device("cpu"))
        key = Key(SEED, *divmod(number, self.m))
        with Intercept(random):
            for name, layer in self.model.named_children():
                random.enter(key, name)
                x = layer(x)
            loss = self.loss_fn(x, y)
        (loss * factor).backward()
        self.losses.append(loss.detach())
        for name, live in itertools.chain.from_iterable(self.stages):
            grad, shadow[name].grad = shadow[name].grad, None
            if grad is not None:
                live.grad = grad if live.grad is None else live.grad + grad

    def update(self) -> None:
        for stage, optimizer, versions in zip(self.stages, self.optimizers, self.versions, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            versions.append(self.snapshot(stage))

    def step(self, step: int, x: Tensor, y: Tensor, updates_each: bool) -> None:
        for part, (one, other) in enumerate(zip(x.tensor_split(self.m), y.tensor_split(self.m), strict=True)):
            self.microbatch(step * self.m + part, one, other, 1.0 if updates_each else len(one) / len(x))
            if updates_each:
                self.update()
        if not updates_each:
            self.update()


def rule_of(kind: str, p: int, m: int) -> VersionRule:
    if kind == "pipedream-2bw":
        return lambda stage, number: max(0, number // m - 1)
    return lambda stage, number: max(0, number - (p - 1) + (0 if kind == "vertical sync" else stage))


def pipeline(model: nn.Sequential, kind: object, m: int, **options: object) -> Pipeline:
    choices: dict = {"loss_fn": functional.mse_loss, "optimizer": sgd, "boundaries": CUT, "seed": SEED, **options}
    return Pipeline(model, batch(0)[0][:2], devices=["cpu"] * 3, schedule=kind, num_microbatches=m, **choices)


LR = 0.01


class Times(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def factors(num_stages: int) -> nn.Sequential:
    return nn.Sequential(*(Times(1 + 0.25 * (stage + 1)) for stage in range(num_stages)))


def data(rows: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.rand(2, rows, 1, generator=generator, dtype=torch.float64)
    return x, y


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def f_grads(weights: list[Tensor], x: Tensor, y: Tensor, share: float = 1.0) -> list[Tensor]:
    """Return the gradient of ``share * mse(x * weights[0] * weights[1] * ..., y)`` for each weight."""
    leaves = [weight.clone().requires_grad_() for weight in weights]
    for leaf in leaves:
        x = x * leaf
    return list(torch.autograd.grad(mse(x, y) * share, leaves))


def trained(kind: object, p: int, m: int, steps: int, **options: object) -> list[Tensor]:
    model = factors(p)
    with Pipeline(
        model,
        data(1, 0)[0],
        loss_fn=mse,
        devices=["cpu"] * p,
        schedule=kind,
        num_microbatches=m,
        boundaries=list(range(1, p)),
        optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        **options,
    ) as pipe:
        for step in range(steps):
            x, y = data(m, step)
            pipe.step(x, target=y)
        pipe.flush()
    return [layer.weight.detach() for layer in model]


def weights_after(pipe: Pipeline, *rows: int) -> dict[str, Tensor]:
    for step, count in enumerate(rows):
        x, y = batch(step, count)
        pipe.step(x, target=y)
    return copy.deepcopy(pipe.state_dict())
