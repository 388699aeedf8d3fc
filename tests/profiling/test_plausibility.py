"""Implausible times of a layer are measured again, and then named in a warning."""

import time

import pytest
import torch
from torch import nn

import pipesched
from pipesched.profiling.plausibility import Measured, doubt, doubt_of_sum
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.layer_memory import LayerMemory

pytestmark = pytest.mark.usefixtures("thorough")

LARGE_GRADIENT = LayerMemory(gradient_bytes=5 * 10**9)


def layer_costs(forward_s, backward_s, **others):
    return LayerCosts(forward_s=forward_s, backward_s=backward_s, **others)


@pytest.mark.parametrize(
    ("costs", "each_s", "trains", "said"),
    [
        (layer_costs(1.0, 2.0), [2.9, 3.1], True, ""),
        (layer_costs(1.0, 4.5), [], True, "4.5 times the forward (usual: 1 to 4 times)"),
        (layer_costs(1.0, 0.5), [], True, "0.5 times the forward (usual: 1 to 4 times)"),
        (layer_costs(1.0, 0.5), [], False, ""),
        (layer_costs(1.0, 0.9, spread=0.2), [], True, ""),  # within the spread of its own times
        (
            layer_costs(0.001, 4.5, memory=LayerMemory(gradient_bytes=5 * 10**9)),
            [],
            True,
            "",
        ),  # an embedding: its gradient is large
        (layer_costs(1.0, 2.0), [3.0, 3.1, 9.0], True, "but they take from 3e+03 to 9e+03 ms (median: 3.1e+03 ms)"),
        (layer_costs(1e-3, 1.0), [], True, ""),  # negligible: all layers take 100 s
    ],
)
def test_implausible_costs_of_a_layer_are_doubted(costs, each_s, trains, said):
    found = doubt(Measured(costs, each_s, trains), all_s=100.0 if costs.backward_s == 1.0 else 3.0)
    assert said in found
    assert bool(said) == bool(found)


def test_layers_that_do_not_add_up_to_the_model():
    layers = {"a": layer_costs(1.0, 2.0), "b": layer_costs(1.0, 2.0)}
    assert not doubt_of_sum(layers, layer_costs(2.1, 3.9))
    found = doubt_of_sum(layers, layer_costs(1.0, 4.0))
    assert "the forwards of all layers add up to 2e+03 ms, but the model's forward takes 1e+03 ms (+100%)" in found
    assert "backwards" in doubt_of_sum(layers, layer_costs(2.0, 6.0))
    assert not doubt_of_sum({"a": layer_costs(1.0, 2.0, spread=0.8)}, layer_costs(1.5, 3.0))  # a noisy machine
    assert doubt_of_sum({"a": layer_costs(1.0, 2.0, spread=3.0)}, layer_costs(100.0, 2.0))  # too short to explain it


class SlowBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        SlowBackward.calls += 1
        time.sleep(0.01)  # long compared with a delay on a busy machine
        return grad * 2


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return SlowBackward.apply(self.inner(x))


class Sleepy(nn.Module):
    """Sleeps between its layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.blocks[0](x)
        time.sleep(0.03)
        return self.blocks[1](x)


def test_a_layer_with_implausible_costs_is_measured_again_and_named():
    with pytest.warns(
        UserWarning,
        match="layer '1' are implausible: the backward takes .* times the forward .*; measure again when the machine",
    ):
        pipesched.profile(nn.Sequential(nn.Linear(4, 4), Slow()), torch.rand(2, 4), rows=[2])
    twice, SlowBackward.calls = SlowBackward.calls, 0
    pipesched.graph_of(nn.Sequential(nn.Linear(4, 4), Slow()), torch.rand(2, 4))  # no checks, and fewer rounds
    assert twice > 2 * SlowBackward.calls > 0


def test_a_warning_states_the_time_that_a_forward_spends_outside_layers():
    with pytest.warns(UserWarning, match="the forwards of all layers add up to .*, but the model's forward takes"):
        pipesched.profile(Sleepy(), torch.rand(2, 4), rows=[2])
