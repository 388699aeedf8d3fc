"""Layer losses: steps of a model whose layers add losses, compared bit by bit with a loop, under every exact schedule.

    python benchmarks/layer_losses.py

A schedule is exact if it adds gradients in the order of the micro-batches, as the loop does. Each plan trains two steps
with dropout and with batches that do not divide evenly into micro-batches. The gradients of all products with weights
are deferred to W.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipesched
from pipesched import Pipeline, schedules
from pipesched.runtime.stage import split_backward
from pipesched.testing import reference_step

LAYERS = 8
X = torch.randn(19, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (19,), generator=torch.Generator().manual_seed(1))


class Experts(nn.Module):
    """A layer with a router and dropout. It calls add_loss twice."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear, self.drop = nn.Linear(8, 4), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        pipesched.add_loss(0.3 * (shares.mean(0) ** 2).sum(), name="balance")
        pipesched.add_loss(self.router(x).logsumexp(-1).square().mean(), name="z")
        made: Tensor = self.drop(x + self.linear(x) * shares[:, :1])
        return made


class Model(nn.Module):
    """A model in which layers, and code between layers, call add_loss; a skip connection spans all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(LAYERS - 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index % 3 == 0:
                pipesched.add_loss(0.1 * (x * first).mean(), name="size")
                first = x
        made: Tensor = self.head(x + first)
        return made


def made() -> Model:
    """Return the model, with the same weights in each call."""
    torch.manual_seed(0)
    return Model()


def cases() -> Iterator[tuple[str, int, object]]:
    """Yield (schedule, number of ranks, checkpointing) for each plan."""
    layer = "blocks.2"
    modes = ("never", "always", {layer: "recompute-cheap"})
    for name, num_ranks, mode in itertools.product(schedules.names(), range(1, 5), modes):
        schedule = schedules.get(name)
        program = schedule.program(num_ranks, 4) if name not in ("chimera", "dualpipe") else None
        if program is not None and program.exact and not program.has_updates and program.num_stages <= LAYERS:
            yield name, num_ranks, mode


def differences(name: str, num_ranks: int, mode: object) -> int:
    """Train a plan and the loop for two steps; return the number of tensors that differ."""
    expected, actual = made(), made()
    options = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 3}
    layers = [*(f"blocks.{index}" for index in range(LAYERS - 1)), "head"]
    num_stages = num_ranks * schedules.get(name).chunks_per_rank
    cut = [layers[LAYERS * stage // num_stages] for stage in range(1, num_stages)]
    odd = 0
    place = {"devices": ["cpu"] * num_ranks, "schedule": name, "boundaries": cut, "checkpoint": mode}
    with Pipeline(actual, X[:2], **place, **options) as pipe:
        for step in range(2):
            loss = pipe.step(X, target=Y)
            wanted = reference_step(expected, X, target=Y, step=step, **options)
            odd += not torch.equal(loss, wanted)
            pairs = zip(actual.parameters(), expected.parameters(), strict=True)
            odd += sum(not torch.equal(one.grad, other.grad) for one, other in pairs)
    return odd


def main() -> None:
    """Train all plans; print for each schedule the number of plans, and how many tensors differ from the loop's."""
    split_backward.PAYS_FLOPS = 0
    total = wrong = 0
    for name, of_name in itertools.groupby(cases(), key=lambda case: case[0]):
        odd = [differences(*case) for case in of_name]
        total += len(odd)
        wrong += sum(odd)
        print(f"{name:20} {len(odd):3} plans, {sum(odd)} tensors differ", flush=True)
    print(f"{total} plans, {wrong} tensors differ from those of the loop")


if __name__ == "__main__":
    main()
