"""Modules that draw random numbers: the same in every plan, whatever draws beside them, and not in a backward."""

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched import Pipeline
from pipesched.errors import ExecutionError
from pipesched.testing import reference_step
from tests.support.models import Function


class First(nn.Module):
    """The first output of a module that gives several."""

    def __init__(self, module, times=1):
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x):
        return self.module(*(x,) * self.times)[0]


def modules_that_draw():
    yield "dropout", nn.Dropout()
    yield "dropout1d", nn.Dropout1d()
    yield "alpha dropout", nn.AlphaDropout()
    yield "rrelu", nn.RReLU()
    yield "attention", First(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), times=3)
    yield "lstm", First(nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True))
    yield "gru", First(nn.GRU(8, 8, 2, dropout=0.5, batch_first=True))
    yield "transformer", nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    yield "noise", Function(lambda x: x + torch.randn_like(x) * torch.rand(1))
    yield "gumbel", Function(lambda x: functional.gumbel_softmax(x, dim=-1))


MODULES = dict(modules_that_draw())
X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))


def mse(output, target):
    return (output - target).square().mean()


def model_with(module):
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(a=nn.Linear(8, 8), one=copy.deepcopy(module), b=nn.Linear(8, 8), two=copy.deepcopy(module))
    )


def run(model, boundaries, steps=2, **choices):
    """Losses, outputs and gradients of some steps."""
    with Pipeline(
        model,
        X[:1],
        loss_fn=mse,
        devices=["cpu"] * (len(boundaries) + 1),
        boundaries=boundaries,
        num_microbatches=4,
        **({"seed": 7} | choices),
    ) as pipe:
        results = [pipe.step(X, target=Y, return_outputs=True) for _ in range(steps)]
    return results, [p.grad for p in model.parameters()]


def assert_equal_bits(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_draws_the_same_in_every_plan(name):
    """Whatever the number of stages, the boundaries, the schedule and checkpointing."""
    model = model_with(MODULES[name])
    expected = run(copy.deepcopy(model), [])
    for boundaries, choices in [
        (["b"], {"schedule": "1f1b"}),
        (["one", "two"], {"schedule": "gpipe", "checkpoint": "always"}),
        (["one", "b", "two"], {"schedule": "zb-h1"}),
        (["b"], {"schedule": "zb-h1", "checkpoint": "except_last"}),
    ]:
        torch.rand(3)  # the default generator's state is of no account
        assert_equal_bits(run(copy.deepcopy(model), boundaries, **choices), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_draws_otherwise_in_another_step_and_with_another_seed(name):
    model = model_with(MODULES[name])
    ((_, first), (_, second)), _ = run(copy.deepcopy(model), ["b"])
    ((_, other),), _ = run(copy.deepcopy(model), ["b"], steps=1, seed=8)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODULES)
def test_a_step_leaves_the_default_generator_as_it_was(name):
    model = model_with(MODULES[name])
    state = torch.get_rng_state()
    run(model, ["b"], checkpoint="always")
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_different_microbatches_and_layers_of_different_names_get_different_masks():
    model = nn.Sequential(OrderedDict(one=Function(lambda x: x), drop=nn.Dropout(), same=Function(lambda x: x)))
    with Pipeline(model, torch.ones(1, 64), devices=["cpu"] * 2, boundaries=[1], num_microbatches=4, seed=0) as pipe:
        masks = pipe(torch.ones(4, 64))
    assert len({tuple(row.tolist()) for row in masks}) == 4
    renamed = nn.Sequential(OrderedDict(one=Function(lambda x: x), other=nn.Dropout()))
    with Pipeline(renamed, torch.ones(1, 64), devices=["cpu"] * 2, boundaries=[1], num_microbatches=4, seed=0) as pipe:
        assert not torch.equal(pipe(torch.ones(4, 64)), masks)


def test_layers_before_and_behind_do_not_change_a_mask():
    """It goes by the layer's name, not by its position."""
    short = nn.Sequential(OrderedDict(drop=nn.Dropout()))
    long = nn.Sequential(
        OrderedDict(noise=Function(lambda x: x + 0 * torch.rand(1)), drop=nn.Dropout(), end=nn.Identity())
    )
    with Pipeline(short, torch.ones(1, 64), devices=["cpu"], seed=0, schedule="1f1b") as pipe:
        expected = pipe(torch.ones(4, 64))
    with Pipeline(long, torch.ones(1, 64), devices=["cpu"] * 3, boundaries=[1, 2], num_microbatches=4, seed=0) as pipe:
        assert_equal_bits(pipe(torch.ones(4, 64)), expected)


def test_the_seed_is_read_once_from_the_default_generator():
    model = nn.Sequential(nn.Dropout(), nn.Identity())
    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with Pipeline(model, torch.ones(1, 64), devices=["cpu"] * 2, schedule="1f1b") as pipe:
            torch.manual_seed(1000 + len(outputs))
            outputs.append(pipe(torch.ones(4, 64)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_failed_step_does_not_count():
    """The step that is run again has the masks that it would have had."""
    armed = []

    def fuse(x):
        if armed:
            raise OSError
        return x

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), Function(fuse))
    with Pipeline(model, X[:1], loss_fn=mse, devices=["cpu"] * 2, boundaries=[1], seed=0) as pipe:
        armed.append(True)
        with pytest.raises(OSError):  # noqa: PT011
            pipe.step(X, target=Y)
        armed.clear()
        loss = pipe.step(X, target=Y)
    assert_equal_bits(loss, reference_step(model, X, loss_fn=mse, target=Y, num_microbatches=4, seed=0))


def test_a_random_loss_function_and_its_module_draw_by_key_too():
    def loss_fn(output, target):
        return mse(functional.dropout(output, 0.5), target)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    losses = []
    for boundaries in ([], [1]):
        with Pipeline(
            model, X[:1], loss_fn=loss_fn, devices=["cpu"] * 2, boundaries=boundaries, num_microbatches=4, seed=0
        ) as pipe:
            losses.append(pipe.step(X, target=Y))
    assert_equal_bits(losses[0], losses[1])


def test_dropout_does_not_disturb_what_the_user_draws_meanwhile():
    """The default generator is all threads' own; dropout draws from others."""
    torch.manual_seed(5)
    expected = [torch.rand(1).item() for _ in range(200)]
    seen, stop = [], threading.Event()

    def user():
        while not stop.is_set():
            seen.append(torch.rand(1).item())

    model = nn.Sequential(nn.Dropout(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    with Pipeline(model, X[:1], loss_fn=mse, devices=["cpu"] * 2, boundaries=[2], num_microbatches=4, seed=0) as pipe:
        torch.manual_seed(5)
        drawing = threading.Thread(target=user)
        drawing.start()
        for _ in range(5):
            pipe.step(X, target=Y)
        stop.set()
        drawing.join()
    assert seen
    assert seen[:200] == expected[: len(seen)]


# ---- draws during a backward ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A user's module that recomputes part of itself in its backward."""

    def __init__(self, inner, **settings):
        super().__init__()
        self.inner, self.settings = inner, {"use_reentrant": False} | settings

    def forward(self, x):
        return checkpoint(self.inner, x, **self.settings)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "random",
    [nn.Dropout(), nn.RReLU(), Function(lambda x: x * torch.rand_like(x)), MODULES["gumbel"], MODULES["attention"]],
    ids=["dropout", "rrelu", "rand_like", "gumbel", "attention"],
)
def test_a_draw_in_a_users_own_recomputation_is_a_clear_error(random, reentrant, schedule):
    inner = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(random))
    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(inner, use_reentrant=reentrant))
    match = r"called during a backward, by torch\.utils\.checkpoint .*checkpoint=\.\.\."
    with Pipeline(model, X[:1], loss_fn=mse, devices=["cpu"] * 2, boundaries=[1], schedule=schedule) as pipe:
        with pytest.raises(ExecutionError, match=match) as caught:
            pipe.step(X, target=Y)
        assert any("rank 1" in note for note in caught.value.__notes__)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "quiet",
    [
        nn.Tanh(),
        nn.Dropout(0.0),
        nn.Dropout().eval(),
        nn.RReLU().eval(),
        First(nn.LSTM(8, 8, 2, batch_first=True)),
        First(nn.MultiheadAttention(8, 2, batch_first=True), times=3),
    ],
    ids=["tanh", "dropout of nothing", "dropout in evaluation", "rrelu in evaluation", "lstm", "attention"],
)
def test_a_users_own_recomputation_without_draws_is_right(quiet, schedule):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(quiet))
    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(inner), nn.Linear(8, 8))
    bare = copy.deepcopy(model)
    with Pipeline(
        model, X[:1], loss_fn=mse, devices=["cpu"] * 2, boundaries=[1], schedule=schedule, num_microbatches=4
    ) as pipe:
        loss = pipe.step(X, target=Y)
    expected = reference_step(bare, X, loss_fn=mse, target=Y, num_microbatches=4)
    assert_equal_bits(loss, expected)
    assert_equal_bits([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])
