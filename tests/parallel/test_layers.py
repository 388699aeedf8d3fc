"""Divided layers give the outputs and gradients of one process, and exchange the bytes that their pages state."""

import pytest
import torch
from torch import nn

from pipesched.parallel.layer_styles import Block, Column, DividedVocabulary
from tests.support.divided_layers import EXACT, Perceptron, compared

SIZES = [2, 4, 8]
DTYPES = [torch.float64, torch.float32]
ROWS, LENGTH, WIDTH, HIDDEN, HEADS, NUMBERS = 3, 8, 16, 32, 8, 40


def states(dtype, width=WIDTH):
    return torch.randn(ROWS, LENGTH, width, dtype=dtype)


def numbers():
    return torch.randint(NUMBERS, (ROWS, LENGTH))


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2."""

    def __init__(self, nf, nx, dtype):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(nf, dtype=dtype))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Fused(nn.Module):
    """Three products in one weight, which meet place by place."""

    def __init__(self, dtype):
        super().__init__()
        self.qkv = Conv1D(3 * HIDDEN, WIDTH, dtype)
        self.out = Conv1D(WIDTH, HIDDEN, dtype)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.dropout(q * k.sigmoid() + v, 0.2, self.training))


def perceptron(dtype):
    return Perceptron(WIDTH, HIDDEN, dtype=dtype), [states(dtype)], {}


def column_gathered(dtype):
    return nn.Linear(WIDTH, HIDDEN, dtype=dtype), [states(dtype)], {}


def row_alone(dtype):
    return nn.Linear(HIDDEN, WIDTH, dtype=dtype), [states(dtype, HIDDEN)], {}


def fused(dtype):
    return Fused(dtype), [states(dtype)], {}


def embedding(dtype):
    layer = nn.Embedding(NUMBERS, WIDTH, padding_idx=5, dtype=dtype)
    given = numbers()
    given[0, :3] = 5
    return layer, [given], {}


def tied(dtype):
    model = nn.Sequential(nn.Embedding(NUMBERS, WIDTH, dtype=dtype), nn.Linear(WIDTH, NUMBERS, bias=True, dtype=dtype))
    model[1].weight = model[0].weight
    return model, [numbers()], {}


def attention(dtype, **options):
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True, dtype=dtype, **options)
    nn.init.normal_(layer.out_proj.bias)
    return layer


def self_attention(dtype):
    x = states(dtype)
    padding = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    padding[1, 6:] = True
    return Called(attention(dtype)), [x], {"key_padding_mask": padding, "need_weights": False}


def wanted_weights(dtype):
    return Called(attention(dtype)), [states(dtype)], {"need_weights": True}


def weights_of_heads(dtype):
    mask = torch.randn(ROWS * HEADS, LENGTH, LENGTH, dtype=dtype)
    return Called(attention(dtype)), [states(dtype)], {"attn_mask": mask, "average_attn_weights": False}


def odd_attention(dtype):
    layer = attention(dtype, add_bias_kv=True, add_zero_attn=True, kdim=12, vdim=20)
    return layer, [states(dtype), states(dtype, 12), states(dtype, 20)], {"need_weights": False}


class Called(nn.Module):
    """Self-attention."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, **options):
        return self.attention(x, x, x, **options)


def block(dtype, **options):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.2, batch_first=True, norm_first=True, dtype=dtype, **options
    )
    for weight in layer.parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight, 1)
    return layer, [states(dtype)], {}


def masked_block(dtype):
    layer, args, _ = block(dtype)
    return layer, args, {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=dtype)}


def decoder_block(dtype):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.2, batch_first=True, dtype=dtype)
    return layer, [states(dtype), states(dtype)], {}


def block_in_a_model(dtype):
    layers = [nn.Embedding(NUMBERS, WIDTH, dtype=dtype), nn.Dropout(0.1), block(dtype)[0], block(dtype)[0]]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH, dtype=dtype), nn.Linear(WIDTH, NUMBERS, dtype=dtype))
    return model, [numbers()], {}


CASES = {
    "a perceptron": (perceptron, {"up": "column", "down": "row"}),
    "a column, gathered": (column_gathered, {"": "column-gathered"}),
    "a row of a whole input": (row_alone, {"": "row-whole-input"}),
    "fused sections of a Conv1D": (fused, {"qkv": Column(sections=3), "out": "row"}),
    "an embedding by vocabulary": (embedding, {"": "vocabulary"}),
    "an embedding by columns": (embedding, {"": "column-gathered"}),
    "a tied head": (tied, {"0": "vocabulary", "1": "column-gathered"}),
    "self-attention": (self_attention, {"attention": "heads"}),
    "attention weights": (wanted_weights, {"attention": "heads"}),
    "attention weights of each head": (weights_of_heads, {"attention": "heads"}),
    "attention with added keys": (odd_attention, {"": "heads"}),
    "a block": (block, {"": "block"}),
    "a masked block": (masked_block, {"": "block"}),
    "a decoder's block": (decoder_block, {"": "block"}),
    "a model": (block_in_a_model, {"0": "vocabulary", "2": "block", "3": "block", "5": "column-gathered"}),
    "a model by sequence": (
        block_in_a_model,
        {
            "0": DividedVocabulary(sequence=True),
            "2": Block(sequence=True),
            "3": Block(sequence=True),
            "4": "summed",
            "5": Column(sequence=True, gathered=True),
        },
    ),
    "a model by sequence, with ends": (
        block_in_a_model,
        {"1": "sequence-begin", "2": Block(sequence=True), "3": Block(sequence=True), "4": "sequence-end"},
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_divided_layers_give_the_numbers_of_one_process(ranks, case, dtype, size):
    make, wanted = CASES[case]
    results = ranks.run(size, compared, size, make, wanted, dtype)
    assert max(difference for difference, _ in results) <= EXACT[dtype]


class InPlace(nn.Module):
    """Changes the outputs of its linear layers in place."""

    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, dtype=dtype), nn.Linear(HIDDEN, WIDTH, False, dtype=dtype)

    def forward(self, x):
        return self.down(nn.functional.relu_(self.up(x))).mul_(2)


def in_place(dtype):
    return InPlace(dtype), [states(dtype)], {}


@pytest.mark.parametrize(
    "wanted",
    [
        {"up": "column", "down": "row"},
        {"up": "column-gathered", "down": "row-whole-input"},
    ],
    ids=str,
)
def test_code_may_change_the_outputs_of_divided_layers_in_place(ranks, wanted):
    results = ranks.run(2, compared, 2, in_place, wanted)
    assert max(difference for difference, _ in results) <= EXACT[torch.float64]
