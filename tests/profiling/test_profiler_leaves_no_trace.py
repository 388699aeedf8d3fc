"""Measuring leaves the model unchanged: weights, buffers, gradients, modes and generators; and no threads remain."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipesched
from pipesched.profiling.layer_profiler import measure_layers


def measure(model, sample):
    return measure_layers(dict(model.named_children()), ((sample,), {}), torch.device("cpu"), 1)


@pytest.mark.parametrize("grad", [True, False])
def test_measuring_leaves_no_trace(grad):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 4))
    model[1].eval()
    model[0].weight.grad = torch.ones(4, 4)
    sample = torch.rand(3, 4)
    before = copy.deepcopy((model.state_dict(), sample))
    modes = [module.training for module in model.modules()]
    parameters, random_state, threads = (
        list(map(id, model.parameters())),
        torch.get_rng_state(),
        torch.get_num_threads(),
    )
    with torch.set_grad_enabled(grad):
        measure(model, sample)
        assert torch.is_grad_enabled() == grad
    torch.testing.assert_close((model.state_dict(), sample), before, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert list(map(id, model.parameters())) == parameters
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * 5
    assert all(p.requires_grad for p in model.parameters())


class Recomputed(nn.Module):
    """Recomputes its layer in its backward, which must not use the original weights either."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Draws(nn.Module):
    """Draws from all generators, and counts in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls = []

    def forward(self, x):
        self.count += 1
        self.calls.append(len(self.calls))
        return x * torch.rand(1) * random.random() * np.random.rand()


class FirstOf(nn.Module):
    def forward(self, x):
        return x[0]


class AsIndex(nn.Module):
    def forward(self, x):
        return x[:, 0].long() % 3


class Skips(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        if tied:
            self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


MODELS = {
    "checkpointed": lambda: nn.Sequential(nn.Linear(4, 4), Recomputed()),
    "draws": lambda: nn.Sequential(nn.Linear(4, 4), Draws(), nn.Dropout(0.5)),
    "recurrent": lambda: nn.Sequential(nn.LSTM(4, 4), FirstOf(), nn.Linear(4, 4)),
    "renormed": lambda: nn.Sequential(AsIndex(), nn.Embedding(3, 4, max_norm=0.1), nn.BatchNorm1d(4)),
    "captured": Skips,
    "tied": lambda: Skips(tied=True),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_profile_changes_nothing(name):
    model, sample = MODELS[name](), torch.rand(4, 4)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    given = dict((*model.named_parameters(), *model.named_buffers()))
    state = copy.deepcopy(model.state_dict())
    grads = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
    attributes = {key: copy.deepcopy(getattr(module, "calls", None)) for key, module in model.named_modules()}
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    pipesched.profile(model, sample, rows=[2, 4])
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == kept[1:]
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is given[key]
        assert torch.equal(tensor, state[key])
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) if grads[key] is None else torch.equal(parameter.grad, grads[key])
    assert {key: getattr(module, "calls", None) for key, module in model.named_modules()} == attributes
    assert all(module.training for module in model.modules())


def test_hooks_of_parameters_are_not_fired():
    fired = []
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(fired.append)
    layer.weight.register_post_accumulate_grad_hook(fired.append)
    measure(nn.Sequential(layer), torch.rand(3, 4))
    assert not fired


def test_a_layer_that_fails_leaves_modes_and_threads_as_they_were():
    class Fail(nn.Module):
        def forward(self, x):
            raise OSError

    model, threads = nn.Sequential(nn.Linear(4, 4), Fail()).eval(), torch.get_num_threads()
    with pytest.raises(OSError) as caught:  # noqa: PT011
        measure(model, torch.rand(3, 4))
    assert "layer '1'" in caught.value.__notes__[0]
    assert torch.get_num_threads() == threads
    assert not any(module.training for module in model.modules())
