"""Jobs of test_agreement: pipelines that differ between ranks."""

import copy
import logging
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline
from pipesched.errors import DifferenceError, ExecutionError
from tests.support import places
from tests.support.unguarded import unguarded

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


def model(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 4), nn.Linear(4, 4))


def made(group: Any, built: nn.Module, **options: Any) -> Pipeline:
    named: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "1f1b", "num_microbatches": 4}
    named |= {"boundaries": [1, 2][: group.size() - 1], "seed": 1}
    return Pipeline(built, X[:2], **places.place(group), **named | options)


def builds(group: Any, change: str) -> str:
    """Return the error on this rank if the last rank builds a different pipeline."""
    odd = group.rank() == group.size() - 1
    built = model(6 if odd and change == "shape" else 4)
    options: dict[str, Any] = {}
    version = torch.__version__
    if odd and change == "dtype":
        built[3].weight.data = built[3].weight.data.half()
    elif odd and change == "setting":
        built[1].p = 0.2
    elif odd and change == "frozen":
        built[0].bias.requires_grad_(False)
    elif odd and change == "mode":
        built[1].eval()
    elif odd and change == "structure":
        built.append(nn.Identity())
    elif odd and change == "seed":
        options["seed"] = 2
    elif odd and change == "numerics":
        options["numerics"] = Numerics(loss_reduction="sum")
    elif odd and change == "torch":
        torch.__version__ = "1.0"
    try:
        with made(group, built, **options):
            return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.__version__ = version


def counts(group: Any) -> list[int]:
    """Return the total number of ``agree_on`` calls after each of three steps."""
    with made(group, model()) as pipe:
        ranks: Any = pipe._running.host.collectives  # type: ignore[union-attr]
        compared = ranks.agree_on
        calls: list[Any] = []
        ranks.agree_on = lambda *given: (calls.append(given), compared(*given))[1]
        found = []
        for _ in range(3):
            pipe.step(X, target=Y)
            found.append(len(calls))
        return found


def forgets_train(group: Any) -> tuple[str, float]:
    """Set evaluation mode on rank 1. Return the error of a step, and the loss of a step after ``train()``."""
    with made(group, model()) as pipe:
        if group.rank() == 1:
            pipe.eval()
        try:
            pipe.step(X, target=Y)
            text = ""
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        pipe.train()
        return text, float(pipe.step(X, target=Y))


def sets_own_modes(group: Any) -> None:
    """Check that a step runs if a rank freezes parameters of its own stages and changes their mode."""
    with made(group, model()) as pipe:
        for name, module in pipe.named_modules():
            if name == "0":
                module.eval()
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(name != "2.bias")
        pipe.step(X, target=Y)


def records_of_a_failure(group: Any) -> str:
    """Return the log of a run in which a layer of the last rank fails in the third step."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    said: list[str] = []
    log = logging.getLogger("pipesched")
    handler = Lines()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        built = model()
        with made(group, built) as pipe:
            pipe.step(X, target=Y)
            pipe.step(X[:5], target=Y[:5])
            built[3].register_forward_pre_hook(lambda *_: 1 // 0)
            float(pipe.step(X, target=Y))
    except (ZeroDivisionError, ExecutionError):
        pass
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return "\n".join(said)


class Scaled(nn.Module):
    """A chain of layers that multiplies its input by a plain number, if one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * scale


def passes_other_values(group: Any, change: str, method: str, inputs: Any) -> tuple[float, str]:
    """Run two good calls, and a call in which the last rank passes other values of the same form.

    Returns the last loss of the good calls, and the error of the other call.
    """
    odd = group.rank() == group.size() - 1
    place = places.place(group, inputs)
    with Pipeline(
        Scaled(),
        {"x": X[:2], "scale": 1.0},
        loss_fn=functional.cross_entropy,
        schedule="1f1b",
        num_microbatches=4,
        boundaries=["layers.1", "layers.2"][: group.size() - 1],
        **place,
    ) as pipe:
        given: dict[str, Any] = {"x": X, "scale": 1.0, "target": Y}
        passes = inputs == "all" or group.rank() == 0
        for _ in range(2):
            loss = float(getattr(pipe, method)(**(given if passes else {})))
        x, scale, target = X, 1.0, Y
        if odd and change == "values":
            x = X + 1
        elif odd and change == "order of rows":
            x, target = X.flip(0), Y.flip(0)
        elif odd and change == "target":
            target = (Y + 1) % 4
        elif odd and change == "plain number":
            scale = 2.0
        elif odd and change == "part of other storage":
            x = (X + 1).T.contiguous().T
        try:
            float(getattr(pipe, method)(**({"x": x, "scale": scale, "target": target} if passes else {})))
        except ExecutionError as error:
            return loss, str(error)
        return loss, ""


def streams_other_values(group: Any, when: str) -> tuple[float, str]:
    """Run steps of an asynchronous schedule. In one of them, the last rank passes other values of the same form.

    Returns the last loss before this step, and the error.
    """
    odd = group.rank() == group.size() - 1
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with made(group, model(), schedule="pipedream", optimizer=optimizer) as pipe:
        loss = 0.0
        if when == "after a flush":
            for _ in range(3):
                pipe.step(X, target=Y)
            loss = float(pipe.flush())
        try:
            pipe.step(X + 1 if odd and when != "never" else X, target=Y)
            pipe.flush()
        except ExecutionError as error:
            return loss, str(error)
        return loss, ""


def holds_other_weights(group: Any, change: str, weights: Any) -> tuple[str, float]:
    """Build a pipeline on ranks with different weights. Returns the error, or the loss of a step."""
    odd = group.rank() == group.size() - 1
    built = model()
    built.append(nn.BatchNorm1d(4))
    if odd and change == "seed":
        for parameter in built.parameters():
            nn.init.normal_(parameter)
    elif odd and change == "one weight":
        built[0].weight.data.add_(0.5)
    elif odd and change == "buffer":
        built[4].running_mean.fill_(3)
    elif change == "own stage alone":  # a rank has no values for the others' weights
        for number, layer in enumerate(built):
            if (number == 0) == odd:
                layer.to("meta")
    boundaries = [1, 2][: group.size() - 1]
    distributed = Distributed(weights=weights, timeout=30)
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "1f1b", "num_microbatches": 4}
    options["mesh"] = places.place(group)["mesh"]
    try:
        with Pipeline(built, X[:2], boundaries=boundaries, seed=1, distributed=distributed, **options) as pipe:
            return "", float(pipe.step(X, target=Y))
    except ExecutionError as error:
        return str(error), 0.0


def checks(group: Any, inputs: str, calls: bool = True) -> tuple[Sequence[str], Sequence[str], list[float]]:
    """Train a step, check, and train another. Returns what the check compared and could not compare, and the losses."""
    equal: Sequence[str] = ()
    skipped: Sequence[str] = ()
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "1f1b", "num_microbatches": 4}
    with Pipeline(model(), X[:2], boundaries=[2], **options, **places.place(group, inputs)) as pipe:
        given = {"target": Y} if inputs == "all" or group.rank() == 0 else {}
        args = (X,) if given else ()
        first = float(pipe.step(*args, **given))
        if calls:
            report = pipe.check(*args, **given)
            equal, skipped = report.equal, report.skipped
        second = float(pipe.step(*args, **given))
    return equal, skipped, [first, second]


def checks_other_batches(group: Any) -> str:
    """Check a step for which the ranks pass different batches, without the guard. Returns the error."""
    options: dict[str, Any] = {"loss_fn": functional.cross_entropy, "schedule": "1f1b", "num_microbatches": 4}
    options["mesh"] = places.place(group)["mesh"]
    with unguarded("same batches"), Pipeline(model(), X[:2], boundaries=[2], **options) as pipe:
        try:
            pipe.check(X + group.rank(), target=Y)
        except DifferenceError as error:
            return str(error)
    return ""


def steps_idle_optimizer(group: Any, idle: bool) -> list[str]:
    """Train three steps with an optimizer of this rank's parameters, or of a copy. Returns the warnings."""
    module = model()
    pipe = made(group, module)
    parameters = copy.deepcopy(module).parameters() if idle else pipe.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pipe.step(X, target=Y)
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught]
