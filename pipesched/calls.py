"""Call: one call of step, evaluate or forward: what goes in, how losses count, and what comes out."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipesched.batch import Batch, Weighting
from pipesched.payload import gather
from pipesched.stage import Feed

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """A mini-batch and what is asked of it. weighting: how its losses count; None where no loss is asked for."""

    batch: Batch
    weighting: Weighting | None = None
    return_outputs: bool = False

    def __len__(self) -> int:
        """How many micro-batches."""
        return len(self.batch)

    def feed(self, seed: int, step: int) -> Feed:
        """What the stages get, and where they put what they make."""
        factors = None if self.weighting is None else self.weighting.factors
        batch = self.batch
        return Feed(seed, step, list(batch.inputs), batch.targets, factors, keep_outputs=self.return_outputs)

    def loss(self, feed: Feed) -> Tensor:
        """The mini-batch's loss, where the last stage runs."""
        if self.weighting is None:
            raise ValueError("a call has a loss where it was asked for one; this one was not")
        return self.weighting.total([feed.losses[microbatch] for microbatch in range(len(self))])

    def outputs(self, feed: Feed) -> Any:
        """In the mini-batch's order; None where the last stage runs in another process."""
        if not feed.outputs:
            return None
        outputs = [feed.outputs[microbatch].value for microbatch in range(len(self))]
        return gather(outputs, self.batch.rows, self.batch.output_dim)
