"""What is measured of the layers, and that they are left as they were. No test depends on how long anything takes."""

import copy

import pytest
import torch
from torch import nn

from pipesched import Action, Costs, Kind, Span, Trace
from pipesched.profiler import LayerCosts, measure_layers, measured_costs, stage_costs

CPU = torch.device("cpu")
FLOAT_BYTES = 4


def measure(model, *args, threads=1, **kwargs):
    return measure_layers(dict(model.named_children()), (args, kwargs), CPU, threads)


class Twice(nn.Module):
    """Gives a pair, of which one needs no gradient."""

    def forward(self, x):
        return x * 2, x.detach()


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_linear_layer():
    costs = measure(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)), torch.ones(2, 3))
    second = costs["1"]
    assert second.parameter_bytes == (5 * 7 + 7) * FLOAT_BYTES
    assert second.input_bytes == 2 * 5 * FLOAT_BYTES
    assert second.output_bytes == 2 * 7 * FLOAT_BYTES
    assert second.activation_bytes == 2 * 5 * FLOAT_BYTES  # its input
    assert second.weight_grad_bytes == 2 * (5 + 7) * FLOAT_BYTES  # its input, and the gradient of its output
    assert list(costs) == ["0", "1"]


def test_what_a_layer_keeps_for_its_backward():
    costs = measure(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Identity()), torch.ones(2, 4))
    assert costs["1"].activation_bytes == 2 * 4 * FLOAT_BYTES  # its output
    assert costs["2"].activation_bytes == 0
    assert costs["2"].parameter_bytes == 0


def test_all_tensors_of_a_pair_count():
    costs = measure(nn.Sequential(nn.Linear(4, 4), Twice(), Join()), torch.ones(2, 4))
    assert costs["1"].output_bytes == costs["2"].input_bytes == 2 * 2 * 4 * FLOAT_BYTES
    assert costs["2"].output_bytes == 2 * 4 * FLOAT_BYTES


def test_each_layer_gets_what_the_one_before_it_gives():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(2 * 4 * 4, 10))
    costs = measure(model, torch.rand(2, 3, 4, 4))
    assert [c.output_bytes // (2 * FLOAT_BYTES) for c in costs.values()] == [2 * 4 * 4, 2 * 4 * 4, 10]


def test_several_arguments_and_keywords_go_to_the_first_layer():
    class Both(nn.Module):
        def forward(self, a, b, *, scale):
            return (a + b) * scale

    costs = measure(nn.Sequential(Both(), nn.Linear(4, 4)), torch.ones(2, 4), torch.ones(2, 4), scale=torch.ones(2, 4))
    assert costs["0"].input_bytes == 3 * costs["0"].output_bytes


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout()),
        nn.Sequential(nn.Identity(), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), Twice(), Join()),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LSTM(2, 3)),
    ],
    ids=["in place", "no parameters first", "frozen", "pair", "recurrent"],
)
def test_any_layer_is_measured(model):
    costs = measure(model, torch.rand(3, 4))
    assert list(costs) == [name for name, _ in model.named_children()]
    for layer in costs.values():
        assert layer.forward_s > 0
        assert min(layer.backward_s, layer.input_grad_s, layer.weight_grad_s) >= 0
        assert min(layer.input_bytes, layer.output_bytes) > 0


# ---- nothing is left behind -----------------------------------------------------------------------------------------


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
        measure(model, sample, threads=1)
        assert torch.is_grad_enabled() == grad
    torch.testing.assert_close((model.state_dict(), sample), before, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert list(map(id, model.parameters())) == parameters
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * 5
    assert all(p.requires_grad for p in model.parameters())


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


# ---- sums and medians -----------------------------------------------------------------------------------------------


def test_the_costs_of_a_stage_are_the_sums_of_its_layers():
    a = LayerCosts(*range(1, 10))
    b = LayerCosts(10, 20, 30, 40, 6, 1, 70, 80, 0)
    assert stage_costs([[a, b], [], [b]]) == Costs(
        forward_s=(11, 0, 10),
        backward_s=(22, 0, 20),
        input_grad_s=(33, 0, 30),
        weight_grad_s=(44, 0, 40),
        activation_bytes=(77, 0, 70),
        input_bytes=(5, 0, 6),
        weight_grad_bytes=(88, 0, 80),
        weight_bytes=(9, 0, 0),
        output_bytes=(1, 0, 1),
    )


def trace(*spans):
    actions = [(Action(stage, kind, microbatch), seconds) for stage, kind, microbatch, seconds in spans]
    return Trace(tuple(Span(action, 0, 0.0, seconds, action.lane) for action, seconds in actions), 1)


def test_measured_costs_are_the_medians_of_what_the_actions_took():
    one = trace((0, Kind.F, 0, 1.0), (0, Kind.F, 1, 2.0), (0, Kind.B, 0, 5.0), (1, Kind.F, 0, 7.0))
    two = trace(
        (0, Kind.F, 0, 100.0), (0, Kind.B, 0, 7.0), (1, Kind.I, 0, 3.0), (1, Kind.W, 0, 4.0), (0, Kind.R, 0, 1.5)
    )
    found = measured_costs([one, two], 2)
    assert found.forward_s == (2.0, 7.0)
    assert found.backward_s == (6.0, 7.0)  # stage 1 ran in parts
    assert found.input_grad_s == (6.0, 3.0)  # stage 0 ran whole
    assert found.weight_grad_s == (0.0, 4.0)
    assert found.recompute_s == (1.5, 0.0)
    assert found.activation_bytes == (0, 0)


def test_sizes_of_measured_costs_and_the_parts_of_a_backward_come_from_the_profile():
    profiled = Costs((1, 1), (1, 1), (1, 3), activation_bytes=(3, 4), input_bytes=(5, 6), weight_grad_bytes=(7, 8))
    found = measured_costs([trace((0, Kind.F, 0, 2.0), (1, Kind.B, 0, 8.0))], 2, profiled)
    assert found.forward_s == (2.0, 0.0)
    assert (found.input_grad_s[1], found.weight_grad_s[1]) == (2.0, 6.0)
    assert (found.activation_bytes, found.input_bytes, found.weight_grad_bytes) == ((3, 4), (5, 6), (7, 8))
