"""Jobs of test_metrics. They run in one process, or with one process per rank."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.testing import reference_step
from tests.support import places
from tests.support.added_losses import Experts
from tests.support.models import assert_as

X = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (11,), generator=torch.Generator().manual_seed(1))


def scores(outputs: Tensor, target: Tensor) -> dict[str, Any]:
    return {
        "accuracy": (outputs.argmax(-1) == target).float().mean(),
        "loss_again": functional.cross_entropy(outputs, target),
        "constant": 2,
    }


def model(*, adds: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Experts() if adds else nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))


def values(pipe: Pipeline) -> dict[str, float]:
    return {name: float(value) for name, value in pipe.metrics.items()}


def measures(group: Any, schedule: str, inputs: str = "all", *, adds: bool = False) -> list[dict[str, float]]:
    """Return the metrics of three steps and an evaluation. Checks losses and gradients against a plain loop."""
    given = inputs == "all" or places.is_one_process(group) or not group.rank()
    batch: Any = (X,) if given else ()
    target = Y if given else None
    found = []
    expected, actual = model(adds=adds), model(adds=adds)
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": schedule, "num_microbatches": 3}
    options |= {"boundaries": [1, 2, 3] if schedule == "zb-v" else [2], "seed": 1}
    with Pipeline(actual, X[:2], **places.place(group, inputs), **options) as pipe:  # type: ignore[arg-type]
        for step in range(2):
            loss = pipe.step(*batch, target=target, metrics=scores)
            found.append(values(pipe))
            named = {"loss_fn": functional.cross_entropy, "num_microbatches": 3, "seed": 1}
            assert torch.equal(loss, reference_step(expected, X, target=Y, step=step, **named))
            if schedule != "chimera":  # gradients of chimera are equal only within rounding
                assert_as(pipe, expected)
        pipe.step(*batch, target=target)
        found.append(values(pipe))
        pipe.eval()
        pipe.evaluate(*batch, target=target, metrics=scores)
        found.append(values(pipe))
    return found


def streams(group: Any) -> list[tuple[float, dict[str, float]]]:
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "pipedream", "num_microbatches": 3}
    options |= {"boundaries": [2], "seed": 1, "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1)}
    with Pipeline(model(), X[:2], **places.place(group), **options) as pipe:
        found = []
        for step in range(4):
            loss = pipe.step(X, target=Y, metrics=scores if step != 2 else None)
            found.append((float(loss), values(pipe)))
        last = pipe.flush()
        assert last is not None
        return [*found, (float(last), values(pipe))]


def differ(group: Any) -> list[str]:
    """Return the results of two steps in which one rank passes metrics and the other rank does not."""
    said = []
    for passed in (0, 1):
        with Pipeline(
            model(), X[:2], **places.place(group), loss_fn=functional.cross_entropy, schedule="1f1b", boundaries=[2]
        ) as pipe:
            loss = pipe.step(X, target=Y, metrics=scores if group.rank() == passed else None)
            try:
                said.append(f"{float(loss):.3f} {sorted(values(pipe))}")
            except Exception as error:
                said.append(str(error))
    return said


def returns_other_names(group: Any) -> str:
    """Return the error on this rank if the last micro-batch has a metric with a different name."""
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "1f1b", "num_microbatches": 3}
    with Pipeline(model(), X[:2], **places.place(group), boundaries=[2], **options) as pipe:
        try:
            return str(float(pipe.step(X, target=Y, metrics=lambda outputs, target: {f"rows {len(target)}": 1})))
        except Exception as error:
            return str(error)
