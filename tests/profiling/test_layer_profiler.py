"""Costs of layers: exact sizes, and the order of times. No test depends on how long anything takes."""

import gc
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipesched
from pipesched import Costs
from pipesched.errors import InputError
from pipesched.profiling import profile_model
from pipesched.profiling.layer_profiler import MeasurementEffort, _Kind, measure_layers
from pipesched.simulation.layer_costs import LayerCosts, costs_of, stage_costs
from pipesched.simulation.layer_memory import LayerMemory

pytestmark = pytest.mark.usefixtures("thorough")

CPU = torch.device("cpu")
FLOAT_BYTES = 4


def measure(model, *args, threads=1, **kwargs):
    return measure_layers(dict(model.named_children()), (args, kwargs), CPU, threads)


class Twice(nn.Module):
    """Returns a pair of which one tensor needs no gradient."""

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
    assert second.memory.input_bytes == 2 * 5 * FLOAT_BYTES
    assert second.memory.output_bytes == 2 * 7 * FLOAT_BYTES
    assert second.memory.activation_bytes == 2 * 5 * FLOAT_BYTES  # its input
    assert second.memory.weight_grad_bytes == 0  # a small product is not left to W
    assert list(costs) == ["0", "1"]


def test_a_deferred_weight_gradient_keeps_the_input_and_the_output_gradient_of_its_product():
    costs = measure(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 200)), torch.ones(200, 100))["1"]
    assert costs.memory.weight_grad_bytes == 200 * (100 + 200) * FLOAT_BYTES
    assert costs.memory.left_input_bytes == 200 * 100 * FLOAT_BYTES
    assert costs.memory.deferred_gradient_bytes == 100 * 200 * FLOAT_BYTES  # not the bias
    assert costs.memory.gradient_bytes == (100 + 1) * 200 * FLOAT_BYTES


def test_transient_memory_is_counted_without_what_is_kept():
    costs = measure(
        nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 200, bias=False)), torch.ones(50, 100)
    )
    second, inputs, outputs, weights = costs["1"].memory, 50 * 100 * FLOAT_BYTES, 50 * 200 * FLOAT_BYTES, 80_000
    assert (second.activation_bytes, second.kept_input_bytes, second.kept_output_bytes) == (
        inputs,
        inputs,
        0,
    )
    assert second.forward_transient_bytes == outputs
    assert second.backward_transient_bytes == outputs + inputs + weights  # gradients; those of the weights are added
    assert second.first_backward_transient_bytes == second.backward_transient_bytes  # here they become .grad


def test_no_garbage_is_collected_while_memory_is_measured():
    """Garbage that is older than the measurement would count as memory that the layer frees."""
    collects: SimpleQueue[bool] = SimpleQueue()  # the profiler resets lists and sets to what they were
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda *_: collects.put(gc.isenabled()))
    measure(model, torch.ones(2, 4))
    assert {collects.get() for _ in range(collects.qsize())} == {False, True}
    assert gc.isenabled()


def test_what_a_layer_keeps_for_its_backward():
    costs = measure(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Identity()), torch.ones(2, 4))
    assert costs["1"].memory.activation_bytes == 2 * 4 * FLOAT_BYTES  # its output
    assert costs["2"].memory.activation_bytes == 0
    assert costs["2"].parameter_bytes == 0


def test_all_tensors_of_a_pair_count():
    costs = measure(nn.Sequential(nn.Linear(4, 4), Twice(), Join()), torch.ones(2, 4))
    assert costs["1"].memory.output_bytes == costs["2"].memory.input_bytes == 2 * 2 * 4 * FLOAT_BYTES
    assert costs["2"].memory.output_bytes == 2 * 4 * FLOAT_BYTES


def test_each_layer_gets_what_the_one_before_it_gives():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(2 * 4 * 4, 10))
    costs = measure(model, torch.rand(2, 3, 4, 4))
    assert [c.memory.output_bytes // (2 * FLOAT_BYTES) for c in costs.values()] == [2 * 4 * 4, 2 * 4 * 4, 10]


def test_several_arguments_and_keywords_go_to_the_first_layer():
    class Both(nn.Module):
        def forward(self, a, b, *, scale):
            return (a + b) * scale

    costs = measure(nn.Sequential(Both(), nn.Linear(4, 4)), torch.ones(2, 4), torch.ones(2, 4), scale=torch.ones(2, 4))
    assert costs["0"].memory.input_bytes == 3 * costs["0"].memory.output_bytes


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
        assert min(layer.memory.input_bytes, layer.memory.output_bytes) > 0


def test_layers_are_measured_under_the_callers_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        costs = measure(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4))
    assert costs["0"].memory.output_bytes == costs["1"].memory.input_bytes == 2 * 4 * 2


@pytest.mark.parametrize(("ranks_are", "here"), [("threads", False), ("processes", True)])
def test_layers_run_in_the_kind_of_thread_in_which_ranks_run(ranks_are, here):
    threads = set()

    class Noting(nn.Linear):
        def forward(self, x):
            threads.add(threading.get_ident())
            return super().forward(x)

    measure_layers({"layer": Noting(4, 4)}, ((torch.ones(2, 4),), {}), CPU, 1, MeasurementEffort(ranks_are=ranks_are))
    assert {thread == threading.get_ident() for thread in threads} == {here}


def test_a_profile_is_made_for_the_kind_of_ranks(tmp_path, monkeypatch):
    real, asked = profile_model.measure, []
    monkeypatch.setattr(profile_model, "measure", lambda *args: asked.append(args[-1].ranks_are) or real(*args))
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    for kind in ("threads", "processes", "processes"):  # the last one is in the cache
        pipesched.profile(model, sample, rows=[2], thorough=False, ranks_are=kind, cache=tmp_path)
    assert asked == ["threads", "processes"]
    with pytest.raises(InputError, match="ranks_are= must be 'threads' or 'processes'; got 'thread'"):
        pipesched.profile(model, sample, ranks_are="thread")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layers_on_a_device_are_measured_there():
    model = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.1), nn.Linear(256, 256))
    costs = measure_layers(dict(model.named_children()), ((torch.rand(64, 256),), {}), torch.device("cuda"), 1)
    assert all(layer.forward_s > 0 and layer.memory.activation_bytes > 0 for layer in costs.values())
    assert not any(parameter.is_cuda for parameter in model.parameters())


class Activated(nn.Module):
    """A function between two layers, and one after them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](torch.tanh(self.blocks[0](x))).exp()


@pytest.mark.parametrize(
    ("input_grad_s", "weight_grad_s", "both"), [(1, 2, (2, 4)), (3, 4, (3, 4)), (0, 3, (0, 6)), (0, 0, (0, 0))]
)
def test_two_parts_of_a_backward_take_no_less_than_the_whole(input_grad_s, weight_grad_s, both):
    """A smaller sum is noise and is scaled up."""
    seconds = {
        "forward_s": [2],
        "backward_s": [5, 6, 7],
        "input_grad_s": [input_grad_s],
        "weight_grad_s": [weight_grad_s],
    }
    subject = SimpleNamespace(seconds=seconds, waited={"forward_s": [], "backward_s": []})
    costs = _Kind(subjects=[subject]).costs()
    assert (costs.input_grad_s, costs.weight_grad_s) == both
    assert costs.backward_s == 6


def test_functions_between_layers_count_with_the_layer_before_them():
    graph = pipesched.graph_of(Activated(), torch.rand(8, 4))
    size = 8 * 4 * FLOAT_BYTES
    kept = {name: graph.nodes[name]["activation_bytes"] for name in graph}
    assert kept == {"blocks.0": 2 * size, "blocks.1": 2 * size}  # its input and the function's result


def test_a_layer_that_sleeps_waits_and_one_that_computes_does_not():
    class Sleep(nn.Module):
        def forward(self, x):
            time.sleep(0.002)
            return x

    costs = measure(nn.Sequential(nn.Linear(64, 64), Sleep()), torch.rand(64, 64))
    assert 0.001 < costs["1"].waiting_s <= costs["1"].forward_s + costs["1"].backward_s
    assert costs["0"].spread >= 0


def test_the_loss_counts_in_the_last_layer():
    def slow(output, target):
        time.sleep(0.01)
        return nn.functional.mse_loss(output, target)

    sample = torch.rand(2, 4)
    found = pipesched.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), sample, loss_fn=slow, target=sample, rows=[2])
    assert costs_of(found.graph(2), "0").forward_s < 0.01 < costs_of(found.graph(2), "1").forward_s


def test_an_optimizer_is_asked_what_it_takes_and_keeps():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[2].weight = layers[0].weight
    model = nn.Sequential(*layers)
    asked = {"rows": [2], "optimizer": lambda params: torch.optim.Adam(params, lr=0.1)}
    graph = pipesched.profile(model, torch.rand(2, 4), **asked).graph(2)
    trained = sum(parameter.numel() for parameter in model.parameters())
    states = sum(node["optimizer_bytes"] for _, node in graph.nodes(data=True))
    assert states == 2 * FLOAT_BYTES * trained + FLOAT_BYTES * len(list(model.parameters()))  # moments, and a count
    assert all(node["update_s"] > 0 for name, node in graph.nodes(data=True) if node["optimizer_bytes"])
    graph = pipesched.profile(model, torch.rand(2, 4), rows=[2], optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).graph(
        2
    )
    assert not any(node["optimizer_bytes"] for _, node in graph.nodes(data=True))


@pytest.mark.parametrize("missing", [{"loss_fn": nn.MSELoss()}, {"target": torch.rand(2, 4)}])
def test_a_loss_needs_a_target(missing):
    with pytest.raises(InputError, match="loss_fn= and target= must be passed together"):
        pipesched.profile(nn.Linear(4, 4), torch.rand(2, 4), **missing)


def test_the_costs_of_a_stage_are_the_sums_of_its_layers():
    memory = LayerMemory(input_bytes=5, output_bytes=6, activation_bytes=7, weight_grad_bytes=8)
    a = LayerCosts(forward_s=1, backward_s=2, input_grad_s=3, weight_grad_s=4, memory=memory, parameter_bytes=9)
    memory = LayerMemory(input_bytes=6, output_bytes=1, activation_bytes=70, weight_grad_bytes=80)
    b = LayerCosts(forward_s=10, backward_s=20, input_grad_s=30, weight_grad_s=40, memory=memory)
    assert stage_costs([[a, b], [], [b]]) == Costs(
        forward_s=(11, 0, 10),
        backward_s=(22, 0, 20),
        input_grad_s=(33, 0, 30),
        weight_grad_s=(44, 0, 40),
        activation_bytes=(77, 0, 71),  # the loss is assumed to keep as much as its input
        buffer_bytes=(0, 0, 128),  # and some scalars
        forward_transient_bytes=(0, 0, 7),  # the last stage's input, which no layer keeps, and the loss
        dropping_transient_bytes=(70, 0, 64),  # the need of one layer that keeps nothing, beyond the stage's input
        backward_transient_bytes=(0, 0, 2),
        first_backward_transient_bytes=(0, 0, 2),
        input_grad_transient_bytes=(11, 0, 2),
        weight_grad_transient_bytes=(0, 0, 0),
        input_bytes=(5, 0, 6),
        weight_grad_bytes=(88, 0, 80),
        weight_bytes=(9, 0, 0),
        output_bytes=(1, 0, 1),
    )
