"""Models with branching code, and their inputs: skip connections, tied weights, repeated layers, two losses."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline, graph_of, schedules
from tests.support.places import even_boundaries


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 16), nn.Linear(16, width), nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        y = self.drop(self.down(torch.relu(self.up(x))))
        return x + (y if scale is None else y * scale)


class Residual(nn.Module):
    """Blocks in a ModuleList; the code between them uses a parameter, dropout and in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.shift, self.norm = nn.Parameter(torch.randn(8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x + self.shift, 0.1, self.training)
        for number, block in enumerate(self.blocks):
            x = x + functional.dropout(block(x), 0.3, self.training)
            if number % 3 == 2:
                x = x.clone()
                x[:, 0] = 0
                x.mul_(0.5)
        return self.norm(x)


class UNet(nn.Module):
    """A model with long skip connections, which are used in reverse order."""

    def __init__(self, inputs: int = 4, channels: int = 4) -> None:
        super().__init__()
        widths = inputs, channels, channels, channels
        self.down = nn.ModuleList(nn.Conv2d(before, channels, 3, padding=1) for before in widths)
        self.up = nn.ModuleList(nn.Conv2d(2 * channels, channels, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1))
        return x.mean((2, 3))


class Attends(nn.Module):
    """A model whose decoder blocks all use the encoder's output and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(nn.MultiheadAttention(8, 2, 0.1, batch_first=True) for _ in range(5))

    def forward(self, x: Tensor, y: Tensor, *, mask: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        hidden = mask == 0
        if hidden.all():
            hidden = torch.zeros_like(hidden)
        for attention in self.decoder:
            y = y + attention(y, x, x, key_padding_mask=hidden)[0]
        return y.mean(1)


class Tied(nn.Module):
    """A model whose embedding and head share a weight, and which calls one block four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.shared, self.blocks = Block(), nn.ModuleList(Block() for _ in range(3))

    def forward(self, text: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(text) + torch.arange(text.shape[1])[None, :, None] / 10
        for block in self.blocks:
            x = self.shared(block(x))
        x = self.shared(x)
        logits = self.head(x)
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "nothing": None}


class Loose(nn.Module):
    """A model that uses a parameter and a buffer between blocks, and its embedding as head. Some parts are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.gate = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.randn(8))
        self.embed, self.blocks = nn.Embedding(12, 8), nn.ModuleList(Block() for _ in range(5))
        self.scale, self.pooler = nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(text)
        for number, block in enumerate(self.blocks):
            x = block(x * self.scale, self.gate if number == 4 else None) + self.shift
        return functional.cross_entropy(functional.linear(x, self.embed.weight).flatten(0, 1), labels.flatten())


@dataclass
class Both:
    """An output with two losses. The class is not registered as a pytree."""

    first: Tensor
    second: Tensor
    loss: Tensor


class TwoTowers(nn.Module):
    """A model with two inputs and two losses that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Block() for _ in range(3)))
        self.right = nn.Sequential(*(Block() for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, left: Tensor, right: Tensor) -> Both:
        a, b = self.left(left), self.right(right)
        first, second = (a - b).pow(2).mean(), a.mean() * self.scale
        return Both(first, second, first + second)


class Recurrent(nn.Module):
    """LSTMs, which return tuples, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(self.norm(x[:, -1]))


class Shift(nn.Module):
    """A layer with a single parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.shift


class Looped(nn.Module):
    """The layers of a Sequential, called in a loop that applies the Shift layers' parameters itself."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in layers if not isinstance(layer, Shift))
        self.shifts = nn.ParameterList(layer.shift for layer in layers if isinstance(layer, Shift))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = x if number % 2 or not self.shifts else torch.tanh(x) + self.shifts[number // 2]
        return x


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def repeated() -> nn.Sequential:
    """Return a Sequential that contains one layer three times, and one parameter in two layers."""
    block, first, last = Block(), nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(first, block, nn.Sequential(Block(), block, Block()), block, last)


ROWS = 12
FLOATS = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
SEQUENCE = torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(ROWS, 4, 6, 6, generator=torch.Generator().manual_seed(2))
TEXT = torch.arange(ROWS * 5).view(ROWS, 5) % 12
MASK = (torch.arange(5)[None] <= torch.arange(ROWS)[:, None] % 5).long()
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any], Tensor | None]] = {
    "residual": (Residual, (FLOATS,), {}, torch.zeros(ROWS, 8)),
    "unet": (UNet, (IMAGES,), {}, torch.zeros(ROWS, 4)),
    "attends": (Attends, (SEQUENCE, SEQUENCE.flip(0)), {"mask": MASK}, torch.zeros(ROWS, 8)),
    "tied": (Tied, (TEXT,), {"labels": TEXT}, None),
    "loose": (Loose, (TEXT,), {"labels": TEXT}, None),
    "towers": (TwoTowers, (), {"left": FLOATS, "right": FLOATS.flip(0)}, None),
    "repeated": (repeated, (FLOATS,), {}, torch.zeros(ROWS, 8)),
    "recurrent": (Recurrent, (SEQUENCE,), {}, torch.zeros(ROWS, 3)),
}


def made(name: str, rows: int = ROWS) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    kind, args, kwargs, target = MODELS[name]
    torch.manual_seed(0)
    cut = {key: value[:rows] for key, value in kwargs.items()}
    return kind(), tuple(value[:rows] for value in args), cut, None if target is None else target[:rows]


def sample_of(name: str) -> Any:
    """Return one micro-batch."""
    _, args, kwargs, _ = made(name, 3)
    if name == "attends":
        return {"x": args[0], "y": args[1], **kwargs}
    return kwargs if not args else args if not kwargs else (*args, *kwargs.values())


@cache
def layers_of(name: str) -> list[str]:
    return list(graph_of(made(name)[0], sample_of(name), measured=False))


def pipeline(name: str, model: nn.Module, **options: Any) -> Pipeline:
    """Return a Pipeline with the layers divided evenly by their number."""
    loss_fn = None if MODELS[name][3] is None else square
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # BatchNorm warns about its running statistics
        choices = {"schedule": "1f1b", **options}  # a search would put such small models on one device
        num_ranks = choices["mesh"].size() if "mesh" in choices else len(choices["devices"])
        layers = layers_of(name)
        cut = even_boundaries(len(layers), num_ranks * schedules.get(choices["schedule"]).chunks_per_rank)
        choices.setdefault("boundaries", [layers[at] for at in cut])
        return Pipeline(model, sample_of(name), loss_fn=loss_fn, num_microbatches=3, seed=3, **choices)


def inputs_of(name: str, rows: int) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    _, args, kwargs, target = made(name, rows)
    if name == "attends":
        args, kwargs = (), {"x": args[0], "y": args[1], **kwargs}
    if name in ("tied", "loose"):
        args, kwargs = (), {"text": args[0], **kwargs}
    return args, kwargs, {} if target is None else {"target": target}


def state(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
