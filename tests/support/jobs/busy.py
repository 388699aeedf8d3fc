"""Jobs of test_busy_pipeline: methods that change weights or gradients, called while a step runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.testing import reference_step
from tests.support import places

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(1, -1, 64).reshape(8, 8)

#: The changes; `METHODS` has the names that the messages contain, where they differ.
CHANGES: dict[str, Callable[[Pipeline], Any]] = {
    "to": lambda pipe: pipe.to(torch.float64),
    "half": lambda pipe: pipe.half(),
    "load_state_dict": lambda pipe: pipe.load_state_dict(
        {name: torch.zeros_like(value) for name, value in pipe.model.named_parameters()}
    ),
    "clip_grad_norm_": lambda pipe: pipe.clip_grad_norm_(0.001),
}
METHODS = {"half": "to"}


class Calls(nn.Linear):
    """A layer that calls a function in each forward."""

    call: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        """Call the function, and then the layer."""
        self.call()
        return super().forward(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Calls(8, 8), nn.Linear(8, 8))


def tried(call: Callable[[], Any], errors: list[Exception]) -> None:
    """Call a function, and add its error to ``errors``."""
    try:
        call()
    except Exception as error:
        errors.append(error)


def changes_inside(group: Any, name: str) -> tuple[list[str], bool]:
    """Return the errors of a change that a layer makes, and whether the step is that of a plain loop."""
    own, plain, errors = model(), model(), list[Exception]()
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "boundaries": [2], "seed": 1}
    with Pipeline(own, X[:2], loss_fn=functional.mse_loss, **places.place(group), **options) as pipe:
        own[2].call = lambda: tried(lambda: CHANGES[name](pipe), errors)
        loss = pipe.step(X, target=Y)
        due = reference_step(plain, X, loss_fn=functional.mse_loss, target=Y, num_microbatches=4, seed=1)
        equal = torch.equal(loss, due)
        others = dict(plain.named_parameters())
        for key, parameter in pipe.named_parameters():
            equal = equal and torch.equal(parameter, others[key]) and torch.equal(parameter.grad, others[key].grad)
    return [f"{type(error).__name__}: {error}" for error in errors], equal
