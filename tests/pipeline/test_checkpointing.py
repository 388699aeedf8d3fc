"""Checkpointing: what runs again, and what it then sees."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from pipesched import Numerics
from pipesched.testing import reference_step
from tests.support.peer_cases import (
    DEVICES,
    MODES,
    Function,
    assert_equal_bits,
    grads,
    linears,
    mse,
    pipeline,
    recomputed,
    rows,
)


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


@pytest.mark.one_in(6)
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
        numerics=Numerics(loss_reduction="sum"),
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
