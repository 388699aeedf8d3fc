"""Layers that sleep, as if they waited for a device, and leave the processor free."""

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
    """Return the same values after some seconds; their gradient takes ``back`` times as long."""
    return _Waited.apply(x, seconds, back)  # type: ignore[no-untyped-call,no-any-return]


class Waiting(nn.Module):
    """A layer that scales its input and sleeps. width: the width of its weight."""

    def __init__(self, seconds: float, *, back: float = 2.0, width: int = 1) -> None:
        super().__init__()
        self.seconds, self.back = seconds, back
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return waited(x * self.weight, self.seconds, self.back)
