"""Clipping: one norm, bit for bit, under every plan, and the clipped weights of the plain loop."""

import math

import pytest
import torch
from torch import nn

from pipesched.errors import InputError
from pipesched.testing import clip_grad_norm_
from tests.support.async_replay import pipeline as asynchronous
from tests.support.async_replay import transformer
from tests.support.jobs import clipping
from tests.support.places import Run

pytestmark = pytest.mark.timeout(60)
FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("count", "schedule", "make", "dtype", "checkpoint", "norm_type"),
    [
        (1, "1f1b", clipping.tied_model, FLOAT, "never", 2.0),
        (2, "zb-v", clipping.plain_model, HALF, "always", 2.0),
        (3, "1f1b", clipping.tied_model, FLOAT, "never", math.inf),
        (2, "interleaved-1f1b", clipping.tied_model, HALF, "never", 3.0),
        (3, "zb-h1", clipping.plain_model, FLOAT, "always", 1.0),
    ],
)
def test_the_norm_and_the_clipped_weights_are_the_loops(run: Run, count, schedule, make, dtype, checkpoint, norm_type):
    norms = run(count, clipping.clip_between_steps, schedule, make, dtype, checkpoint, norm_type)
    assert all(own == norms[0] for own in norms)


def test_for_float32_gradients_the_rule_is_torchs():
    for norm_type in (1.0, 2.0, 2.5, math.inf):
        one, other = clipping.tied_model(), clipping.tied_model()
        for model in (one, other):
            torch.manual_seed(0)
            model(clipping.batch(0)[0]).square().sum().backward()
        mine = clip_grad_norm_(one.parameters(), 1.0, norm_type)
        assert torch.equal(mine, torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0, norm_type))
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert p.grad is None or torch.equal(p.grad, q.grad)


def test_a_norm_of_float64_gradients_is_float64():
    layer = nn.Linear(3, 3).double()
    layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert clip_grad_norm_(layer.parameters(), 1.0).dtype == torch.float64


def test_what_cannot_be_clipped_is_refused(run: Run):
    run(2, clipping.refuse_norms)


@pytest.mark.parametrize(
    "arguments", [(0,), (-1.0,), (math.nan,), ("1",), (True,), (1.0, 0), (1.0, "two"), (1.0, True)]
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(InputError, match=r"max_norm must be|norm_type must be"):
        clip_grad_norm_([nn.Parameter(torch.ones(1))], *arguments)


def test_asynchronous_schedules_cannot_be_clipped():
    with (
        asynchronous(transformer(), "pipedream", 2) as pipe,
        pytest.raises(InputError, match="'pipedream' updates weights during its steps"),
    ):
        pipe.clip_grad_norm_(1.0)
