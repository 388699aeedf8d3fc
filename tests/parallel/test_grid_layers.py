"""Layers that are divided in two, two and a half and three dimensions give the numbers of one process."""

import copy

import pytest
import torch
from torch import nn

from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.layer_styles import Column, Heads
from pipesched.parallel.styles import divide_losses, split_model
from pipesched.simulation.tensor_layout import TensorLayout
from pipesched.tensors.keyed_random import KeyedRandom
from tests.support.divided_layers import CPU, EXACT, Perceptron, grouped, run, whole

GRIDS = [("2d", 4), ("2.5d", 8), ("3d", 8), ("2d", 9)]
DTYPES = [torch.float64, torch.float32]
ROWS, LENGTH, WIDTH, HIDDEN, HEADS, NUMBERS = 12, 5, 24, 48, 6, 36
IN, OUT = {"0": "begin"}, {"2": "end"}


def states(dtype, width=WIDTH):
    return torch.randn(ROWS, LENGTH, width, dtype=dtype)


def within(layer):
    return nn.Sequential(nn.Identity(), layer, nn.Identity())


def linear(dtype, inputs=WIDTH, outputs=HIDDEN):
    return within(nn.Linear(inputs, outputs, dtype=dtype)), [states(dtype, inputs)], {}


def pair(dtype):
    return within(Perceptron(WIDTH, HIDDEN, dtype=dtype)), [states(dtype)], {}


def flat(dtype):
    return within(Perceptron(WIDTH, HIDDEN, dtype=dtype)), [states(dtype)[:, 0]], {}


class RootMean(Perceptron):
    """A perceptron with the norm of Llama."""

    def __init__(self, dtype):
        super().__init__(WIDTH, HIDDEN, dtype=dtype)
        self.norm = nn.RMSNorm(WIDTH, dtype=dtype)
        nn.init.normal_(self.norm.weight, 1)


def root_mean(dtype):
    return within(RootMean(dtype)), [states(dtype)], {}


class InPlace(nn.Module):
    """Changes the outputs of its linear layers in place."""

    def __init__(self, dtype):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=dtype)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(nn.functional.relu_(self.up(x))).mul_(2)


def in_place(dtype):
    return within(InPlace(dtype)), [states(dtype)], {}


class Attention(nn.Module):
    """Attention with queries, keys and values in one weight, and a norm of each head."""

    def __init__(self, dtype):
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.norm = nn.RMSNorm(WIDTH // HEADS, dtype=dtype)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        rate = 0.2 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(self.norm(q), k, v, None, rate, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def attention(dtype):
    return within(Attention(dtype)), [states(dtype)], {}


def block(dtype):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.2, batch_first=True, norm_first=True, dtype=dtype
    )
    for weight in layer.parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight, 1)
    return layer


def blocks(dtype):
    return nn.Sequential(nn.Identity(), block(dtype), block(dtype), nn.Identity()), [states(dtype)], {}


class Language(nn.Module):
    """A small language model with its loss."""

    def __init__(self, dtype):
        super().__init__()
        self.words = nn.Embedding(NUMBERS, WIDTH, padding_idx=5, dtype=dtype)
        self.places = nn.Embedding(LENGTH, WIDTH, dtype=dtype)
        self.dropout = nn.Dropout(0.1)
        self.block = block(dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, NUMBERS, dtype=dtype)
        self.loss_fn = VocabularyCrossEntropy(label_smoothing=0.1)

    def forward(self, numbers, target):
        x = self.dropout(self.words(numbers) + self.places(torch.arange(LENGTH)))
        logits = self.head(self.norm(self.block(x)))
        return self.loss_fn(logits.flatten(0, 1), target.flatten())


def language(dtype):
    numbers, target = torch.randint(NUMBERS, (2, ROWS, LENGTH))
    numbers[0, :3] = 5
    target[0] = -100
    target[7, 2] = -100
    return Language(dtype), [numbers, target], {}


CASES = {
    "first": (linear, {**IN, "1": "column", **OUT}),
    "a pair": (pair, {**IN, "1.norm": "norm", "1.up": "column", "1.down": "row", **OUT}),
    "a pair of rows": (flat, {**IN, "1.norm": "norm", "1.up": "column", "1.down": "row", **OUT}),
    "a pair with RMSNorm": (root_mean, {**IN, "1.norm": "norm", "1.up": "column", "1.down": "row", **OUT}),
    "changed in place": (in_place, {**IN, "1.up": "column", "1.down": "row", **OUT}),
    "attention": (
        attention,
        {**IN, "1": Heads("heads"), "1.qkv": Column(sections=3), "1.norm": "summed", "1.out": "row", **OUT},
    ),
    "blocks": (blocks, {**IN, "1": "block", "2": "block", "3": "end"}),
    "a model": (
        language,
        {"words": "vocabulary", "places": "heads", "block": "block", "norm": "norm", "head": "vocabulary"},
    ),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layers_on_a_grid_give_the_numbers_of_one_process(ranks_of, case, grid, dtype):
    make, wanted = CASES[case]
    results = ranks_of[grid[1]].run(grid[1], compared, *grid, make, wanted, dtype)
    assert max(results) <= EXACT[dtype]


def compared(process_group, kind, size, make, wanted, dtype):
    torch.manual_seed(0)
    model, args, kwargs = make(dtype)
    divided = copy.deepcopy(model)
    expected = run(model, args, kwargs, KeyedRandom(CPU))
    group = grouped(process_group, size)
    grid = AxisGroups(group, TensorLayout.of(kind, size))  # kept: its groups end with it
    splits = split_model(divided, wanted, group)
    divide_losses(divided, group)
    results = run(divided, args, kwargs, DividedRandom(CPU, group), counter=group.counter)
    assert grid is group.grid
    return whole(results, splits).difference(expected)
