"""Behaviours that only CUDA devices show."""

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from tests.support.peer_cases import MODES, linears, mse, needs_cuda, needs_two_cuda, pipeline, rows


@needs_two_cuda
@pytest.mark.parametrize("mode", MODES)
def test_all_tensors_of_a_tuple_arrive_on_the_next_device_with_their_gradients(mode):
    class Both(nn.Module):
        def forward(self, pair):
            torch.cuda._sleep(50_000_000)
            return pair[0] * 2, pair[1] * 3

    model = nn.Sequential(Both(), Both())
    a, b = (torch.ones(8, 4, device="cuda:0", requires_grad=True) for _ in range(2))
    with Pipeline(
        model, ((a[:1].detach(), b[:1].detach()),), devices=["cuda:0", "cuda:1"], boundaries=[1], checkpoint=mode
    ) as pipe:
        out = pipe((a, b))
        (out[0].sum() + out[1].sum()).backward()
    assert torch.equal(a.grad, torch.full_like(a, 4))
    assert torch.equal(b.grad, torch.full_like(b, 9))


@needs_cuda
def test_a_step_on_cuda_waits_for_the_callers_stream_and_the_caller_for_the_step():
    model = linears(2).cuda()
    with pipeline(model, rows(2).cuda(), device="cuda", loss_fn=mse) as pipe:
        x = torch.zeros(8, 4, device="cuda")
        torch.cuda._sleep(100_000_000)
        x.copy_(rows())
        _, output = pipe.step(x, target=rows(seed=2).cuda(), return_outputs=True)
        doubled = output * 2
    torch.testing.assert_close(doubled, 2 * model(rows().cuda()).detach())
