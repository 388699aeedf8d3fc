"""Jobs of test_misused_parameters: what functions of torch do with the parameters of one rank of a mesh."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import swa_utils

from pipesched import Pipeline
from pipesched.errors import ExecutionError
from tests.support import places

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(1, -1, 64).reshape(8, 8)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def averaged(own: nn.Module, *, gathers: Callable[[], Any] = lambda: None) -> None:
    average = swa_utils.AveragedModel(model())
    gathers()
    average.update_parameters(own)


def of_torch(pipe: Pipeline) -> dict[str, Callable[[], Any]]:
    """Return calls of torch's functions on the parameters of this rank."""
    own = pipe.model
    return {
        "norm": lambda: clip_grad_norm_(pipe.parameters(), 1.0),
        "norm of the model": lambda: clip_grad_norm_(own.parameters(), 1.0),
        "norm by keyword": lambda: clip_grad_norm_(parameters=pipe.parameters(), max_norm=1.0, foreach=False),
        "another norm": lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, norm_type=float("inf")),
        "average": lambda: averaged(own),
        "average with a decay": lambda: swa_utils.AveragedModel(
            model(), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
        ).update_parameters(own),
        "values": lambda: clip_grad_value_(pipe.parameters(), 1.0),
        "optimizer": lambda: torch.optim.SGD(pipe.parameters(), lr=0.1).step(),
        "average of gathered weights": lambda: averaged(own, gathers=pipe.gather_model),
    }


def calls(group: Any, name: str) -> str:
    """Return the error of a call after a step."""
    with Pipeline(
        model(),
        X[:2],
        loss_fn=functional.mse_loss,
        schedule="1f1b",
        num_microbatches=4,
        boundaries=[2],
        **places.place(group),
    ) as pipe:
        pipe.step(X, target=Y)
        try:
            of_torch(pipe)[name]()
        except ExecutionError as error:
            return str(error)
        return ""


def alone(group: Any) -> list[str]:
    """Return the warnings of a pipeline that every process makes for itself."""
    make = partial(Pipeline, loss_fn=functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b", boundaries=[2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(model(), X[:2]).close()
    return [str(one.message) for one in caught]
