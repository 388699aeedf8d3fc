"""Balance: layers are cut by their measured times."""

import copy
import time

import torch
from torch import nn

from pipesched import Pipeline, graph_of
from tests.support.peer_cases import (
    assert_equal_bits,
    grads,
    rows,
)


def test_layers_are_balanced_by_their_measured_times():
    """Layers of 10 to 60 ms in two stages: the first four, 100 ms, and the last two, 110 ms."""

    class Sleep(nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def forward(self, x):
            time.sleep(self.seconds)
            return x

    model = nn.Sequential(*(Sleep(i / 100) for i in range(1, 7)))
    with Pipeline(model, rows(1), devices=["cpu"] * 2, schedule="1f1b") as pipe:
        assert [len(stage) for stage in pipe.partitions] == [4, 2]


def test_balancing_runs_every_layer_on_what_the_one_before_it_gives():
    shapes = []

    class Flatten(nn.Module):
        def forward(self, x):
            shapes.append(tuple(x.shape))
            return x.flatten(1)

    model = nn.Sequential(nn.Conv2d(3, 2, 1), Flatten(), nn.Linear(128, 10))
    options = {"loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    with Pipeline(model, torch.rand(1, 3, 8, 8), **options) as pipe:
        assert pipe.num_stages == 2
    assert set(shapes) == {(1, 2, 8, 8)}


def test_layers_that_give_tuples_are_balanced():
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair):
            a, b = pair
            return self.linear(a), b.detach()

    model = nn.Sequential(*(Twin() for _ in range(4)))
    with Pipeline(model, ((rows(2), rows(2)),), devices=["cpu"] * 2, schedule="1f1b") as pipe:
        assert pipe.num_stages == 2


def test_profiling_leaves_everything_as_it_was():
    """Weights, buffers, gradients, modes, random states and the sample; in-place layers and batch norm included."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 4), nn.Dropout()
    )
    model[1].eval()
    model[3].eval()
    model[0].weight.grad = torch.full((4, 4), 7.0)
    sample = rows(2)
    state, versions = copy.deepcopy(model.state_dict()), [p._version for p in model.parameters()]
    modes, random_state = [module.training for module in model.modules()], torch.get_rng_state()
    with Pipeline(model, sample, devices=["cpu"] * 3, schedule="1f1b") as pipe:
        assert pipe.plan.costs is not None
    assert_equal_bits(model.state_dict(), state)
    assert [p._version for p in model.parameters()] == versions
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert {name for name, grad in grads(model).items() if grad is not None} == {"0.weight"}
    assert torch.equal(sample, rows(2))


def test_profiling_runs_in_training_mode():
    modes = set()

    class Note(nn.Module):
        def forward(self, x):
            modes.add(self.training)
            return x

    model = nn.Sequential(*(Note() for _ in range(4))).eval()
    graph_of(model, rows(2))
    assert modes == {True}
    assert not any(module.training for module in model.modules())
