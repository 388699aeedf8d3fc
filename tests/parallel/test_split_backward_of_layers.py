"""Divided layers in a schedule that splits the backward: the W has their weight gradients, with the bits of a B."""

import copy

import pytest
import torch
from torch import nn

from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.layer_styles import Column, Row
from pipesched.parallel.styles import split_model
from pipesched.runtime.stage import split_backward
from pipesched.runtime.stage.split_backward import Deferral
from pipesched.runtime.stage.weight_products import weight_grad
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.graph_edges import edge_of
from pipesched.tensors.keyed_random import InBackward, Key
from pipesched.tensors.weight_operations import weighted
from tests.parallel.test_layers import CASES, HIDDEN, LENGTH, ROWS, WIDTH
from tests.parallel.test_traffic import Straight, all_gather, all_reduce, reduce_scatter, total
from tests.support.divided_layers import CPU, Results, grouped, tensors

SIZES = [2, 4, 8]
BYTES = 8
STATES = ROWS * LENGTH * WIDTH * BYTES


def straight(dtype):
    return Straight(WIDTH, HIDDEN, dtype=dtype), [torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype)], {}


SEQUENCE = {"norm": "sequence-begin", "up": Column(sequence=True), "down": Row(sequence=True), "outer": "sequence-end"}


def split_and_whole(process_group, size, make, wanted):
    """Run two micro-batches with B, and again with I and W.

    Returns the gradients of both, the names of weights without a gradient after the I, and the traffic.
    """
    before = split_backward.PAYS_FLOPS
    split_backward.PAYS_FLOPS = 0
    try:
        torch.manual_seed(0)
        model, args, kwargs = make(torch.float64)
        group = grouped(process_group, size)
        split_model(model, wanted, group)
        first = _trained(copy.deepcopy(model), args, kwargs, group, split=False)
        group.counter.clear()
        second = _trained(model, args, kwargs, group, split=True)
        return first[0], *second, group.counter.traffic
    finally:
        split_backward.PAYS_FLOPS = before


def _trained(model, args, kwargs, group, *, split):
    deferral, random = Deferral(), DividedRandom(CPU, group)
    deferral.begin()
    late = []
    for microbatch in range(2):
        for weight in model.parameters():
            weight.grad = None
        group.counter.clear()
        random.enter(Key(7, 1, microbatch), "layer")
        own = [arg.clone().requires_grad_() if arg.is_floating_point() else arg for arg in args]
        deferred = split and deferral.decide(microbatch, lambda: "kind")
        with Intercept(random, *([deferral] if split else [])), group.counter.during("F"):
            outputs = tensors(model(*own, **kwargs))
        products = deferral.finish([edge_of(output) for output in outputs]) if split else []
        grads = [torch.ones_like(output) for output in outputs]
        back = InBackward(random)
        with Intercept(back, *([deferral] if deferred else [])), group.counter.during("I"):
            torch.autograd.backward(outputs, grads)
        late = [name for name, weight in model.named_parameters() if weight.grad is None]
        with group.counter.during("W"):
            weight_grad(products)
    return Results([], [], {name: weight.grad for name, weight in model.named_parameters()}), late


WEIGHTS = {
    "a perceptron": {"up.weight", "down.weight"},
    "fused sections of a Conv1D": {"qkv.weight", "out.weight"},
    "self-attention": {"attention.in_proj_weight", "attention.out_proj.weight"},
    "a block": {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"},
    "a model by sequence": {
        *(f"{block}.{name}.weight" for block in (2, 3) for name in ("self_attn.out_proj", "linear1", "linear2")),
        *(f"{block}.self_attn.in_proj_weight" for block in (2, 3)),
        "5.weight",
    },
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", WEIGHTS)
def test_products_wait_for_the_w_and_have_the_bits_of_a_b(ranks, case, size):
    for together, apart, late, _ in ranks.run(size, split_and_whole, size, *CASES[case]):
        assert set(late) == WEIGHTS[case]
        assert together.weight_grads.keys() == apart.weight_grads.keys()
        for name, grad in together.weight_grads.items():
            assert torch.equal(grad, apart.weight_grads[name]), name


@pytest.mark.parametrize("size", SIZES)
def test_the_second_gather_of_the_input_happens_in_the_w(ranks, size):
    gathered, scattered = all_gather(STATES, size), reduce_scatter(STATES, size)
    norms = total(all_reduce(WIDTH * BYTES, size), all_reduce(2 * WIDTH * BYTES, size))
    expected = {
        ("F", "all-gather"): all_gather(STATES, size, 2),
        ("F", "reduce-scatter"): scattered,
        ("I", "all-gather"): all_gather(STATES, size, 2),  # of dY, and of the gradient of the divided input
        ("I", "reduce-scatter"): scattered,
        ("I", "all-reduce"): norms,
        ("W", "all-gather"): gathered,
    }
    for *_, traffic in ranks.run(size, split_and_whole, size, straight, SEQUENCE):
        assert traffic == expected


@pytest.mark.parametrize("size", SIZES)
def test_a_w_without_sequence_parallelism_exchanges_nothing(ranks, size):
    for *_, traffic in ranks.run(size, split_and_whole, size, *CASES["a block"]):
        assert {action for action, _ in traffic} == {"F", "I"}


class Doubled:
    """An operation with two weights: x a + x b."""

    products = 1

    def output(self, x, *weights):
        return x @ weights[0] + x @ weights[1]

    def input_grad(self, grad, *weights):
        return grad @ (weights[0] + weights[1]).T

    def weight_grads(self, grad, x):
        return [x.T @ grad, x.T @ grad]


class Operated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        return weighted(Doubled(), x, self.first, self.second)


def operated(dtype):
    return Operated(), [torch.randn(3, 4, dtype=dtype)], {}


def test_an_operation_may_have_several_weights(ranks):
    ((together, apart, late, _),) = ranks.run(1, split_and_whole, 1, operated, {})
    assert set(late) == {"first", "second"}
    for name, grad in together.weight_grads.items():
        assert torch.equal(grad, apart.weight_grads[name])


def test_an_operation_has_the_right_gradients():
    torch.manual_seed(0)
    x, *weights = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *args: weighted(Doubled(), *args), (x, *weights))
    frozen = [weight.detach() for weight in weights]
    assert torch.autograd.gradcheck(lambda x: weighted(Doubled(), x, *frozen), (x,))
