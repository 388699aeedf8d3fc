"""A model whose results have the same bits on every machine, and the runs that the kept files describe.

Each operation rounds every element once. Sums have two summands, or are made of sums of two summands. So the results do
not depend on the instructions of a processor, and can be kept as files.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipesched import Numerics, Pipeline

LAYERS, WIDTH, ROWS, MICROBATCHES = 6, 128, 8, 4


class Scaled(nn.Module):
    """Multiplies and shifts every column, and sets random elements to zero."""

    def __init__(self, number: int) -> None:
        super().__init__()
        columns = torch.arange(WIDTH) / WIDTH
        self.weight = nn.Parameter(1.25 - columns / (number + 3))
        self.bias = nn.Parameter(columns / (number + 5) - 0.125)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.weight + self.bias
        bent = torch.where(scaled > 0, scaled, scaled * 0.25)
        return bent * (torch.rand_like(bent) < 0.875) if self.training else bent


def model() -> nn.Sequential:
    return nn.Sequential(*map(Scaled, range(LAYERS)))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error, added up in pairs."""
    squares = (output - target).square().flatten()
    count = len(squares)
    while len(squares) > 1:
        squares = squares[::2] + squares[1::2]
    return squares[0] / count


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)
    return (numbers * (step + 3) % 17 - 8) / 4, (numbers % 5 - 2) / 2


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=8.0, momentum=0.5)


def pipeline(**options: Any) -> Pipeline:
    """Return a pipeline for micro-batches of two rows, with momentum inside the step."""
    numerics = Numerics(loss_reduction="mean")  # the rows of the pairs that mean_square adds cannot be followed
    sample = batch(0)[0][:2]
    return Pipeline(model(), sample, loss_fn=mean_square, optimizer=momentum, seed=3, numerics=numerics, **options)


def trained(pipe: Pipeline, steps: range) -> dict[str, Tensor]:
    """Train, and return the losses, the weights and the momentum."""
    losses = [pipe.step(x, target=y) for x, y in map(batch, steps)]
    return {"losses": torch.stack(losses), **pipe.training_state()["tensors"]}
