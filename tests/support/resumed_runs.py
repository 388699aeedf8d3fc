"""Runs that stop halfway and resume under another plan, and the same runs without a stop."""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipesched import Distributed, Numerics, Pipeline, schedules
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.places import Group, mesh_of, place, run_here
from tests.support.rank_processes import Ranks

STEPS, HALF, MICROBATCHES, SEED, WIDTH, BLOCKS = 20, 10, 4, 11, 16, 8
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
    """Blocks between two layers that share a weight."""

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
    """The options of one half of a run."""

    ranks: int = 2
    schedule: str = "1f1b"
    #: "process" (one process for all ranks) or "mesh" (one process per rank).
    place: str = "process"
    #: "user" (the test calls an optimizer) or "pipeline" (``optimizer=``).
    optimizer: str = "user"
    checkpoint: str = "never"
    #: The number of replicas; above 1 only with "mesh". ``ranks`` counts the ranks of one replica.
    replicas: int = 1
    zero: int = 0

    @property
    def sums(self) -> tuple[int, int]:
        """The number of replicas, and the number of shards of a gradient: both determine the rounding of sums."""
        return self.replicas, self.replicas if self.zero >= 2 else 1


FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4),
    "schedule": SCHEDULES,
    "place": ("process", "mesh"),
    "optimizer": ("user", "pipeline"),
    "checkpoint": CHECKPOINTS,
}


def pairwise_cases() -> list[tuple[Half, Half]]:
    """Return cases that together contain every pair of values of any two factors.

    The factors before the stop and those after it count as different factors.
    """
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
    """Return how many wanted pairs have ``value`` at position ``at`` and fit the row. None fits any value."""
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


def replica_cases() -> list[tuple[Half, Half]]:
    """Return cases that begin or end with replicas, or both."""
    two, four = Half(2, place="mesh", replicas=2), Half(1, place="mesh", replicas=4)
    return [
        (two, Half(2, "zb-h1", "mesh", "pipeline", replicas=2)),
        (Half(2, "zb-v", "mesh", "pipeline", "by layer", replicas=2), Half(1, place="mesh", replicas=2)),
        (Half(1, "1f1b", "mesh", "pipeline", "always", replicas=2), replace(two, schedule="interleaved-1f1b")),
        (two, Half(4, place="mesh")),
        (Half(4, "zb-h1", "mesh", "pipeline"), two),
        (two, four),
        (replace(four, optimizer="pipeline"), two),
        (two, Half(1)),
        (Half(2, "interleaved-1f1b"), two),
        (four, Half(2, "zb-v")),
    ]


def zero_cases() -> list[tuple[Half, Half]]:
    """Return all pairs of halves, before and after the stop, in which at least one half has ``zero=`` above 0."""
    schedule = {0: "1f1b", 1: "zb-h1", 2: "interleaved-1f1b", 3: "zb-v"}
    shapes = ((2, 2), (4, 1))
    levels = [Half(ranks, schedule[z], "mesh", "pipeline", replicas=n, zero=z) for n, ranks in shapes for z in schedule]
    halves = [*levels, Half(4, "zb-v", "mesh", "pipeline"), Half(2, "1f1b", optimizer="pipeline")]
    return [(before, after) for before, after in product(halves, halves) if before.zero + after.zero]


def pipeline(
    group: Group, half: Half, model: nn.Module, seed: int = SEED, batch_norm: BatchNormMode = "micro-batch"
) -> Pipeline:
    """Return a pipeline of the model with the layers divided evenly."""
    where = place(group)
    if half.replicas > 1:
        where["mesh"] = mesh_of(half.replicas, half.ranks)
        where["distributed"] = Distributed(timeout=600, zero=half.zero)
    num_stages = half.ranks * schedules.get(half.schedule).chunks_per_rank
    layers = ["first", *(f"blocks.{index}" for index in range(BLOCKS)), "last"]
    by_layer = {"blocks.1": "recompute", "blocks.4": "recompute-cheap", "blocks.6": "recompute"}
    return Pipeline(
        model,
        batch(0)[0][:3],
        loss_fn=functional.mse_loss,
        schedule=half.schedule,
        num_microbatches=MICROBATCHES // half.replicas,
        boundaries=[layers[len(layers) * stage // num_stages] for stage in range(1, num_stages)],
        checkpoint=by_layer if half.checkpoint == "by layer" else half.checkpoint,
        optimizer=adam if half.optimizer == "pipeline" else None,
        numerics=Numerics(batch_norm=batch_norm, clip_grad_norm=CLIP if half.optimizer == "pipeline" else None),
        seed=seed,
        **where,
    )


class Trainer:
    """A pipeline with its optimizer and its learning-rate schedulers."""

    def __init__(
        self, group: Group, half: Half, model: nn.Module, seed: int = SEED, *, replicated: bool = False
    ) -> None:
        self.pipe = pipeline(group, half, model, seed, "mini-batch" if replicated else "micro-batch")
        self.replica = 0 if half.replicas == 1 else mesh_of(half.replicas, half.ranks)["dp"].get_local_rank()
        self.states: dict[str, Any] = {}
        self.optimizers = list(self.pipe.optimizers.values())
        if half.optimizer == "user":
            self.optimizers = [adam(self.pipe.parameters())]
            self.states = {"optimizer": self.optimizers[0]}
        self.schedulers = [CosineAnnealingLR(optimizer, STEPS) for optimizer in self.optimizers]
        self.states["scheduler"] = self.schedulers[0] if half.optimizer == "user" else self.schedulers
        self.half = half

    def train(self, steps: range) -> list[Tensor]:
        """Train, and return the losses."""
        losses = []
        for step in steps:
            x, y = (rows.chunk(self.half.replicas)[self.replica] for rows in batch(step))
            losses.append(self.pipe.step(x, target=y).clone())
            if self.half.optimizer == "user":
                self.pipe.clip_grad_norm_(CLIP)
                self.optimizers[0].step()
                self.optimizers[0].zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()
        return losses

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of this process's weights, buffers and optimizer states.

        The name of a divided state ends in the index of its first row, such as ``[8]``. Collective, because
        replicas may divide the weights.
        """
        names = {parameter: name for name, parameter in self.pipe.named_parameters()}
        weights = self.pipe.full_state_dict()
        yield from ((name, weights[name]) for name in names.values())
        yield from self.pipe.named_buffers()
        rows: dict[Any, int] = {}
        for update in self.pipe._running.assembly.divided_updates.values():
            for parameter, local in update.local.items():
                names[local] = names[parameter]
                if (own := update.own_rows(parameter)) is not None:
                    rows[local] = own[0]
        yield from named_states(self.optimizers, names, rows)


def named_states(
    optimizers: list[Any], names: dict[Any, str], rows: Mapping[Any, int] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names:
                    yield f"{names[parameter]}: lr", torch.tensor(group["lr"], dtype=torch.float64)
                    for key, value in optimizer.state[parameter].items():
                        place = f"[{rows[parameter]}]" if parameter in rows and value.dim() else ""
                        yield f"{names[parameter]}: {key}{place}", value


def first_half(group: Group, half: Half, path: str, replicated: bool = False, **options: Any) -> list[Tensor]:
    """Train half of the steps and save."""
    trainer = Trainer(group, half, Net(), replicated=replicated)
    with trainer.pipe:
        losses = trainer.train(range(HALF))
        trainer.pipe.save(path, **trainer.states, **options)
    return losses


def second_half(
    group: Group, half: Half, path: str, replicated: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Load the checkpoint into a model with other weights, train the second half, and return losses and tensors."""
    trainer = Trainer(group, half, Net(seed=7), seed=99, replicated=replicated)
    with trainer.pipe as pipe, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restored = pipe.load(path, **trainer.states)
        saved = json.loads((Path(path) / "manifest.json").read_text())["settings"]
        sums = saved["num_replicas"], saved.get("num_shards", 1)
        assert any("differs in rounding" in str(one.message) for one in said) == (sums != half.sums)
        assert restored.step == HALF
        losses = trainer.train(range(restored.step, STEPS))
        return losses, {name: tensor.clone() for name, tensor in trainer.tensors()}


@cache
def never_stopped(
    sums: tuple[tuple[int, int], tuple[int, int]] | None = None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and tensors of a plain training loop over all steps, without a save or a load.

    ``sums`` holds a pair (number of replicas, number of shards) for the steps before `HALF`, and a pair for the steps
    from `HALF` on. Default: no replicas.
    """
    model = Net()
    optimizer = adam(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        num_replicas, num_shards = (1, 1) if sums is None else sums[step >= HALF]
        losses.append(
            reference_step(
                model,
                x,
                target=y,
                loss_fn=functional.mse_loss,
                num_microbatches=MICROBATCHES // num_replicas,
                num_replicas=num_replicas,
                batch_norm="mini-batch" if sums else "micro-batch",
                seed=SEED,
                step=step,
            )
        )
        clip_grad_norm_(model.parameters(), CLIP, num_shards=num_shards)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, {name: value.detach() for name, value in (*tensors.items(), *named_states([optimizer], names))}


def runs(ranks: Ranks) -> Any:
    """Return a function that runs a job on the ranks of a Half, and returns the results of all processes."""

    def run(half: Half, job: Any, *args: Any) -> list[Any]:
        if half.place == "process":
            return run_here(half.ranks, job, half, *args)
        if half.replicas == 1 or half.replicas * half.ranks == len(ranks.processes):
            return ranks.run(half.replicas * half.ranks, job, half, *args)
        fewer = Ranks(half.replicas * half.ranks)
        try:
            return fewer.run(half.replicas * half.ranks, job, half, *args)
        finally:
            fewer.close()

    return run


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the rows of divided tensors, whose names end in the index of their first row, such as ``name[8]``."""
    rows: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        base, _, first = name.removesuffix("]").partition("[")
        rows.setdefault(base, {})[int(first or 0)] = value
    return {name: torch.cat([own[at] for at in sorted(own)]) if len(own) > 1 else own[0] for name, own in rows.items()}


def differences(run: Any, before: Half, after: Half, path: str) -> list[str]:
    """Return the names of the values that differ between the resumed run and a plain loop without a stop."""
    replicated = before.replicas * after.replicas > 1
    losses, tensors = never_stopped((before.sums, after.sums) if replicated else None)
    first = run(before, first_half, path, replicated)
    second = run(after, second_half, path, replicated)
    found: dict[str, Tensor] = {}
    different = []
    for own, _ in second:
        different += [f"loss {HALF + at}" for at, (a, b) in enumerate(zip(own, losses[HALF:])) if not torch.equal(a, b)]
    for own in first:
        different += [f"loss {at}" for at, (a, b) in enumerate(zip(own, losses)) if not torch.equal(a, b)]
    for _, own in second:
        found |= own
    found = whole(found)
    different += list({*found} ^ {*tensors})
    same = {*found} & {*tensors}
    return different + [name for name in same if not torch.equal(found[name], tensors[name])]
