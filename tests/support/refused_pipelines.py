"""Small pipelines, and a check that making a pipeline raises an error."""

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from pipesched.errors import PipeschedError

ONES = torch.ones(4, 3)


def mse(output, target):
    return (output - target).square().mean()


def linears(count=4):
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


def build(model=None, **choices):
    choices = {"devices": ["cpu"] * 2, "loss_fn": mse} | choices
    return Pipeline(linears() if model is None else model, torch.ones(2, 3), **choices)


def refused(error, builtin, match, model=None, **choices):
    """Check that making the pipeline raises ``error``, which must be a PipeschedError and a ``builtin`` exception."""
    with pytest.raises(error, match=match) as caught:
        build(model, **choices).close()
    assert isinstance(caught.value, PipeschedError)
    assert isinstance(caught.value, builtin)
