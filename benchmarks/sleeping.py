"""Sleeping layers: their F, I and W take fixed times without a processor, as if they waited for an accelerator."""

import ctypes
import time
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

SECONDS = 0.010  # F, I and W
ROWS, WIDTH = 16, 256  # of a micro-batch: the smallest product whose weight gradient is deferred to W


class ActionTimer:
    """Makes an action take a fixed time, including the time that other code takes during the action."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.began_s = 0.0
        self.in_backward = False

    def begin(self) -> None:
        """Start an action."""
        self.began_s = time.perf_counter()

    def wait(self, parts: int = 1) -> None:
        """Sleep until the next ``parts * seconds`` of the action are over."""
        self.began_s += parts * self.seconds
        time.sleep(max(0.0, self.began_s - time.perf_counter()))


class Edge(torch.autograd.Function):
    """An identity function that marks the start or the end of a layer. A backward pass reaches the end first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timer: ActionTimer, entering: bool) -> Tensor:
        ctx.timer, ctx.entering = timer, entering
        if entering:
            timer.begin()
        else:
            timer.wait()
        return x.clone()  # not a view: torch's split backward does not accept a view as a stage's output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        timer = ctx.timer
        if ctx.entering:
            timer.wait()
        else:
            timer.begin()
        timer.in_backward = not ctx.entering
        return grad, None, None


class Sleeping(nn.Module):
    """A layer whose F, I and W each take ``seconds`` (default: 10 ms). A hook on the weight sleeps during W.

    The forward registers the hook on a new weight: a profile measures layers with copies of their weights.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__()
        self.seconds = seconds  # a profile measures layers of different lengths separately
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.timer = ActionTimer(seconds)
        self._hook()

    def _hook(self) -> None:
        self.weight.register_hook(self._arrived)
        self.hooked = ref(self.weight)

    def _arrived(self, grad: Tensor) -> Tensor:
        if not self.timer.in_backward:  # a separate W, not part of a B
            self.timer.begin()
        self.timer.wait()
        return grad

    def forward(self, x: Tensor) -> Tensor:
        if self.hooked() is not self.weight:
            self._hook()
        # The first stage's input needs no gradient, but its I takes the same time.
        x = Edge.apply(x if x.requires_grad else x.detach().requires_grad_(), self.timer, True)
        return Edge.apply(functional.linear(x, self.weight), self.timer, False)


def wake_in_time() -> None:
    """Turn off timer slack: Linux ends sleeps up to 50 us late to save power."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in ns
