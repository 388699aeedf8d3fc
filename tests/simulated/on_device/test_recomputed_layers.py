"""Recomputed layers of a model that is on the device already when the pipeline is made."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipesched import Pipeline
from pipesched.testing import reference_step

DEVICE = "sim:0"


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout()))).to(DEVICE)


@pytest.mark.parametrize("word", ["recompute", "recompute-cheap"])
def test_the_trial_of_a_layer_ends_though_autograd_has_threads_of_its_own(sim, word):
    """The trial keeps the generators of Python and numpy to its thread, in which its backward must run."""
    x, y = torch.randn(2, 8, 8, device=DEVICE)
    own, loop = model(), model()
    with Pipeline(
        own,
        x[:2],
        loss_fn=F.mse_loss,
        devices=[DEVICE] * 2,
        schedule="1f1b",
        num_microbatches=4,
        boundaries=[4],
        checkpoint=dict.fromkeys(("0", "1", "4"), word),
        seed=5,
    ) as pipe:
        loss = pipe.step(x, target=y)
        due = reference_step(loop, x, target=y, loss_fn=F.mse_loss, num_microbatches=4, seed=5, step=0)
        assert float(loss) == float(due)
        for parameter, other in zip(own.parameters(), loop.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
    assert not sim.judge.violations
