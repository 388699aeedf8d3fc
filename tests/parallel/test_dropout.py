"""Random numbers between divided layers: each rank has its block of what one process draws, in any layout."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched.errors import ExecutionError
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import Key, KeyedRandom

CPU = torch.device("cpu")
KEY = Key(7, 1, 0)
WHOLE, DIVIDED, SEQUENCE = ActivationLayout.WHOLE, ActivationLayout.DIVIDED, ActivationLayout.SEQUENCE


def drawn(random, x, layout=None, **options):
    random.enter(KEY, "layer")
    if layout is not None:
        random._group.layout = layout
    with Intercept(random):
        return functional.dropout(x, 0.4, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("shape", "layout", "dim"),
    [
        ((3, 8), DIVIDED, 1),
        ((3, 5, 8), DIVIDED, 2),
        ((2, 8, 5, 5), DIVIDED, 1),
        ((3, 8, 5), SEQUENCE, 1),
        ((2, 8, 3, 4), SEQUENCE, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_of_masks_join_to_the_mask_of_one_process(shape, layout, dim, size, dtype):
    x = torch.ones(shape, dtype=dtype)
    whole = drawn(KeyedRandom(CPU), x)
    blocks = []
    for rank in range(size):
        group = TensorGroup.counting(size, rank)
        blocks.append(drawn(DividedRandom(CPU, group), group.own(x, dim), layout))
    assert torch.equal(torch.cat(blocks, dim), whole)


def test_transposed_activations_have_the_mask_of_one_process():
    x = torch.ones(5, 3, 8).transpose(0, 1)
    group = TensorGroup.counting(2, 1)
    block = drawn(DividedRandom(CPU, group), torch.ones(5, 3, 4).transpose(0, 1), DIVIDED)
    assert torch.equal(block, group.own(drawn(KeyedRandom(CPU), x), 2))


def test_dropout_in_place_and_in_evaluation():
    group = TensorGroup.counting(2)
    random = DividedRandom(CPU, group)
    x = torch.ones(30, 4)
    assert drawn(random, x, DIVIDED, inplace=True) is x
    assert 0 < (x == 0).sum() < x.numel()
    assert drawn(random, x, DIVIDED, training=False) is x


@pytest.mark.parametrize("mask", [None, "bool", "float", "causal"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_has_the_mask_of_one_process(mask, grouped):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 3, dtype=torch.float64) for heads in (8, 4 if grouped else 8, 4))
    value = value if grouped else torch.cat([value, value], 1)
    options = {"enable_gqa": grouped, "is_causal": mask == "causal"}
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    allowed[0, 0, 2] = False  # a query that may attend to no key
    given = {"bool": allowed, "float": torch.randn(2, 1, 5, 5, dtype=torch.float64)}.get(mask)

    def attend(random, layout, *inputs):
        random.enter(KEY, "layer")
        if layout is not None:
            random._group.layout = layout
        inputs = [x.detach().requires_grad_() for x in inputs]
        with Intercept(random):
            output = functional.scaled_dot_product_attention(*inputs, attn_mask=given, dropout_p=0.3, **options)
        output.square().sum().backward()
        return [output.detach(), *(x.grad for x in inputs)]

    expected = attend(KeyedRandom(CPU), None, query, key, value)
    for rank in range(4):
        group = TensorGroup.counting(4, rank)
        results = attend(DividedRandom(CPU, group), DIVIDED, *(group.own(x, 1) for x in (query, key, value)))
        for one, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(one, group.own(whole, 1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [functional.alpha_dropout, functional.rrelu, torch.rand_like])
def test_other_random_functions_are_refused_between_divided_layers(function):
    group = TensorGroup.counting(2)
    random = DividedRandom(CPU, group)
    random.enter(KEY, "layer")
    options = {} if function is torch.rand_like else {"training": True}
    with Intercept(random):
        function(torch.ones(3, 4), **options)
        group.layout = DIVIDED
        with pytest.raises(ExecutionError, match=f"whose masks pipesched divides; {function.__name__} was called"):
            function(torch.ones(3, 4), **options)
        if options:
            function(torch.ones(3, 4), training=False)


def test_a_recomputed_draw_has_the_layout_of_its_first_run():
    group = TensorGroup.counting(2, 1)
    random = DividedRandom(CPU, group)
    random.enter(KEY, "layer")
    group.layout = DIVIDED
    place = random.place
    with Intercept(random):
        first = functional.dropout(torch.ones(3, 4), 0.5)
    group.layout = WHOLE
    with Intercept(random), random.repeated(place):
        again = functional.dropout(torch.ones(3, 4), 0.5)
    assert torch.equal(first, again)


def test_each_layer_begins_with_its_own_layout():
    group = TensorGroup.counting(2)
    random = DividedRandom(CPU, group, {("inner", 0): SEQUENCE})
    group.layout = DIVIDED
    random.enter(KEY, "inner")
    assert group.layout is SEQUENCE
    random.enter(KEY, "")  # code between layers goes on in the layout of the layer before
    assert group.layout is SEQUENCE
    random.enter(KEY, "outer")
    assert group.layout is WHOLE


def test_a_group_of_one_rank_draws_as_one_process():
    layer = nn.Dropout(0.5)
    x = torch.ones(3, 4)
    random = DividedRandom(CPU, TensorGroup.counting(1))
    random.enter(KEY, "layer")
    with Intercept(random):
        own = layer(x)
    expected = KeyedRandom(CPU)
    expected.enter(KEY, "layer")
    with Intercept(expected):
        assert torch.equal(layer(x), own)
