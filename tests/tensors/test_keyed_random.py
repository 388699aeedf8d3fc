"""Random numbers depend on (seed, step, micro-batch, layer, call, op), and on nothing else."""

import ast
import inspect
import re
import textwrap
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import get_overridable_functions

from pipesched.tensors.function_mode import COMPOSITES, Intercept
from pipesched.tensors.keyed_random import InBackward, Key, KeyedRandom, is_random

CPU = torch.device("cpu")


def draw(function, seed=0, step=0, microbatch=0, layer="layer", call=0):
    """What a function gives when it runs in this place."""
    random = KeyedRandom(CPU)
    random.enter(Key(seed, step, microbatch), layer, call)
    with Intercept(random):
        return function()


def dropped():
    return functional.dropout(torch.ones(64), 0.5)


# ---- the key --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [dropped, lambda: torch.rand(64)], ids=["dropout", "rand"])
def test_the_same_key_draws_the_same_numbers(function):
    first = draw(function)
    torch.manual_seed(99)
    assert torch.equal(draw(function), first)


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"microbatch": 1}, {"layer": "other"}, {"call": 1}])
@pytest.mark.parametrize("function", [dropped, lambda: torch.rand(64)], ids=["dropout", "rand"])
def test_another_key_draws_other_numbers(function, other):
    assert not torch.equal(draw(function, **other), draw(function))


def test_two_draws_in_one_place_differ():
    first, second = draw(lambda: (dropped(), dropped()))
    assert not torch.equal(first, second)
    assert torch.equal(first, draw(dropped))


def test_entering_a_layer_again_begins_anew():
    random = KeyedRandom(CPU)
    drawn = []
    with Intercept(random):
        for _ in range(2):
            random.enter(Key(0, 0, 0), "layer")
            drawn.append((dropped(), torch.rand(3)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_a_draw_from_a_generator_of_the_users_own_is_left_to_it():
    def own():
        return torch.rand(4, generator=torch.Generator().manual_seed(5))

    assert torch.equal(draw(own), own())


# ---- dropout --------------------------------------------------------------------------------------------------------


def test_dropout_keeps_its_share_and_its_mean():
    kept = draw(lambda: functional.dropout(torch.ones(20000), 0.3))
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs((kept == 0).float().mean().item() - 0.3) < 0.02


def test_dropout_at_its_limits():
    x = torch.ones(8)
    assert draw(lambda: functional.dropout(x, 0.0)) is x
    assert draw(lambda: functional.dropout(x, 0.5, training=False)) is x
    assert draw(lambda: functional.dropout(x, 1.0)).tolist() == [0.0] * 8
    with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
        draw(lambda: functional.dropout(x, 1.5))


def test_dropout_in_place_is_in_place():
    x = torch.ones(64)
    assert draw(lambda: functional.dropout(x, 0.5, inplace=True)) is x
    assert 0 < (x == 0).sum() < 64


def test_the_forms_of_dropout_draw_alike():
    x = torch.ones(64)
    expected = draw(lambda: functional.dropout(x, 0.5))
    for form in (
        lambda: nn.Dropout(0.5)(x),
        lambda: torch.dropout(x, 0.5, True),
        lambda: torch.dropout(x, p=0.5, train=True),
        lambda: functional.dropout(input=x, p=0.5, training=True),
        lambda: torch.dropout_(x.clone(), 0.5, True),
    ):
        assert torch.equal(draw(form), expected)


# ---- every random function is seen ----------------------------------------------------------------------------------


MAKES = r"bernoulli|rand|normal_$|exponential_|cauchy_|geometric_|poisson|multinomial|uniform_|dropout"


def draws_inside(function):
    """The random functions that a Python function calls, itself or through others of its module, by name."""
    if function.__closure__:  # one that chooses between two
        bodies = [cell.cell_contents for cell in function.__closure__]
        return set().union(*(draws_inside(body) for body in bodies if isinstance(body, types.FunctionType)))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called} - {function.__name__}
    others = (vars(functional).get(name) for name in names if name.endswith("_with_indices"))
    return {name for name in names if re.search(MAKES, name)}.union(*(draws_inside(other) for other in others))


PYTHON_FUNCTIONS = sorted(
    {f for f in get_overridable_functions()[functional] if isinstance(f, types.FunctionType)}, key=lambda f: f.__name__
)


def test_the_scan_finds_what_is_known():
    assert "exponential_" in draws_inside(functional.gumbel_softmax)
    assert "rand" in draws_inside(functional.fractional_max_pool2d)
    assert not draws_inside(functional.layer_norm)
    assert len(PYTHON_FUNCTIONS) > 50


@pytest.mark.parametrize("function", PYTHON_FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_that_draws_inside_its_body_is_handled(function):
    handled = KeyedRandom(CPU).handler_for(function) is not None
    refused = InBackward(KeyedRandom(torch.device("cpu"))).handler_for(function) is not None
    assert handled == refused
    if draws_inside(function):
        assert handled or function in COMPOSITES


IMAGE = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
ROW = IMAGE[0, 0]
VOLUME = torch.rand(1, 2, 9, 9, 9, generator=torch.Generator().manual_seed(0))
RANDOM = {
    "dropout": lambda: functional.dropout(IMAGE),
    "dropout1d": lambda: functional.dropout1d(IMAGE[0]),
    "dropout2d": lambda: functional.dropout2d(IMAGE),
    "dropout2d in place": lambda: functional.dropout2d(IMAGE.clone(), inplace=True),
    "dropout3d": lambda: functional.dropout3d(IMAGE.unsqueeze(-1)),
    "alpha_dropout": lambda: functional.alpha_dropout(IMAGE, training=True),
    "alpha_dropout in place": lambda: functional.alpha_dropout(IMAGE.clone(), training=True, inplace=True),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(IMAGE, training=True),
    "rrelu": lambda: functional.rrelu(IMAGE - 0.5, training=True),
    "rrelu in place": lambda: functional.rrelu_(IMAGE - 0.5, training=True),
    "gumbel_softmax": lambda: functional.gumbel_softmax(ROW),
    "fractional_max_pool2d": lambda: functional.fractional_max_pool2d(IMAGE, 2, output_size=4),
    "fractional_max_pool2d with indices": lambda: functional.fractional_max_pool2d_with_indices(IMAGE, 2, 4)[1],
    "fractional_max_pool3d": lambda: functional.fractional_max_pool3d(VOLUME, 2, output_size=4),
    "attention": lambda: functional.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE, dropout_p=0.5),
    "attention by position": lambda: functional.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE, None, 0.5),
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(100000, (3,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(ROW),
    "randn_like": lambda: torch.randn_like(ROW),
    "randint_like": lambda: torch.randint_like(ROW, 100000),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "poisson": lambda: torch.poisson(torch.full((50,), 5.0)),
    "bernoulli_": lambda: torch.empty(50).bernoulli_(0.5),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "normal_": lambda: torch.empty(3).normal_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "geometric_": lambda: torch.empty(50).geometric_(0.1),
    "random_": lambda: torch.empty(3).random_(),
    "init": lambda: nn.init.normal_(torch.empty(3)),
    "init of weights": lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "init truncated": lambda: nn.init.trunc_normal_(torch.empty(3, 3)),
    "init orthogonal": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "a distribution": lambda: torch.distributions.Normal(torch.zeros(3), torch.ones(3)).rsample(),
    "a mixed distribution": lambda: torch.distributions.Dirichlet(torch.ones(3)).rsample(),
    "low rank": lambda: torch.svd_lowrank(ROW, 2)[0] * 1,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_functions_draw_by_key_and_leave_the_default_generator_alone(name):
    state = torch.get_rng_state()
    first = draw(RANDOM[name])
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(draw(RANDOM[name]), first)
    if name != "low rank":  # the result is nearly the same, whatever is drawn
        assert not torch.equal(draw(RANDOM[name], step=1), first)
    torch.set_rng_state(state)


def test_functions_that_draw_nothing_are_not_handled():
    for function in (functional.linear, torch.add, torch.Tensor.mul_, functional.layer_norm, torch.empty, torch.zeros):
        assert not is_random(function)


QUIET = {
    "attention": lambda: functional.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE),
    "attention by position": lambda: functional.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE, None, 0.0),
    "lstm": partial(nn.LSTM(6, 3), ROW),
    "lstm in evaluation": partial(nn.LSTM(6, 3, 2, dropout=0.5).eval(), ROW),
    "gru": partial(nn.GRU(6, 3, 2), ROW),
    "dropout in evaluation": lambda: functional.dropout(IMAGE, training=False),
    "dropout2d in evaluation": lambda: functional.dropout2d(IMAGE, training=False),
    "alpha dropout in evaluation": partial(nn.AlphaDropout().eval(), IMAGE),
    "rrelu in evaluation": partial(nn.RReLU().eval(), IMAGE),
    "rrelu_ in evaluation": lambda: functional.rrelu_(IMAGE.clone()),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_dropout_that_drops_nothing_draws_no_numbers(name):
    """They take no lock, do not shift what is drawn behind them, and may run during a backward."""
    expected = draw(lambda: torch.rand(3))
    assert torch.equal(draw(lambda: (QUIET[name](), torch.rand(3))[1]), expected)
    with Intercept(InBackward(KeyedRandom(torch.device("cpu")))):
        QUIET[name]()
