"""Call: one call of step, evaluate or forward: what goes in, how losses count, and what comes out.

And how it travels, where rank 0 alone passes a batch: every rank gets what all need and of the batch what its own
stages take.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipesched.batch import Batch, Weighting
from pipesched.errors import InputError
from pipesched.executors.messages import look
from pipesched.feed import Feed
from pipesched.payload import gather
from pipesched.program import Program

__all__ = ["Call", "dealt", "received"]


@dataclass(frozen=True)
class Call:
    """A mini-batch and what is asked of it.

    weighting: how its losses count; None where no loss is asked for. gather: whether every rank gets the outputs.
    """

    method: str
    batch: Batch
    weighting: Weighting | None = None
    return_outputs: bool = False
    gather: bool = False

    def __len__(self) -> int:
        """How many micro-batches."""
        return len(self.batch)

    def feed(self, seed: int, step: int) -> Feed:
        """What the stages get, and where they put what they make."""
        factors = None if self.weighting is None else self.weighting.factors
        batch = self.batch
        return Feed(seed, step, list(batch.inputs), batch.targets, factors, keep_outputs=self.return_outputs)

    @property
    def counting(self) -> Weighting:
        """How its losses count. Raises ValueError where no loss is asked for."""
        if self.weighting is None:
            raise ValueError(f"a call has a loss where it was asked for one; {self.method} was not")
        return self.weighting

    def loss(self, feed: Feed) -> Tensor:
        """The mini-batch's loss, where the last stage runs."""
        return self.counting.total([feed.losses[microbatch] for microbatch in range(len(self))])

    def outputs(self, feed: Feed) -> Any:
        """In the mini-batch's order; None where the last stage runs in another process."""
        if not feed.outputs:
            return None
        outputs = [feed.outputs[microbatch].value for microbatch in range(len(self))]
        return gather(outputs, self.batch.rows, self.batch.output_dim)


@dataclass(frozen=True)
class _Opening:
    """What every rank needs to know of a call, apart from numbers that change from step to step."""

    method: str
    rows: list[int]
    output_dim: int
    looks: list[Hashable]
    return_outputs: bool
    gather: bool
    has_loss: bool


def dealt(call: Call, program: Program) -> tuple[Call, list[Any]]:
    """(rank 0's own call, each rank's part of it as a message). program: what the call runs, as far as placement goes.

    The inputs go to the stages without producers, targets to those without consumers. Raises InputError for inputs
    whose gradients would stay on another rank.
    """
    batch, looks = call.batch, [look(value) for value in call.batch.inputs]
    firsts, lasts = (
        {program.placement[stage] for stage, others in enumerate(neighbours) if not others}
        for neighbours in (program.graph.producers, program.graph.consumers)
    )
    if any(batch.wanted_inputs()) and firsts != {0}:
        raise InputError(
            f"gradients of inputs stay where the first stages run, here on ranks {sorted(firsts)}, and rank 0 alone "
            f"has the inputs; detach them, or pass the batch on every rank with inputs='all'"
        )
    factors, shares = call.weighting or ((), ())
    opening = _Opening(
        call.method, batch.rows, batch.output_dim, looks, call.return_outputs, call.gather, call.weighting is not None
    )
    for_all = opening, _written(factors), _written(shares)
    messages = [
        (*for_all, batch.inputs if rank in firsts else None, batch.targets if rank in lasts else None)
        for rank in range(program.num_ranks)
    ]
    return replace(call, batch=replace(batch, looks=looks)), messages


def received(message: tuple[Any, ...]) -> Call:
    """Rank 0's call, as far as this rank has a part in it."""
    opening, factors, shares, inputs, targets = message
    size = len(opening.rows)
    batch = Batch(inputs or [((), {})] * size, targets or [], opening.rows, opening.output_dim, opening.looks)
    weighting = Weighting(_read(factors, size), _read(shares, size)) if opening.has_loss else None
    return Call(opening.method, batch, weighting, opening.return_outputs, opening.gather)


def _written(numbers: Any) -> Tensor | None:
    """Numbers as a tensor: they change, and the form of the message does not."""
    return None if None in numbers else torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _read(written: Tensor | None, size: int) -> list[float | None]:
    return [None] * size if written is None else written.tolist()
