"""Behaviours that users of earlier pipeline libraries (torchgpipe, fairscale, DeepSpeed) rely on, under our names.

Each test is named after the behaviour. Where those libraries refuse something, or get it wrong silently, the test
shows that it works here.
"""

import copy
import gc
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, OrderedDict, namedtuple

import pytest
import torch
from models import EXACT, synchronous_names
from torch import nn

from pipesched import Kind, Pipeline, schedules
from pipesched.errors import ExecutionError
from pipesched.testing import reference_step

MODES = ["never", "always", "except_last"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is there")
needs_two_cuda = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices are there")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def mse(output, target):
    return (output - target).square().mean()


def linears(count=4, width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def rows(count=8, width=4, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def grads(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_equal_bits(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def recomputed(pipe):
    """How many micro-batches each stage recomputed in the last step."""
    again = Counter(span.action.stage for span in pipe.trace.spans if span.action.kind is Kind.R)
    return [again[stage] for stage in range(pipe.num_stages)]


def pipeline(model, sample, num_stages=2, device="cpu", **choices):
    """A pipeline with a stage a rank, cut evenly unless boundaries are given."""
    if "boundaries" not in choices:
        choices["boundaries"] = [len(model) * stage // num_stages for stage in range(1, num_stages)]
    return Pipeline(model, sample, devices=[device] * (len(choices["boundaries"]) + 1), **choices)


def on_two_ranks(model, sample, schedule, **choices):
    """A pipeline of as many stages as the schedule has on two ranks, cut evenly."""
    num_stages = 2 * schedules.get(schedule).chunks_per_rank
    boundaries = [len(model) * stage // num_stages for stage in range(1, num_stages)]
    return Pipeline(model, sample, devices=["cpu"] * 2, boundaries=boundaries, schedule=schedule, **choices)


class Function(nn.Module):
    """A layer made of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


# ---- what the wrapper shows of the model ----------------------------------------------------------------------------


def test_the_wrapper_exposes_the_models_own_parameters():
    model = linears()
    with pipeline(model, rows(2)) as pipe:
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_every_parameter_is_owned_by_exactly_one_stage():
    model = linears(5)
    with pipeline(model, rows(2), 3) as pipe:
        owned = Counter(id(p) for stage in pipe.partitions for p in stage.parameters())
    assert owned == dict.fromkeys(map(id, model.parameters()), 1)


def test_public_attributes_are_normalised():
    with Pipeline(
        linears(), rows(2), devices=("cpu", torch.device("cpu")), boundaries=(2,), num_microbatches=3
    ) as pipe:
        assert pipe.devices == [torch.device("cpu")] * 2
        assert pipe.boundaries == ["2"]
        assert pipe.num_microbatches == 3
        assert pipe.num_stages == 2
        assert pipe.checkpoint == "never"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_it_has_a_length_an_order_and_indices_like_the_sequential(num_stages):
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    with pipeline(nn.Sequential(a, b), rows(1, 1), num_stages) as pipe:
        assert len(pipe) == 2
        assert list(pipe) == [a, b]
        assert [pipe[0], pipe[1], pipe[-1], pipe[-2]] == [a, b, b, a]
        for outside in (2, -3):
            with pytest.raises(IndexError):
                pipe[outside]


def test_the_stages_hold_the_layers_themselves():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    with pipeline(nn.Sequential(a, b), rows(1, 1)) as pipe:
        assert all(isinstance(stage, nn.Sequential) for stage in pipe.partitions)
        assert [list(stage) for stage in pipe.partitions] == [[a], [b]]


def test_children_keep_their_names_and_are_no_attributes():
    model = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1)))
    with pipeline(model, rows(1, 1), boundaries=["b"]) as pipe:
        assert list(pipe.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert pipe.boundaries == ["b"]
        with pytest.raises(AttributeError):
            _ = pipe.a


def test_the_state_dict_is_interchangeable_with_the_bare_models():
    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))

    trained, bare, back = build(0), build(1), build(2)
    with (
        pipeline(trained, rows(2), loss_fn=mse, num_microbatches=2) as pipe,
        pipeline(back, rows(2), loss_fn=mse) as other,
    ):
        pipe.step(rows(), target=rows(seed=2))
        assert list(pipe.state_dict()) == list(bare.state_dict())
        bare.load_state_dict(pipe.state_dict())
        other.load_state_dict(bare.state_dict())
    assert_equal_bits(bare.state_dict(), trained.state_dict())
    assert_equal_bits(back.state_dict(), trained.state_dict())


def test_a_state_dict_that_does_not_fit_is_refused_as_torch_refuses_it():
    with pipeline(linears(), rows(2)) as pipe, pytest.raises(RuntimeError, match=r"Missing key.*3\.weight"):
        pipe.load_state_dict(linears(3).state_dict())


def test_the_parameters_of_a_loss_module_are_trained_named_and_saved():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return mse(output * self.scale, target)

    loss_fn = Scale()
    with pipeline(linears(), rows(2), loss_fn=loss_fn) as pipe:
        pipe.step(rows(), target=rows(seed=2))
        assert loss_fn.scale.grad is not None
        assert [name for name, _ in pipe.named_parameters()][-1] == "loss_fn.scale"
        state = copy.deepcopy(pipe.state_dict())
        state["loss_fn.scale"].fill_(3)
        pipe.load_state_dict(state)
        assert loss_fn.scale.item() == 3


@pytest.mark.parametrize(
    "place", ["cpu", 0, torch.device("cpu"), torch.zeros(1)], ids=["str", "int", "device", "tensor"]
)
def test_moving_to_another_device_is_denied(place):
    with pipeline(linears(), rows(2)) as pipe:
        with pytest.raises(TypeError, match="stay on their devices"):
            pipe.to(place)
        with pytest.raises(TypeError, match="stay on their devices"):
            pipe.to(device=place)
        with pytest.raises(TypeError, match="stay on their devices"):
            pipe.to(torch.float64, place)


def test_the_dtype_may_change_also_between_steps():
    model, x, y = linears(), rows(), rows(seed=2)
    with pipeline(model, x[:2], loss_fn=mse, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        assert pipe.to(torch.float64) is pipe
        assert pipe.step(x.double(), target=y.double()).dtype is torch.float64
    assert all(p.dtype is p.grad.dtype is torch.float64 for p in model.parameters())


def test_an_empty_sequential_is_the_identity():
    with Pipeline(nn.Sequential(), rows(2), devices=["cpu"], num_microbatches=2) as pipe:
        assert_equal_bits(pipe(rows()), rows())
        pair = rows(), rows(seed=2)
        assert_equal_bits(pipe(pair), pair)
        assert pipe((rows(), "text"))[1] == "text"


def test_devices_that_no_stage_needs_are_dropped():
    with Pipeline(linears(), rows(2), devices=["cpu"] * 5, boundaries=[1, 2]) as pipe:
        assert len(pipe.devices) == 3
        assert pipe.num_stages == 3
        assert len(pipe.plan.program.orders) == 3


def test_nested_sequentials_are_cut_inside_and_keep_their_names():
    model = nn.Sequential(linears(2), linears(2, seed=1))
    with pipeline(model, rows(2), boundaries=["0.1", "1.1"], loss_fn=mse) as pipe:
        assert pipe.plan.stages == (("0.0",), ("0.1", "1.0"), ("1.1",))
        torch.testing.assert_close(pipe(rows()), model(rows()))


# ---- micro-batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "microbatches", "expected"), [(7, 4, [2, 2, 2, 1]), (2, 4, [1, 1]), (1, 4, [1])])
def test_any_batch_size_runs_without_a_warning(batch, microbatches, expected):
    sizes = []
    model = nn.Sequential(Function(lambda x: sizes.append(len(x)) or x), nn.Linear(4, 4))
    x, y = rows(batch), rows(batch, seed=2)
    with pipeline(model, x[:1], loss_fn=mse, num_microbatches=microbatches) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes.clear()
        loss, output = pipe.step(x, target=y, return_outputs=True)
    assert sizes == expected
    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(loss, mse(model(x), y).detach())


def test_batch_size_and_shape_may_change_from_step_to_step():
    seen = []
    model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), Function(lambda x: seen.append(tuple(x.shape)) or x))
    with pipeline(model, torch.zeros(1, 1, 5), loss_fn=mse, num_microbatches=2) as pipe:
        seen.clear()
        for batch, length in [(4, 5), (2, 9), (3, 7)]:
            pipe.step(torch.ones(batch, 1, length), target=torch.zeros(batch, 2, length))
    assert seen == [(2, 2, 5)] * 2 + [(1, 2, 9)] * 2 + [(2, 2, 7), (1, 2, 7)]


@pytest.mark.parametrize("schedule", synchronous_names())
def test_transparency(schedule):
    """Loss and gradients are those of the bare model on the whole batch."""
    model, x, y = linears(8), rows(), rows(seed=2)
    bare = copy.deepcopy(model)
    whole = mse(bare(x), y)
    whole.backward()
    with on_two_ranks(model, x[:2], schedule, loss_fn=mse, num_microbatches=4) as pipe:
        loss = pipe.step(x, target=y)
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(grads(model), grads(bare))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_stage_averages_its_gradients_once(microbatches):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    for layer in model:
        nn.init.ones_(layer.weight)
    with pipeline(model, rows(1, 1), 4, loss_fn=lambda out, _: out.mean(), num_microbatches=microbatches) as pipe:
        pipe.step(torch.ones(4, 1), target=torch.zeros(4))
    assert [layer.weight.grad.item() for layer in model] == [1.0] * 4


def test_gradients_add_up_over_steps_as_over_backwards():
    model = linears()
    with pipeline(model, rows(2), loss_fn=mse) as pipe:
        pipe.step(rows(), target=rows(seed=2))
        once = {name: grad.clone() for name, grad in grads(model).items()}
        pipe.step(rows(), target=rows(seed=2))
    torch.testing.assert_close(grads(model), {name: 2 * grad for name, grad in once.items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_parameters_gradients_and_buffers_after_a_step_are_those_of_one_device(device, mode, microbatches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4)).to(device)
    bare = copy.deepcopy(model)
    x, y = rows(16).to(device), rows(16, seed=2).to(device)
    optimizers = [torch.optim.Adam(module.parameters()) for module in (model, bare)]
    with pipeline(
        model, x[:2], 3, device=device, loss_fn=mse, checkpoint=mode, num_microbatches=microbatches, seed=5
    ) as pipe:
        loss = pipe.step(x, target=y)
    expected = reference_step(bare, x, loss_fn=mse, target=y, num_microbatches=microbatches, seed=5)
    for optimizer in optimizers:
        optimizer.step()
    assert_equal_bits(loss, expected)
    assert_equal_bits(grads(model), grads(bare))
    assert_equal_bits(model.state_dict(), bare.state_dict())


def test_the_fast_stage_does_not_run_ahead_of_a_slow_one():
    """What is in flight is bounded by the schedule, not by how fast a stage is."""
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda x: time.sleep(0.005) or x), nn.Linear(4, 4))
    with pipeline(model, rows(1), boundaries=[1], loss_fn=mse, schedule="1f1b", num_microbatches=8) as pipe:
        pipe.step(rows(), target=rows(seed=2))
        assert list(pipe.trace.peak_in_flight) == [2, 1]


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_no_grad_leaves_no_graph_and_holds_in_the_ranks_threads():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda x: seen.append((torch.is_grad_enabled(), x.grad_fn)) or x))
    with pipeline(model, rows(2), loss_fn=mse, checkpoint="always") as pipe:
        seen.clear()
        with torch.no_grad():
            output = pipe(rows())
        loss = pipe.evaluate(rows(), target=rows(seed=2))
    assert not output.requires_grad
    assert not loss.requires_grad
    assert set(seen) == {(False, None)}


def test_evaluation_equals_the_bare_model_and_touches_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).eval()
    before = copy.deepcopy(model.state_dict())
    with pipeline(model, rows(2), loss_fn=mse) as pipe:
        assert not pipe.training
        loss, output = pipe.evaluate(rows(7), target=rows(7, seed=2), return_outputs=True)
    torch.testing.assert_close(output, model(rows(7)).detach())
    torch.testing.assert_close(loss, mse(model(rows(7)), rows(7, seed=2)).detach())
    assert set(grads(model).values()) == {None}
    assert_equal_bits(model.state_dict(), before)


def test_evaluation_checkpoints_nothing():
    calls = []
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda x: calls.append(None) or x))
    with pipeline(model, rows(2), loss_fn=mse, checkpoint="always", num_microbatches=2) as pipe:
        calls.clear()
        pipe.evaluate(rows(), target=rows(seed=2))
        assert len(calls) == 2
        pipe.step(rows(), target=rows(seed=2))
        assert len(calls) == 2 + 4


def test_evaluation_runs_in_inference_mode():
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda x: seen.append(torch.is_inference_mode_enabled()) or x))
    with pipeline(model, rows(2), num_microbatches=2) as pipe, torch.inference_mode():
        seen.clear()
        assert pipe(rows()).is_inference()
    assert seen == [True, True]


def test_train_and_eval_set_every_stages_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout())
    with pipeline(model, rows(2)) as pipe:
        assert pipe.eval() is pipe
        assert not any(module.training for module in model.modules())
        assert pipe.train().training
        assert all(module.training for module in model.modules())


# ---- checkpointing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "mode", "expected"),
    [
        ("gpipe", "never", [0, 0]),
        ("gpipe", "always", [3, 3]),
        ("gpipe", "except_last", [2, 2]),
        ("1f1b", "never", [0, 0]),
        ("1f1b", "always", [3, 3]),
        ("1f1b", "except_last", [2, 0]),
    ],
)
def test_checkpoint_modes_recompute_as_many_microbatches(schedule, mode, expected):
    """except_last spares those whose backward is the next: each rank's first, and all of 1F1B's last stage."""
    with pipeline(linears(), rows(1), loss_fn=mse, schedule=schedule, checkpoint=mode, num_microbatches=3) as pipe:
        pipe.step(rows(), target=rows(seed=2))
        assert recomputed(pipe) == expected


@pytest.mark.parametrize(("mode", "expected"), [("never", [0, 0]), ("always", [1, 1]), ("except_last", [0, 0])])
def test_all_checkpoint_modes_are_legal_with_one_microbatch(mode, expected):
    with pipeline(linears(), rows(1), loss_fn=mse, checkpoint=mode, num_microbatches=1) as pipe:
        pipe.step(rows(), target=rows(seed=2))
        assert recomputed(pipe) == expected


def test_except_last_counts_the_microbatches_that_there_are_not_those_asked_for():
    with pipeline(linears(), rows(1), loss_fn=mse, schedule="gpipe", checkpoint="except_last", num_microbatches=8) as p:
        p.step(rows(1), target=rows(1, seed=2))
        assert recomputed(p) == [0, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_layers_run_once_and_recomputed_ones_twice(mode, schedule):
    calls = Counter()
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), Function(lambda x, i=i: calls.update([i]) or x)) for i in range(2))
    )
    with pipeline(model, rows(2), boundaries=["1.0"], loss_fn=mse, schedule=schedule, checkpoint=mode) as pipe:
        calls.clear()
        pipe.step(rows(), target=rows(seed=2))
        again = recomputed(pipe)
    assert calls == {stage: 8 + again[stage] for stage in range(2)}
    assert (mode == "never") == (again == [0, 0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_masks_of_a_recomputation_are_those_of_the_forward(mode, schedule):
    """y is zero where the gradient is, with two stages and ten micro-batches in threads."""

    class Dropouts(nn.Module):
        def forward(self, x):
            for _ in range(10):
                x = nn.functional.dropout(x, 0.01)
            return x

    model = nn.Sequential(Dropouts(), Dropouts())
    x = torch.ones(10, 100, requires_grad=True)
    with pipeline(
        model,
        x[:1].detach(),
        loss_fn=lambda y, _: y.sum(),
        loss_reduction="sum",
        schedule=schedule,
        checkpoint=mode,
        num_microbatches=10,
    ) as pipe:
        _, y = pipe.step(x, target=torch.zeros(10), return_outputs=True)
        assert 0 < (y == 0).sum() < y.numel()
        assert torch.equal(y == 0, x.grad == 0)
        x.grad = None
        y = pipe(x)
        y.sum().backward()
        assert torch.equal(y == 0, x.grad == 0)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_with_dropout_are_the_same_with_and_without_checkpoint(device):
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5))
    results = []
    for mode in MODES:
        model = copy.deepcopy(original)
        with pipeline(model, rows(2), device=device, loss_fn=mse, checkpoint=mode, seed=1) as pipe:
            pipe.step(rows(), target=rows(seed=2))
        results.append(grads(model))
    assert_equal_bits(results[1], results[0])
    assert_equal_bits(results[2], results[0])


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_statistics_are_updated_once_a_microbatch(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    bare = copy.deepcopy(model)
    with pipeline(model, rows(2), loss_fn=mse, checkpoint=mode, num_microbatches=4) as pipe:
        pipe.step(rows(), target=rows(seed=2))
    for part in rows().tensor_split(4):
        bare(part)
    assert model[1].num_batches_tracked.item() == 4
    assert_equal_bits(dict(model.named_buffers()), dict(bare.named_buffers()))


@pytest.mark.parametrize("mode", MODES)
def test_a_first_stage_whose_input_needs_no_gradient_still_trains(mode):
    model = linears(2)
    with pipeline(model, rows(2), loss_fn=mse, checkpoint=mode) as pipe:
        pipe.step(rows(), target=rows(seed=2))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_a_bool_tensor_passes_between_stages(mode, schedule):
    class Mask(nn.Module):
        def forward(self, x):
            return x, x > 0

    class Use(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair):
            x, mask = pair
            assert mask.dtype is torch.bool
            return self.linear(x) * mask

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Mask(), Use())
    bare = copy.deepcopy(model)
    with pipeline(
        model, rows(2), boundaries=[2], loss_fn=mse, schedule=schedule, checkpoint=mode, num_microbatches=4
    ) as pipe:
        pipe.step(rows(), target=rows(seed=2))
    reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
    assert_equal_bits(grads(model), grads(bare))


@pytest.mark.parametrize("mode", MODES)
def test_an_output_that_needs_no_gradient_may_stand_beside_one_that_does(mode):
    model = nn.Sequential(
        nn.Linear(4, 4), Function(lambda x: (x * 2, x.detach())), Function(lambda pair: (pair[0] + pair[1], pair[1]))
    )
    bare = copy.deepcopy(model)
    x = rows().requires_grad_()
    with pipeline(model, rows(2), boundaries=[2], checkpoint=mode, num_microbatches=2) as pipe:
        y, plain = pipe(x)
        assert y.requires_grad
        assert not plain.requires_grad
        y.sum().backward()
        pipe_grad, x.grad = x.grad, None
    bare(x)[0].sum().backward()
    torch.testing.assert_close(pipe_grad, x.grad)
    torch.testing.assert_close(grads(model), grads(bare))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_autograd_functions_that_return_their_input_work_at_boundaries(mode, schedule):
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    model = nn.Sequential(nn.Linear(4, 4), Function(Identity.apply), Function(Identity.apply), nn.Linear(4, 4))
    x = torch.rand(8, 4, requires_grad=True)
    with pipeline(model, rows(2), boundaries=[2], loss_fn=mse, checkpoint=mode, schedule=schedule) as pipe:
        y = pipe(x)
        torch.testing.assert_close(y, model[3](model[0](x)))
        y.sum().backward()
        assert x.grad is not None
        pipe.step(x, target=rows())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_an_in_place_relu_at_a_boundary_gives_the_right_gradients(mode, schedule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    bare = copy.deepcopy(model)
    x, y = rows().requires_grad_(), rows(seed=2)
    with pipeline(
        model, rows(2), 4, boundaries=[1, 2, 3], loss_fn=mse, schedule=schedule, checkpoint=mode, num_microbatches=4
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    pipe_grad, x.grad = x.grad, None
    for _ in range(2):
        reference_step(bare, x, loss_fn=mse, target=y, num_microbatches=4)
    assert_equal_bits(grads(model), grads(bare))
    assert_equal_bits(pipe_grad, x.grad)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_without_gradient_that_a_layer_modifies_is_modified_once(mode):
    """add_ is not idempotent: a recomputation from the modified input would be wrong, silently."""

    def add_and_multiply(pair):
        x, other = pair
        other.add_(1)
        return x * other

    model = nn.Sequential(Function(add_and_multiply), nn.Identity())
    x, other = torch.ones(2, requires_grad=True), torch.ones(2)
    with pipeline(model, ((x.detach(), other),), checkpoint=mode, num_microbatches=1) as pipe:
        pipe((x, other)).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert other.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_holds_in_the_ranks_threads_and_in_recomputation(mode, enabled):
    seen = []
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        Function(lambda x: seen.append((x.dtype, torch.is_autocast_enabled("cpu"))) or x),
    )
    bare = copy.deepcopy(model)
    with pipeline(model, rows(2), boundaries=[1], loss_fn=mse, checkpoint=mode, num_microbatches=4) as pipe:
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pipe.step(rows(), target=rows(seed=2))
        assert set(seen) == {(torch.bfloat16 if enabled else torch.float32, enabled)}
        assert len(seen) == 4 + recomputed(pipe)[1]
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
    assert_equal_bits(grads(model), grads(bare))


def test_autocast_ends_with_the_step_that_ran_under_it():
    model = linears(2)
    with pipeline(model, rows(2), loss_fn=mse) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            assert pipe(rows()).dtype is torch.bfloat16
        assert pipe(rows()).dtype is torch.float32


# ---- inputs and outputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_goes_in_and_comes_out_and_gradients_reach_both(mode):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, pair):
            return self.a(pair[0]), self.b(pair[1])

    model = nn.Sequential(Two(), Two())
    a, b = (torch.rand(10, 1, requires_grad=True) for _ in range(2))
    with Pipeline(
        model, ((a[:2].detach(), b[:2].detach()),), devices=["cpu"] * 2, boundaries=[1], checkpoint=mode
    ) as pipe:
        out = pipe((a, b))
        assert isinstance(out, tuple)
        (out[0].mean() + out[1].mean()).backward()
    assert a.grad.abs().sum() > 0
    assert b.grad.abs().sum() > 0
    assert all(p.grad is not None for p in model.parameters())


def test_a_tuple_of_one_stays_a_tuple():
    model = nn.Sequential(nn.Linear(1, 1), Function(lambda x: (x,)), Function(lambda only: (only[0] * 2,)))
    a = torch.rand(10, 1, requires_grad=True)
    with pipeline(model, rows(1, 1), boundaries=[2]) as pipe:
        (out,) = pipe(a)
        out.mean().backward()
    assert a.grad is not None
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_several_arguments_and_keywords_are_supported(schedule):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a, b, *, scale, shift=0.0):
            return self.linear(a + b) * scale + shift

    torch.manual_seed(0)
    model = nn.Sequential(Both(), nn.Linear(4, 4))
    bare = copy.deepcopy(model)
    a, b, scale = rows(), rows(seed=3), rows(seed=4)
    arguments = {"target": rows(seed=2), "scale": scale, "shift": 0.5}
    with Pipeline(
        model, {"a": a, "b": b, "scale": scale}, loss_fn=mse, devices=["cpu"] * 2, schedule=schedule, num_microbatches=4
    ) as pipe:
        loss = pipe.step(a, b, **arguments)
    expected = reference_step(bare, a, b, loss_fn=mse, num_microbatches=4, **arguments)
    assert_equal_bits(loss, expected)
    assert_equal_bits(grads(model), grads(bare))


Point = namedtuple("Point", ["x", "label"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, "text"),
        lambda x: {"x": x, "none": None, "numbers": [1, 2.5]},
        lambda x: [x, (x.detach(), {"deep": x * 2})],
        lambda x: Point(x, "named"),
        lambda x: (x, torch.arange(3), x.new_zeros(0), x.detach().t()),
    ],
    ids=["text", "dict", "nested", "namedtuple", "odd tensors"],
)
@pytest.mark.parametrize("mode", MODES)
def test_any_tree_of_tensors_and_values_passes_between_stages(wrap, mode):
    """Structure, plain values, dtypes, strides and None arrive as they left."""
    seen = []

    def unwrap(value):
        seen.append(torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: (t.dtype, t.stride()), value))
        return value["x"] if isinstance(value, dict) else value[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Function(wrap), Function(unwrap), nn.Linear(4, 4))
    bare = copy.deepcopy(model)
    with pipeline(model, rows(2), boundaries=[2], loss_fn=mse, checkpoint=mode, num_microbatches=2) as pipe:
        seen.clear()
        pipe.step(rows(), target=rows(seed=2))
        ours = list(seen)
    seen.clear()
    reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=2)
    assert [value for value in ours if value not in seen] == []
    assert_equal_bits(grads(model), grads(bare))


def test_strings_and_other_values_may_be_inputs_and_outputs():
    model = nn.Sequential(Function(lambda x, how: (x, how.upper())), Function(lambda pair: pair))
    with Pipeline(model, (rows(2), "a"), devices=["cpu"] * 2, boundaries=[1]) as pipe:
        x, how = pipe(rows(), "abc")
    assert how == "ABC"
    assert_equal_bits(x, rows())


def test_the_models_own_loss_counts_where_there_is_no_loss_function():
    for end in (lambda x: x.square().mean(), lambda x: {"loss": x.square().mean(), "logits": x}):
        model = nn.Sequential(nn.Linear(4, 4), Function(end))
        with pipeline(model, rows(2), num_microbatches=2) as pipe:
            loss = pipe.step(rows())
        torch.testing.assert_close(loss, model[0](rows()).square().mean().detach())
        assert model[0].weight.grad is not None


def test_gradients_reach_a_graph_in_front_of_the_pipeline():
    before, model = nn.Linear(4, 4), linears(2)
    with pipeline(model, rows(2), loss_fn=mse) as pipe:
        pipe.step(before(rows()), target=rows(seed=2))
    ours, before.weight.grad = before.weight.grad, None
    mse(model(before(rows())), rows(seed=2)).backward()
    torch.testing.assert_close(ours, before.weight.grad)


def test_open_passes_may_overlap_and_go_backward_in_any_order():
    model = linears(2)
    bare = copy.deepcopy(model)
    x, y = rows(), rows(seed=2)
    with pipeline(model, rows(2), checkpoint="always") as pipe:
        first, second = pipe(x), pipe(y)
        first.square().sum().backward()
        second.sum().backward()
    bare(x).square().sum().backward()
    bare(y).sum().backward()
    torch.testing.assert_close(grads(model), grads(bare))


# ---- hooks and frozen parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("mode", MODES)
def test_a_hook_sees_each_gradient_once(schedule, mode):
    """A tensor hook once a micro-batch, with what that micro-batch adds; so does a post-accumulate hook."""
    unsqueeze = Function(lambda x: x.unsqueeze(-1))
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), unsqueeze, nn.Conv1d(4, 4, 1))
    seen, accumulated = {}, Counter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.update([name]))
    with on_two_ranks(model, rows(2), schedule, loss_fn=mse, checkpoint=mode, num_microbatches=4) as pipe:
        for _ in range(2):
            seen.clear()
            accumulated.clear()
            pipe.zero_grad()
            pipe.step(rows(), target=rows(seed=2).unsqueeze(-1))
            for name, grad in grads(model).items():
                assert len(seen[name]) == accumulated[name] == 4
                total = seen[name][0]
                for part in seen[name][1:]:
                    total = total + part
                assert_equal_bits(grad, total)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_module_hooks_fire_once_a_microbatch(schedule):
    model, fired = linears(2), Counter()
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, i=index: fired.update([f"pre {i}"]))
        layer.register_forward_hook(lambda *_, i=index: fired.update([f"forward {i}"]))
        layer.register_full_backward_hook(lambda *_, i=index: fired.update([f"backward {i}"]))
    with pipeline(model, rows(2), loss_fn=mse, schedule=schedule, num_microbatches=4) as pipe:
        fired.clear()
        pipe.step(rows().requires_grad_(), target=rows(seed=2))
    assert set(fired.values()) == {4}
    assert len(fired) == 6


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("frozen", [[0], [1], [3], [0, 1], [2, 3]])
def test_frozen_layers_get_no_gradient_and_the_others_the_right_one(frozen, schedule):
    model = linears()
    for index in frozen:
        model[index].requires_grad_(False)
    bare = copy.deepcopy(model)
    with pipeline(model, rows(2), loss_fn=mse, schedule=schedule, checkpoint="always", num_microbatches=4) as pipe:
        for _ in range(2):
            pipe.step(rows(), target=rows(seed=2))
    for _ in range(2):
        reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
    assert_equal_bits(grads(model), grads(bare))
    assert all((model[index].weight.grad is None) == (index in frozen) for index in range(4))


# ---- errors in a stage ----------------------------------------------------------------------------------------------


class Oops(Exception):
    """A user's own error."""


class Raising(nn.Module):
    """Raises in its n-th call, counted from zero, once it is armed."""

    def __init__(self, call=0):
        super().__init__()
        self.call, self.calls, self.armed = call, 0, False

    def forward(self, x):
        if self.armed:
            self.calls += 1
            if self.calls == self.call + 1:
                raise Oops("the 7th fuse has blown")
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_an_exception_keeps_its_type_and_traceback_and_says_where_it_happened(schedule):
    fuse = Raising(call=2)
    with pipeline(
        nn.Sequential(nn.Linear(4, 4), fuse), rows(2), loss_fn=mse, schedule=schedule, num_microbatches=4
    ) as pipe:
        fuse.armed = True
        with pytest.raises(Oops, match="the 7th fuse") as caught:
            pipe.step(rows(), target=rows(seed=2))
    assert any(frame.name == "forward" and frame.filename == __file__ for frame in traceback.extract_tb(caught.tb))
    (note,) = caught.value.__notes__
    assert re.search(r"1F2 \(stage 1, micro-batch 2\), rank 1", note)


def test_an_exception_in_a_backward_says_where_it_happened():
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Oops

    model = nn.Sequential(nn.Linear(4, 4), Function(Refuse.apply))
    with (
        Pipeline(model, rows(2), devices=["cpu"] * 2, boundaries=[1], loss_fn=mse) as pipe,
        pytest.raises(Oops) as caught,
    ):
        pipe.step(rows(), target=rows(seed=2))
    assert "1B0 (stage 1, micro-batch 0), rank 1" in caught.value.__notes__[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_an_exception_nothing_hangs_and_the_next_step_is_right(at, schedule):
    fuse, layers = Raising(call=1), list(linears(3))
    layers.insert(at + 1, fuse)
    model = nn.Sequential(*layers)
    bare = copy.deepcopy(model)
    with pipeline(model, rows(2), 3, loss_fn=mse, schedule=schedule, checkpoint="always", num_microbatches=4) as pipe:
        fuse.armed = True
        with pytest.raises(Oops):
            pipe.step(rows(), target=rows(seed=2))
        fuse.armed = False
        pipe.zero_grad()
        loss = pipe.step(rows(), target=rows(seed=2))
    assert_equal_bits(loss, reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4))
    assert_equal_bits(grads(model), grads(bare))


def test_an_exception_stops_the_other_ranks_early():
    """The first stage does not run its 500 micro-batches, of 2 ms each, to the end."""
    calls, fuse = Counter(), Raising()
    model = nn.Sequential(Function(lambda x: calls.update(["first"]) or time.sleep(0.002) or x), fuse, nn.Linear(4, 4))
    with pipeline(model, rows(1), boundaries=[1], loss_fn=mse, schedule="gpipe", num_microbatches=500) as pipe:
        calls.clear()
        fuse.armed = True
        with pytest.raises(Oops):
            pipe.step(rows(500), target=rows(500))
    assert calls["first"] < 500


def test_one_step_at_a_time():
    """A layer that calls step gets an error; the step under way is not disturbed."""
    caught = []

    def reenter(x):
        if pipes and not caught:
            try:
                pipes[0].step(rows(), target=rows(seed=2))
            except ExecutionError as error:
                caught.append(str(error))
        return x

    pipes = []
    model = nn.Sequential(nn.Linear(4, 4), Function(reenter), nn.Linear(4, 4))
    with pipeline(model, rows(2), loss_fn=mse, num_microbatches=4) as pipe:
        pipes.append(pipe)
        loss = pipe.step(rows(), target=rows(seed=2))
        pipes.clear()
    assert len(caught) == 1
    assert "one step at a time" in caught[0]
    assert_equal_bits(
        loss, reference_step(copy.deepcopy(model), rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
    )


def test_a_second_thread_may_not_step_at_the_same_time():
    inside, leave = threading.Event(), threading.Event()

    def block(x):
        if blocking:
            inside.set()
            assert leave.wait(30)
        return x

    blocking = []
    with pipeline(nn.Sequential(nn.Linear(4, 4), Function(block)), rows(2), loss_fn=mse) as pipe:
        blocking.append(True)
        other = threading.Thread(target=lambda: pipe.step(rows(), target=rows(seed=2)))
        other.start()
        assert inside.wait(30)
        try:
            with pytest.raises(ExecutionError, match="one step at a time"):
                pipe.step(rows(), target=rows(seed=2))
        finally:
            leave.set()
            other.join()


# ---- threads and lives ----------------------------------------------------------------------------------------------


def threads_of(build):
    """What build returns, and the threads that it started."""
    before = set(threading.enumerate())
    built = build()
    return built, set(threading.enumerate()) - before


def test_threads_live_from_construction_to_close():
    pipe, threads = threads_of(lambda: pipeline(linears(), rows(2), 3, loss_fn=mse))
    assert len(threads) == 3
    for _ in range(3):
        _, more = threads_of(lambda: pipe.step(rows(), target=rows(seed=2)))
        assert not more
    pipe.close()
    assert not any(thread.is_alive() for thread in threads)
    pipe.close()


def test_every_rank_computes_in_a_thread_of_its_own_also_on_one_device():
    seen = {}
    model = nn.Sequential(*(Function(lambda x, i=i: seen.setdefault(i, threading.get_ident()) and x) for i in range(3)))
    with pipeline(model, rows(2), 3) as pipe, torch.no_grad():
        pipe(rows())
    assert len(set(seen.values()) | {threading.get_ident()}) == 4


@pytest.mark.parametrize("after", ["nothing", "a step", "an open pass", "an error"])
def test_dropping_a_pipeline_ends_its_threads(after):
    fuse = Raising()
    pipe, threads = threads_of(
        lambda: pipeline(nn.Sequential(nn.Linear(4, 4), fuse), rows(2), loss_fn=mse, num_microbatches=2)
    )
    if after == "a step":
        pipe.step(rows(), target=rows(seed=2))
    elif after == "an open pass":
        pipe(rows())
    elif after == "an error":
        fuse.armed = True
        with pytest.raises(Oops):
            pipe.step(rows(), target=rows(seed=2))
    del pipe
    gc.collect()
    for thread in threads:
        thread.join(timeout=30)
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


def test_a_with_block_that_raises_closes_the_pipeline():
    def use():
        with pipeline(linears(), rows(2), loss_fn=mse):
            raise Oops

    before = set(threading.enumerate())
    with pytest.raises(Oops):
        use()
    assert set(threading.enumerate()) == before


def test_a_program_that_forgets_to_close_still_ends():
    script = """
import torch, pipesched
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
pipe = pipesched.Pipeline(model, torch.ones(1, 2), devices=["cpu"] * 2, loss_fn=torch.nn.functional.mse_loss)
pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
print("ready")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


def test_several_pipelines_live_and_step_at_once():
    models = [linears(seed=seed) for seed in range(3)]
    bares = copy.deepcopy(models)
    pipes = [
        pipeline(model, rows(2), loss_fn=mse, schedule=name, num_microbatches=4)
        for model, name in zip(models, ["gpipe", "1f1b", "zb-h1"], strict=True)
    ]
    try:
        users = [
            threading.Thread(target=lambda p=pipe: [p.step(rows(), target=rows(seed=2)) for _ in range(5)])
            for pipe in pipes
        ]
        for user in users:
            user.start()
        for user in users:
            user.join()
    finally:
        for pipe in pipes:
            pipe.close()
    for model, bare in zip(models, bares, strict=True):
        for _ in range(5):
            reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
        assert_equal_bits(grads(model), grads(bare))


def test_two_pipelines_may_share_a_model_and_cut_it_differently():
    model = linears()
    with (
        pipeline(model, rows(2), boundaries=[1], loss_fn=mse, num_microbatches=4) as first,
        pipeline(model, rows(2), boundaries=[2, 3], loss_fn=mse, schedule="gpipe", num_microbatches=4) as second,
    ):
        results = []
        for pipe in (first, second, first):
            pipe.zero_grad()
            loss = pipe.step(rows(), target=rows(seed=2))
            results.append({name: grad.clone() for name, grad in grads(model).items()} | {"loss": loss})
    assert_equal_bits(results[1], results[0])
    assert_equal_bits(results[2], results[0])


# ---- balance and profiling ------------------------------------------------------------------------------------------


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
    with Pipeline(model, rows(1), devices=["cpu"] * 2) as pipe:
        assert [len(stage) for stage in pipe.partitions] == [4, 2]


def test_balancing_runs_every_layer_on_what_the_one_before_it_gives():
    shapes = []

    class Flatten(nn.Module):
        def forward(self, x):
            shapes.append(tuple(x.shape))
            return x.flatten(1)

    model = nn.Sequential(nn.Conv2d(3, 2, 1), Flatten(), nn.Linear(128, 10))
    with Pipeline(model, torch.rand(1, 3, 8, 8), devices=["cpu"] * 2) as pipe:
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

    with Pipeline(nn.Sequential(*(Twin() for _ in range(4))), ((rows(2), rows(2)),), devices=["cpu"] * 2) as pipe:
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
    with Pipeline(model, sample, devices=["cpu"] * 3) as pipe:
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
    with Pipeline(model, rows(2), devices=["cpu"] * 2):
        assert modes == {True}
    assert not any(module.training for module in model.modules())


# ---- CUDA devices ---------------------------------------------------------------------------------------------------


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
