"""The scale of the loss: gradients are divided by it as torch's GradScaler divides them."""

import torch
from torch import nn
from torch.amp import GradScaler

from pipesched.runtime.gradients.loss_scale import LossScale


def test_a_scale_that_is_no_power_of_two_divides_as_torchs_does():
    grads = [torch.randn(500), torch.randn(500).bfloat16(), torch.randn(500).double()]
    for scale in (3.0, 1000.0, 65536.0):
        due, scaler = (GradScaler("cpu", init_scale=scale) for _ in range(2))
        mine, theirs = ([nn.Parameter(torch.zeros_like(grad)) for grad in grads] for _ in range(2))
        for parameters in (mine, theirs):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.clone()
        due.scale(torch.ones(()))
        due.unscale_(torch.optim.SGD(theirs, lr=0.1))
        LossScale(scaler).unscale_([parameter.grad for parameter in mine])
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(mine, theirs, strict=True))
