"""Pictures of the blocks that each rank holds: from the splits and layouts of the layers themselves."""

import pytest
import torch
from matplotlib.patches import Rectangle
from torch import nn

from pipesched.errors import ArgumentError
from pipesched.parallel.blocked_layers import blocked_layers
from pipesched.parallel.layer_styles import Column, Row
from pipesched.viz import plot_tensor_blocks

SIZE, LENGTH, WIDTH = 4, 8, 16


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.begin, self.up, self.down = nn.Identity(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(self.down(self.up(self.begin(self.out(q * k + v)))))


WANTED = {
    "qkv": Column(sections=3),
    "out": "row",
    "begin": "sequence-begin",
    "up": Column(sequence=True),
    "down": Row(sequence=True),
    "head": Column(sequence=True, gathered=True),
}


@pytest.fixture
def layers():
    return {layer.name: layer for layer in blocked_layers(Layers(), WANTED, SIZE, torch.zeros(2, LENGTH, WIDTH))}


def columns(rank, width, start=0):
    return start + rank * width // SIZE, start + (rank + 1) * width // SIZE


def test_blocks_are_those_of_the_method(layers):
    """Columns divide W and Y by columns, rows divide X and W (Shoeybi et al. 2019, figure 3)."""
    x, w, y = layers["out"].tensors
    for rank in range(SIZE):
        assert x.held[rank] == ((0, LENGTH, *columns(rank, WIDTH)),)
        assert w.held[rank] == ((*columns(rank, WIDTH), 0, WIDTH),)
    assert y.is_whole
    x, w, y = layers["up"].tensors
    for rank in range(SIZE):
        assert x.held[rank] == ((*columns(rank, LENGTH), 0, WIDTH),)  # by positions
        assert w.held[rank] == ((0, WIDTH, *columns(rank, 2 * WIDTH)),)
        assert y.held[rank] == ((0, LENGTH, *columns(rank, 2 * WIDTH)),)
    assert layers["down"].tensors[2].held == x.held
    assert layers["head"].tensors[2].is_whole


def test_sections_are_divided_one_by_one(layers):
    x, w, y = layers["qkv"].tensors
    assert x.is_whole
    for rank in range(SIZE):
        own = [columns(rank, WIDTH, part * WIDTH) for part in range(3)]
        assert w.held[rank] == tuple((0, WIDTH, *part) for part in own)
        assert y.held[rank] == tuple((0, LENGTH, *part) for part in own)


def test_every_element_of_a_divided_matrix_has_one_rank(layers):
    for layer in layers.values():
        for tensor in layer.tensors:
            area = sum((d - c) * (b - a) for held in tensor.held for a, b, c, d in held)
            assert area == tensor.shape[0] * tensor.shape[1] * (SIZE if tensor.is_whole else 1)


def test_what_a_forward_exchanges_is_shown(layers):
    states = 2 * LENGTH * WIDTH * 4  # bytes
    assert layers["qkv"].exchanged == ""
    assert layers["out"].exchanged == f"all-reduce, {2 * 3 / 4 * states / 1024:g} KiB sent"
    assert layers["down"].exchanged == f"reduce-scatter, {3 / 4 * states:g} B sent"


def test_the_picture_has_a_rectangle_for_each_block(layers):
    figure = plot_tensor_blocks([*layers.values()])
    (ax,) = figure.axes
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    tensors = [tensor for layer in layers.values() for tensor in layer.tensors]
    blocks = sum(1 if tensor.is_whole else sum(map(len, tensor.held)) for tensor in tensors)
    assert len(boxes) == blocks + len(tensors)  # and a frame for each matrix
    shown = [text.get_text() for text in ax.texts]
    assert "qkv\nColumn(sections=3)" in shown
    assert shown.count("W 16 x 16") == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*(f"rank {r}" for r in range(4)), "all ranks"]
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for box in boxes:
        assert left < box.get_x() < box.get_x() + box.get_width() < right
        assert top < box.get_y() < box.get_y() + box.get_height() < bottom


def test_other_arguments_are_refused():
    for wrong in ([], ["up"], 3):
        with pytest.raises(ArgumentError, match="must be a list of blocked layers"):
            plot_tensor_blocks(wrong)
