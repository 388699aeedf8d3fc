"""Micro-batches of different sequence lengths, passed with ``microbatches=``, and jobs that train on them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Microbatch, Numerics, Pipeline
from pipesched.testing import reference_step
from tests.support import places
from tests.support.models import assert_as

LENGTHS = (3, 7, 5, 7)
ROWS = (2, 1, 3, 2)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def num_tokens(target: Tensor) -> Tensor:
    return (target != -100).sum()


class Tagger(nn.Module):
    """A model that classifies each token: an embedding, two GRUs with skip connections, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, *, mask: Tensor) -> Tensor:
        first = x = self.embed(tokens) * mask.unsqueeze(-1)
        for layer in self.mix:
            x = x + self.drop(layer(x)[0])
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(-1) / x.shape[1]
        made: Tensor = self.head(x + first * positions)
        return made


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def parts(lengths: tuple[int, ...] = LENGTHS, rows: tuple[int, ...] = ROWS) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for length, count in zip(lengths, rows, strict=True):
        tokens = torch.randint(0, 11, (count, length), generator=generator)
        target = torch.randint(0, 4, (count, length), generator=generator)
        target[:, -1] = -100
        mask = torch.rand(count, length, generator=generator).round()
        made.append(Microbatch(tokens, mask=mask, target=target))
    return made


def pipeline(model: nn.Module, where: dict[str, Any], **options: Any) -> Pipeline:
    sample = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "mask": torch.ones(2, 4)}
    named: dict[str, Any] = {"loss_fn": token_loss, "num_microbatches": 4, "seed": 3, "schedule": "1f1b"}
    named |= {"boundaries": ["mix.1"], "numerics": Numerics(loss_weight=num_tokens)}
    return Pipeline(model, sample, **where, **named | options)


def looped(model: nn.Module, microbatches: list[Microbatch], step: int = 0, **options: Any) -> Tensor:
    named: dict[str, Any] = {"loss_fn": token_loss, "seed": 3, "loss_weight": num_tokens}
    return reference_step(model, microbatches=microbatches, step=step, **named | options)


def trains(group: Any, schedule: str, inputs: Any = "all", **options: Any) -> None:
    """Check that steps over lists of micro-batches are bit-identical to those of a plain loop.

    The lists have different numbers of micro-batches, and the micro-batches have different lengths.
    """
    expected, actual = tagger(), tagger()
    has_batch = inputs == "all" or places.is_one_process(group) or not group.rank()
    with pipeline(actual, places.place(group, inputs), schedule=schedule, **options) as pipe:
        for step, batch in enumerate((parts(), parts(LENGTHS[::-1], ROWS[::-1]), parts((2, 9), (1, 2)), parts())):
            loss = pipe.step(microbatches=batch if has_batch else None)
            assert torch.equal(loss, looped(expected, batch, step))
            assert_as(pipe, expected)
        pipe.eval()
        loss, outputs = pipe.evaluate(microbatches=parts() if has_batch else None, return_outputs=True, gather=True)
        assert [tuple(output.shape) for output in outputs] == [
            (count, length, 4) for count, length in zip(ROWS, LENGTHS, strict=True)
        ]
        weights = [float(num_tokens(one.target)) for one in parts()]
        losses = [float(token_loss(output, one.target)) for output, one in zip(outputs, parts(), strict=True)]
        wanted = sum(weight * one for weight, one in zip(weights, losses, strict=True)) / sum(weights)
        assert abs(float(loss) - wanted) < 1e-5


def streams(group: Any) -> list[float]:
    """Return the losses of asynchronous steps over lists of micro-batches."""
    options: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1)}
    losses = []
    with pipeline(tagger(), places.place(group), schedule="pipedream", **options) as pipe:
        for batch in (parts(), parts(LENGTHS[::-1], ROWS[::-1]), parts((2, 9), (1, 2)), parts()):
            losses.append(float(pipe.step(microbatches=batch)))
        last = pipe.flush()
        assert last is not None
        losses.append(float(last))
    return losses
