"""Runs that stop after half of their steps and continue under another plan, and the run that never stopped."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipesched import Numerics, Pipeline, schedules
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.places import Group, place

STEPS, HALF, MICROBATCHES, SEED, WIDTH, BLOCKS = 20, 10, 4, 11, 8, 8
CLIP = 0.4  # most steps have a larger norm
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v", "zb-h1")
CHECKPOINTS = ("never", "always", "by layer")


class Block(nn.Module):
    """A block with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.inner(x))))


class Net(nn.Module):
    """Blocks between two layers that share their weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True)
class Half:
    """How one half of a run is planned."""

    ranks: int = 2
    schedule: str = "1f1b"
    #: "process" or "mesh".
    place: str = "process"
    #: Who makes the optimizer: the "user" or the "pipeline".
    optimizer: str = "user"
    checkpoint: str = "never"


FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4),
    "schedule": SCHEDULES,
    "place": ("process", "mesh"),
    "optimizer": ("user", "pipeline"),
    "checkpoint": CHECKPOINTS,
}


def pairwise_cases() -> list[tuple[Half, Half]]:
    """Cases in which every pair of values of two factors, before and after, occurs at least once."""
    columns = [(half, name) for half in (0, 1) for name in FACTORS]
    values = [FACTORS[name] for _, name in columns]
    wanted = {
        (one, first, other, second)
        for one, other in combinations(range(len(columns)), 2)
        for first, second in product(values[one], values[other])
    }
    cases = []
    while wanted:
        row: list[Any] = [None] * len(columns)
        one, first, other, second = min(wanted, key=repr)
        row[one], row[other] = first, second
        for at, choices in enumerate(values):
            if row[at] is None:
                row[at] = max(choices, key=lambda value, at=at: _gain(row, at, value, wanted))
        wanted -= {(a, row[a], b, row[b]) for a, b in combinations(range(len(columns)), 2)}
        names = list(FACTORS)
        cases.append((Half(**dict(zip(names, row[:5], strict=True))), Half(**dict(zip(names, row[5:], strict=True)))))
    return cases


def _gain(row: list[Any], at: int, value: Any, wanted: set[Any]) -> int:
    """The number of wanted pairs that a value adds to a row, where open entries count as all values."""
    return sum(
        (one == at and first == value and row[other] in (None, second))
        or (other == at and second == value and row[one] in (None, first))
        for one, first, other, second in wanted
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(12, WIDTH, generator=generator), torch.randn(12, WIDTH, generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def pipeline(group: Group, half: Half, model: nn.Module, seed: int = SEED) -> Pipeline:
    """A pipeline of the model, cut evenly."""
    num_stages = half.ranks * schedules.get(half.schedule).chunks_per_rank
    layers = ["first", *(f"blocks.{index}" for index in range(BLOCKS)), "last"]
    by_layer = {"blocks.1": "recompute", "blocks.4": "recompute-cheap", "blocks.6": "recompute"}
    return Pipeline(
        model,
        batch(0)[0][:3],
        loss_fn=functional.mse_loss,
        schedule=half.schedule,
        num_microbatches=MICROBATCHES,
        boundaries=[layers[len(layers) * stage // num_stages] for stage in range(1, num_stages)],
        checkpoint=by_layer if half.checkpoint == "by layer" else half.checkpoint,
        optimizer=adam if half.optimizer == "pipeline" else None,
        numerics=Numerics(clip_grad_norm=CLIP) if half.optimizer == "pipeline" else None,
        seed=seed,
        **place(group),
    )


class Trainer:
    """A pipeline with its optimizer and its learning rate schedulers."""

    def __init__(self, group: Group, half: Half, model: nn.Module, seed: int = SEED) -> None:
        self.pipe = pipeline(group, half, model, seed)
        self.states: dict[str, Any] = {}
        self.optimizers = list(self.pipe.optimizers.values())
        if half.optimizer == "user":
            self.optimizers = [adam(self.pipe.parameters())]
            self.states = {"optimizer": self.optimizers[0]}
        self.schedulers = [CosineAnnealingLR(optimizer, STEPS) for optimizer in self.optimizers]
        self.states["scheduler"] = self.schedulers[0] if half.optimizer == "user" else self.schedulers
        self.half = half

    def train(self, steps: range) -> list[Tensor]:
        """Train; return the losses."""
        losses = []
        for step in steps:
            x, y = batch(step)
            losses.append(self.pipe.step(x, target=y).clone())
            if self.half.optimizer == "user":
                self.pipe.clip_grad_norm_(CLIP)
                self.optimizers[0].step()
                self.optimizers[0].zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()
        return losses

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, buffers and optimizer states of this process, by name."""
        names = {parameter: name for name, parameter in self.pipe.named_parameters()}
        yield from ((name, parameter.detach()) for parameter, name in names.items())
        yield from self.pipe.named_buffers()
        yield from named_states(self.optimizers, names)


def named_states(optimizers: list[Any], names: dict[Any, str]) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names:
                    yield f"{names[parameter]}: lr", torch.tensor(group["lr"], dtype=torch.float64)
                    for key, value in optimizer.state[parameter].items():
                        yield f"{names[parameter]}: {key}", value


def first_half(group: Group, half: Half, path: str, **options: Any) -> list[Tensor]:
    """Train half of the steps and save."""
    trainer = Trainer(group, half, Net())
    with trainer.pipe:
        losses = trainer.train(range(HALF))
        trainer.pipe.save(path, **trainer.states, **options)
    return losses


def second_half(group: Group, half: Half, path: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Load into a model with other weights and train the other half of the steps; return losses and tensors."""
    trainer = Trainer(group, half, Net(seed=7), seed=99)
    with trainer.pipe as pipe:
        restored = pipe.load(path, **trainer.states)
        assert restored.step == HALF
        losses = trainer.train(range(restored.step, STEPS))
        return losses, {name: tensor.clone() for name, tensor in trainer.tensors()}


def never_stopped() -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses and tensors of a plain loop over all steps."""
    model = Net()
    optimizer = adam(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        losses.append(
            reference_step(
                model, x, target=y, loss_fn=functional.mse_loss, num_microbatches=MICROBATCHES, seed=SEED, step=step
            )
        )
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, {name: value.detach() for name, value in (*tensors.items(), *named_states([optimizer], names))}


def differences(run: Any, before: Half, after: Half, path: str, expected: Any) -> list[str]:
    """Where a run that stopped differs from the one that never stopped; ``run(half, job, *args)`` runs a job."""
    losses, tensors = expected
    first = run(before, first_half, path)
    second = run(after, second_half, path)
    found: dict[str, Tensor] = {}
    different = []
    for own, _ in second:
        different += [f"loss {HALF + at}" for at, (a, b) in enumerate(zip(own, losses[HALF:])) if not torch.equal(a, b)]
    for own in first:
        different += [f"loss {at}" for at, (a, b) in enumerate(zip(own, losses)) if not torch.equal(a, b)]
    for _, own in second:
        found |= own
    different += list({*found} ^ {*tensors})
    same = {*found} & {*tensors}
    return different + [name for name in same if not torch.equal(found[name], tensors[name])]
