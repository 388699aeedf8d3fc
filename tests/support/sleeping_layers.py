"""Layers that sleep in place of computing, so that several ranks can run on one processor core."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, back: float) -> Tensor:
        ctx.back_s = back * seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.back_s)
        return grad.clone(), None, None


def waited(x: Tensor, seconds: float, back: float = 2.0) -> Tensor:
    """Return a copy of ``x`` after ``seconds``. The backward sleeps ``back`` times as long."""
    return _Waited.apply(x, seconds, back)  # type: ignore[no-untyped-call,no-any-return]


class Waiting(nn.Module):
    """A layer that multiplies its input by a weight of ``width`` elements, and sleeps for ``seconds``."""

    def __init__(self, seconds: float, *, back: float = 2.0, width: int = 1) -> None:
        super().__init__()
        self.seconds, self.back = seconds, back
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return waited(x * self.weight, self.seconds, self.back)
