"""Faults that were found in other libraries (NVIDIA/Megatron-LM#7452): the tests of layers would find each of them."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched.errors import ExecutionError
from pipesched.parallel import linear, norms
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.layer_styles import Column
from pipesched.parallel.styles import split_model
from pipesched.tensors.keyed_random import KeyedRandom
from tests.parallel.test_layers import CASES
from tests.support.divided_layers import CPU, compared, grouped, run

SIZES = [2, 4, 8]
BY_SEQUENCE = "a model by sequence"


def unsummed(group, *weights):
    return weights


def compared_with_a_fault(process_group, size, place, make, wanted):
    """The difference from one process if the module ``place`` sums no gradients of whole weights."""
    module = {"rows": linear, "norms": norms}[place]
    right = module.summed_weights
    module.summed_weights = unsummed
    try:
        return compared(process_group, size, make, wanted)[0]
    finally:
        module.summed_weights = right


class FusedNorm(nn.Module):
    """Attention of heads with a norm and a sink for each head."""

    def __init__(self, dtype):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, dtype=dtype), nn.Linear(16, 16, dtype=dtype)
        self.norm = nn.RMSNorm(2, dtype=dtype)
        self.sinks = nn.Parameter(torch.randn(8, dtype=dtype))
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = self.norm(q) @ self.norm(k).transpose(-2, -1)
        sinks = self.sinks[:, None, None].expand(len(x), -1, x.shape[1], 1)
        weights = functional.dropout(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], 0.2, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def fused_norm(dtype):
    return FusedNorm(dtype), [torch.randn(2, 4, 16, dtype=dtype)], {}


HEADS = {"qkv": Column(sections=3), "out": "row", "norm": "summed", "sinks": "heads"}


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_and_a_sink_of_each_head_get_whole_gradients(ranks, size):
    assert max(difference for difference, _ in ranks.run(size, compared, size, fused_norm, HEADS)) < 1e-12


@pytest.mark.parametrize("place", ["rows", "norms"])
def test_a_missing_sum_of_weights_in_a_sequence_is_found(ranks, place):
    results = ranks.run(2, compared_with_a_fault, 2, place, *CASES[BY_SEQUENCE])
    assert max(results) > 0.1


def test_a_missing_sum_of_a_norm_of_heads_is_found(ranks):
    assert max(ranks.run(2, compared_with_a_fault, 2, "norms", fused_norm, HEADS)) > 0.1


def without_blocks(process_group, size, make, wanted):
    """The difference from one process if each rank draws the mask of its own block, as by hand."""
    torch.manual_seed(0)
    model, args, kwargs = make(torch.float64)
    expected = run(model, args, kwargs, KeyedRandom(CPU), backward=False)
    split_model(model, wanted, grouped(process_group, size))
    return run(model, args, kwargs, KeyedRandom(CPU), backward=False).difference(expected)


@pytest.mark.parametrize("case", ["a perceptron", "self-attention", "a block"])
def test_equal_dropout_masks_of_all_blocks_are_found(ranks, case):
    assert min(ranks.run(2, without_blocks, 2, *CASES[case])) > 0.01


def grads_of_whole_weights(process_group, size, make, wanted):
    torch.manual_seed(0)
    model, args, kwargs = make(torch.float32)
    group = grouped(process_group, size)
    splits = split_model(model, wanted, group)
    results = run(model, args, kwargs, DividedRandom(CPU, group))
    return {name: grad for name, grad in results.weight_grads.items() if name not in splits}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["a perceptron", "a block", "a model", BY_SEQUENCE])
def test_whole_weights_have_gradients_of_the_same_bits_on_all_ranks(ranks, case, size):
    first, *others = ranks.run(size, grads_of_whole_weights, size, *CASES[case])
    assert first
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(grad, first[name]) for name, grad in other.items())


def local_mean(process_group, size):
    """The mean over the rows of all ranks, and the mean of the means of each rank, of uneven counts."""
    group = grouped(process_group, size)
    logits = torch.arange(6, dtype=torch.float64).view(2, 3) + group.rank
    target = torch.tensor([group.rank, -100 if group.rank else 1])
    counts = (target != -100).sum()
    total = functional.cross_entropy(logits, target, reduction="sum")
    return (group.all_reduce(total) / group.all_reduce(counts)).item(), (group.all_reduce(total / counts) / size).item()


def test_uneven_counts_show_a_local_normaliser(ranks):
    for right, wrong in ranks.run(2, local_mean, 2):
        assert abs(right - wrong) > 0.05


def test_a_group_adds_in_rank_order_for_any_layout_of_the_sum(ranks):
    """The sum of a block is the block of the sum, to the bit. So sequence parallelism does not change the bits."""
    for whole, blocks in ranks.run(8, sums, 8):
        assert torch.equal(whole, blocks)


def sums(process_group, size):
    group = grouped(process_group, size)
    generator = torch.Generator().manual_seed(group.rank)
    tensor = torch.randn(3, 16, 5, generator=generator) * 10.0**group.rank
    return group.all_reduce(tensor), group.all_gather(group.reduce_scatter(tensor, 1), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(ranks, dtype):
    for own, expected in ranks.run(4, half_sums, 4, dtype):
        assert torch.equal(own, expected)


def half_sums(process_group, size, dtype):
    group = grouped(process_group, size)
    parts = [torch.randn(33, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    return group.all_reduce(parts[group.rank]), sum(part.float() for part in parts).to(dtype)


def test_a_failed_collective_says_which_rule_was_broken(ranks):
    message, _ = ranks.run(2, left_alone, 2)
    assert "all ranks of a tensor group must run the same collectives; one failed on rank 0 of 2" in message
    assert "the first rank that failed says why" in message


def left_alone(process_group, size):
    group = grouped(process_group, size)
    group.all_reduce(torch.zeros(4))
    if group.rank:
        os._exit(0)
    try:
        group.all_reduce(torch.zeros(4))
    except ExecutionError as error:
        return str(error)
    return "nothing"
