"""Models whose code between layers branches on values of the batch, on shapes or on random numbers."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 16, 8, 6


class Block(nn.Module):
    """A layer with dropout and an optional bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.drop(self.down(torch.relu(self.up(x))))
        return x + (y if bias is None else y * bias)


class Text(nn.Module):
    """An embedding, six blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Padded(Text):
    """Uses a bias, and a value of the first stage in the last stage, only if a row has padding."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = first = self.embed(ids)
        bias = None if mask.all() else mask[..., None].float()
        for block in self.blocks:
            x = block(x, bias)
        if bias is not None:
            x = x + first * 0.5
        return self.head(x).square().mean()


class Selected(Text):
    """Selects rows of a layer's result by a mask, in one branch."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        if not mask.all():
            x = x.masked_select(mask[..., None].bool())
            if len(x) > 100:
                x = x * 2
        return x.square().mean()


class Longest(Text):
    """Cuts the batch at its longest row."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        length = int(mask.sum(1).max())
        x = self.embed(ids[:, :length])
        for block in self.blocks:
            x = block(x)
        if length < LENGTH:
            x = x * 2 + x.tanh()
        return self.head(x).square().mean()


class Nested(Text):
    """Branches in two places, the second only after the first."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and not mask.all():
                x = x.tanh()
                if (mask[:, 3] == 0).any():
                    x = x + (ids == 1)[..., None] * 0.5
        return self.head(x).square().mean()


class Exits(Text):
    """Leaves out the last blocks if a row has padding."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 3 and not mask.all():
                break
        return self.head(x).square().mean()


class Shifts(Text):
    """Changes its input in place, and asks for sizes of the result."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        ids.masked_fill_(mask == 0, 0)
        moved = ids.clone()
        moved[:, 1:] = ids[:, :-1]
        _, length = moved.size()
        padding = moved.eq(0) if moved[:, 1:].eq(0).any() else None
        x, y = self.embed(ids), self.embed(moved).detach()
        for number, block in enumerate(self.blocks):
            x = block(x + y / length) if number == 4 else block(x)
        if padding is not None:
            x = x.masked_fill(padding[..., None], 0.0)
        return self.head(x).square().mean()


class Measured(Text):
    """Makes masks from the shapes of a layer's result, and branches on their values."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        known = x.new_ones(x.shape[:2]).masked_fill(mask == 0, 0)
        place = (mask == 0).unsqueeze(-1).expand_as(x)
        if x[place].numel() > x.numel() // 4:
            x = x * 0.5
        for block in self.blocks[1:]:
            x = block(x)
        if not known.all():
            x = x * known.unsqueeze(-1)
        return self.head(x).square().mean()


class Shaped(Text):
    """Branches on a shape that the sample does not have."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        if ids.shape[1] != LENGTH:
            x = x.tanh() * mask.any()
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Dropped(Text):
    """Skips blocks at random, as LayerDrop does. ``draw`` returns a random number."""

    def draw(self) -> float | Tensor:
        return random.random()

    def trunk(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.training and self.draw() < 0.3:
                continue
            x = block(x)
        return x

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.trunk(ids)).square().mean()


class DroppedByTorch(Dropped):
    def draw(self) -> float | Tensor:
        return torch.rand([])


class DroppedByNumpy(Dropped):
    def draw(self) -> float | Tensor:
        return float(np.random.rand())


class DroppedChecked(Dropped):
    """Reads a value that layers compute. Torch has no kernel of its loss for meta tensors."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.trunk(ids)
        if not torch.isfinite(x).all():
            raise ValueError("infinite")
        likely = self.head(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(likely, ids[:, :2], mask.sum(1), torch.full((len(ids),), 2), zero_infinity=True)


class Resized(Text):
    """Passes sizes as tensors to a function that takes the result of a layer, in one branch."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2 and not mask.all():
                length = mask.sum(1).max()
                x = functional.interpolate(x.transpose(1, 2), size=(length - 1,)).transpose(1, 2)
        return self.head(x).square().mean()


class Remembers(Padded):
    """Sets an attribute in its first forward, which later forwards do not set."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = 0.5
        return super().forward(ids, mask) * self.scale


class ByBuffer(Text):
    """Adds a buffer only if a row has padding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(WIDTH) / WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in (1, 4) and not mask.all():
                x = x + self.shift
        return self.head(x).square().mean()


class Masked(Text):
    """Replaces some embeddings by a weight, by chance and only in training mode, and drops blocks."""

    chance = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.arange(WIDTH) / WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.training and random.random() < self.chance:
            x = torch.where(mask[..., None] == 0, self.token.to(x.dtype), x)
        for block in self.blocks:
            if not self.training or random.random() < 0.7:
                x = block(x)
        return self.head(x).square().mean()


class MaskedSometimes(Masked):
    chance = 0.3


#: Models whose branches depend on the inputs alone.
BY_INPUT: Sequence[type[Text]] = (Padded, Longest, Nested, Exits, Shifts, Resized, Remembers, Selected, Measured)
#: Models whose branches depend on random numbers.
BY_CHANCE: Sequence[type[Text]] = (Dropped, DroppedByTorch, DroppedByNumpy, DroppedChecked, Masked, MaskedSometimes)


def model_of(kind: type[Text], seed: int = 0) -> Text:
    torch.manual_seed(seed)
    return kind()


def batch_of(padding: Sequence[int], length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of two rows a micro-batch; ``padding`` is the number of padded places of each micro-batch."""
    ids = torch.randint(1, WORDS, (2 * len(padding), length), generator=torch.Generator().manual_seed(seed))
    lengths = torch.tensor([[length, length - own] for own in padding]).flatten()
    return {"ids": ids, "mask": (torch.arange(length) < lengths[:, None]).long()}
