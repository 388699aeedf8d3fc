"""The same bits in process and over a mesh, while shapes and numbers of micro-batches change.

A schedule of each kind; test_bit_identity has them all in process, and test_processes over a mesh.
"""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import schedules
from pipesched.testing import reference_step
from tests.support import places
from tests.support.models import KINDS, gradients

pytestmark = pytest.mark.timeout(60)

MODES = ("never", "always", "except_last")
NUM_MICROBATCHES = 4
#: Rows and length of each batch: ragged (7 rows), fewer rows than micro-batches (3, 2), and back.
BATCHES = [(7, 5), (3, 5), (7, 3), (2, 4), (7, 5)]
WORDS, WIDTH = 11, 8


class Gate(nn.Module):
    """Two values from one, and one from two: a tuple passes between stages."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.sigmoid(x.transpose(0, 1))  # not contiguous once it is taken back


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.mix(pair[0] * pair[1].transpose(0, 1)) + pair[0]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    block = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 16, "dropout": 0.2, "batch_first": True}
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Dropout(0.1),
        nn.TransformerEncoderLayer(**block),
        Gate(),
        Gated(),
        nn.LayerNorm(WIDTH),
        nn.TransformerEncoderLayer(**block),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WORDS),
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    return words, words.roll(1, 1)


@cache
def expected() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients, which add up, after each step of the loop."""
    plain, found = model(), []
    for step, shape in enumerate(BATCHES):
        x, y = batch(*shape)
        options = {"num_microbatches": min(NUM_MICROBATCHES, len(x)), "seed": 5, "step": step}
        loss = reference_step(plain, x, target=y, loss_fn=loss_fn, **options)
        found.append((loss, {name: grad.clone() for name, grad in gradients(plain).items()}))
    return found


def train(group: places.Group, name: str, checkpoint: str) -> None:
    actual = model()
    with (
        places.every_product_deferred(),
        places.pipeline(group, actual, batch(2, 5)[0], schedule=name, loss_fn=loss_fn, checkpoint=checkpoint) as pipe,
    ):
        for shape, (wanted, due) in zip(BATCHES, expected(), strict=True):
            x, y = batch(*shape)
            assert torch.equal(pipe.step(x, target=y), wanted), (name, checkpoint, shape)
            for key, parameter in pipe.named_parameters():
                assert torch.equal(parameter.grad, due[key]), (name, checkpoint, shape, key)


def train_all(group: places.Group, names: list[str]) -> None:
    """Each with one of the checkpoint modes, another one with another number of ranks."""
    for number, name in enumerate(names):
        if group.size() * schedules.get(name).chunks_per_rank <= len(model()):
            train(group, name, MODES[(number + group.size()) % 3])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shapes_and_numbers_of_micro_batches_go_back_and_forth(run: places.Run, num_ranks: int) -> None:
    run(num_ranks, train_all, KINDS)
