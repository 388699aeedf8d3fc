"""Helpers for tests of behaviours that users of torchgpipe, fairscale and DeepSpeed rely on.

Each test is named after a behaviour. Some of these libraries raise an error or return wrong results; the test then
shows that pipesched returns correct results.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from pipesched import Kind, Pipeline, schedules

MODES = ["never", "always", "except_last"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
needs_two_cuda = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two CUDA devices")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def mse(output, target):
    return (output - target).square().mean()


def linears(count=4, width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def rows(count=8, width=4, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def grads(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_equal_bits(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def recomputed(pipe):
    """Return the number of micro-batches that each stage recomputed in the last step."""
    again = Counter(span.action.stage for span in pipe.trace.spans if span.action.kind is Kind.R)
    return [again[stage] for stage in range(pipe.num_stages)]


def pipeline(model, sample, num_stages=2, device="cpu", **choices):
    """Return a pipeline with one stage per rank; by default the layers are divided evenly."""
    if "boundaries" not in choices:
        choices["boundaries"] = [len(model) * stage // num_stages for stage in range(1, num_stages)]
    return Pipeline(model, sample, devices=[device] * (len(choices["boundaries"]) + 1), **choices)


def on_two_ranks(model, sample, schedule, **choices):
    """Return a pipeline on two ranks with the schedule's number of stages; the layers are divided evenly."""
    num_stages = 2 * schedules.get(schedule).chunks_per_rank
    boundaries = [len(model) * stage // num_stages for stage in range(1, num_stages)]
    return Pipeline(model, sample, devices=["cpu"] * 2, boundaries=boundaries, schedule=schedule, **choices)


class Function(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Oops(Exception):
    """An error of the user's code."""


class Raising(nn.Module):
    """A layer that raises an error in its n-th call (counted from 0) after it has been armed."""

    def __init__(self, call=0):
        super().__init__()
        self.call, self.calls, self.armed = call, 0, False

    def forward(self, x):
        if self.armed:
            self.calls += 1
            if self.calls == self.call + 1:
                raise Oops("the 7th fuse has blown")
        return x
