"""Models whose layers add losses, and jobs that train them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipesched
from pipesched import Pipeline, schedules
from pipesched.testing import reference_step
from tests.support import places
from tests.support.models import assert_as

X = torch.randn(19, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (19,), generator=torch.Generator().manual_seed(1))
MICROBATCHES = 3
#: The layers of `Own`.
UNITS = [*(f"blocks.{index}" for index in range(4)), "head"]


class Experts(nn.Module):
    """A layer with a router and dropout that adds two losses, one of them with a name."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.router, self.linear = nn.Linear(8, 4), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        shares = logits.softmax(-1)
        pipesched.add_loss(0.3 * (shares.mean(0) ** 2).sum(), name=self.name)
        pipesched.add_loss(self.router(x).logsumexp(-1).square().mean(), name="z")
        return self.drop(x + self.linear(x) * shares[:, :1])


class Own(nn.Module):
    """A model that adds losses inside layers and in its code between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(f"balance/{index}") for index in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index % 2:
                pipesched.add_loss(0.1 * x.square().mean(), name="size")
        return self.head(x)


def row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Experts() for _ in range(4)), nn.Linear(8, 4))


def own() -> Own:
    torch.manual_seed(0)
    return Own()


def pipeline(model: nn.Module, where: Mapping[str, Any], **options: Any) -> Pipeline:
    """Return a pipeline whose stages have nearly equal numbers of layers, so that no layer is measured."""
    units = [name for name in dict(model.named_modules()) if name.isdigit()] or UNITS
    ranks = len(where["devices"]) if "devices" in where else where["mesh"].size()
    stages = ranks * schedules.get(options["schedule"]).chunks_per_rank
    cut = [units[place] for place in places.even_boundaries(len(units), stages)]
    named = {"loss_fn": functional.cross_entropy, "num_microbatches": MICROBATCHES, "seed": 3, "boundaries": cut}
    return Pipeline(model, X[:2], **where, **named | options)


def looped(model: nn.Module, step: int = 0, **options: Any) -> Tensor:
    named = {"loss_fn": functional.cross_entropy, "num_microbatches": MICROBATCHES, "seed": 3}
    return reference_step(model, X, target=Y, step=step, **named | options)


def trains(group: Any, kind: str, name: str, checkpoint: Any, inputs: Any = "all") -> dict[str, float]:
    """Check that two steps are bit-identical to those of a plain loop. Return the metrics of the second step."""
    make = {"row": row, "own": own}[kind]
    expected, actual = make(), make()
    place = places.place(group, inputs)
    batch: tuple[Any, ...] = (X,)
    target: Any = Y
    if inputs == "first" and not places.is_one_process(group) and group.rank():
        batch, target = (), None
    with pipeline(actual, place, schedule=name, checkpoint=checkpoint) as pipe:
        for step in range(2):
            loss = pipe.step(*batch, target=target)
            assert torch.equal(loss, looped(expected, step))
            assert_as(pipe, expected)
        metrics = pipe.metrics
        assert 0 < sum(metrics.values()) < loss
        return {name: float(value) for name, value in metrics.items()}


def adds_late(group: Any) -> str:
    """Return the error if a layer of rank 0 adds a loss in the second step, but not in the first."""
    model = row()
    for layer in model[:-1]:
        layer.forward = layer.linear.forward  # type: ignore[union-attr]
    pipe = pipeline(model, places.place(group), schedule="1f1b")
    pipe.step(X, target=Y)
    layer = model[0]
    layer.forward = Experts.forward.__get__(layer)
    try:
        float(pipe.step(X, target=Y))
        pipe.step(X, target=Y)
    except Exception as error:
        return str(error)
    finally:
        pipe.close()
    return ""


def evaluates(group: Any) -> tuple[float, dict[str, float]]:
    with pipeline(own(), places.place(group), schedule="zb-h1") as pipe:
        pipe.eval()
        loss = pipe.evaluate(X, target=Y)
        return float(loss), {name: float(value) for name, value in pipe.metrics.items()}


def streams(group: Any, name: str) -> list[tuple[float, dict[str, float]]]:
    """Return the losses and metrics of the steps of an asynchronous schedule."""
    found = []
    options = {"schedule": name, "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.01)}
    with pipeline(row(), places.place(group), **options) as pipe:
        for _ in range(4):
            loss = pipe.step(X, target=Y)
            found.append((float(loss), {name: float(value) for name, value in pipe.metrics.items()}))
        loss = pipe.flush()
        assert loss is not None
        found.append((float(loss), {name: float(value) for name, value in pipe.metrics.items()}))
    return found
