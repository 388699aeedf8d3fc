"""What the tests of behaviours share: those that users of earlier pipeline libraries (torchgpipe, fairscale,
DeepSpeed) rely on, under our names.

Each test is named after the behaviour. Where those libraries refuse something, or get it wrong silently, it shows
that it works here.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from pipesched import Kind, Pipeline, schedules

MODES = ["never", "always", "except_last"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is there")
needs_two_cuda = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices are there")
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
    """How many micro-batches each stage recomputed in the last step."""
    again = Counter(span.action.stage for span in pipe.trace.spans if span.action.kind is Kind.R)
    return [again[stage] for stage in range(pipe.num_stages)]


def pipeline(model, sample, num_stages=2, device="cpu", **choices):
    """A pipeline with a stage a rank, cut evenly unless boundaries are given."""
    if "boundaries" not in choices:
        choices["boundaries"] = [len(model) * stage // num_stages for stage in range(1, num_stages)]
    return Pipeline(model, sample, devices=[device] * (len(choices["boundaries"]) + 1), **choices)


def on_two_ranks(model, sample, schedule, **choices):
    """A pipeline of as many stages as the schedule has on two ranks, cut evenly."""
    num_stages = 2 * schedules.get(schedule).chunks_per_rank
    boundaries = [len(model) * stage // num_stages for stage in range(1, num_stages)]
    return Pipeline(model, sample, devices=["cpu"] * 2, boundaries=boundaries, schedule=schedule, **choices)


class Function(nn.Module):
    """A layer made of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Oops(Exception):
    """A user's own error."""


class Raising(nn.Module):
    """Raises in its n-th call, counted from zero, once it is armed."""

    def __init__(self, call=0):
        super().__init__()
        self.call, self.calls, self.armed = call, 0, False

    def forward(self, x):
        if self.armed:
            self.calls += 1
            if self.calls == self.call + 1:
                raise Oops("the 7th fuse has blown")
        return x
