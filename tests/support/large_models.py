"""Models with tensors so large that small allocations do not matter in a memory measurement."""

import torch
from torch import nn
from torch.nn import functional

from tests.support import branching_models as any_models
from tests.support.models import TransformerBlock

WIDTH, ROWS, CLASSES = 64, 16, 50


class GPT(nn.Module):
    """A GPT with positions, a list of blocks, and a head that shares the embedding's weight."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed, self.positions = nn.Embedding(CLASSES, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.positions(torch.arange(len(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Opened(nn.Module):
    """A model with attention between its layers. The attention saves parts of the output of a single matrix product."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part.unflatten(1, (4, -1)).transpose(0, 1) for part in qkv(x).chunk(3, 1))
            x = x + out(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        return self.head(x)


class UNet(any_models.UNet):
    """A model with long skip connections over stages that do not use them."""

    def __init__(self):
        super().__init__(3, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(super().forward(x))


def repeated():
    """Return a Sequential that contains one layer twice, and one weight in two layers."""
    block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return nn.Sequential(first, block, nn.ReLU(), block, nn.Linear(WIDTH, WIDTH), last, nn.Linear(WIDTH, CLASSES))
