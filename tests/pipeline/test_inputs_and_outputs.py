"""What goes in and comes out, hooks, and frozen layers."""

import copy
from collections import Counter, namedtuple

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from pipesched.testing import reference_step
from tests.support.models import EXACT
from tests.support.peer_cases import (
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


@pytest.mark.one_in(4)
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


@pytest.mark.one_in(8)
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


@pytest.mark.one_in(4)
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
