"""Steps over micro-batches, and evaluation."""

import copy
import time
import warnings

import pytest
import torch
from torch import nn

from pipesched.testing import reference_step
from tests.support.models import synchronous_names
from tests.support.peer_cases import (
    DEVICES,
    MODES,
    Function,
    assert_equal_bits,
    grads,
    linears,
    mse,
    on_two_ranks,
    pipeline,
    rows,
)


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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", synchronous_names())
def test_loss_and_gradients_are_those_of_the_bare_model_on_the_whole_batch(schedule):
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


@pytest.mark.one_in(3)
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
