"""Block models: transformer blocks and their batches, and the plain loop with which a pipeline is compared."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline, schedules
from pipesched.order import Schedule

__all__ = ["Shape", "accumulate", "gradient_error", "gradients_of", "pipeline"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Shape(NamedTuple):
    """The sizes of a model of transformer blocks, and of a batch."""

    blocks: int
    width: int
    tokens: int
    rows: int  # of a micro-batch
    microbatches: int
    dtype: str = "float32"

    def model(self, device: torch.device) -> nn.Sequential:
        """Return the model on a device, with the same weights in each call."""
        torch.manual_seed(0)
        heads = max(1, self.width // 64)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        options["dtype"] = _DTYPES[self.dtype]
        with device:
            return nn.Sequential(
                *(nn.TransformerEncoderLayer(self.width, heads, 4 * self.width, **options) for _ in range(self.blocks))
            )

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets on a device, the same in each call."""
        made = torch.Generator(device).manual_seed(1)
        shape, own = (self.rows * self.microbatches, self.tokens, self.width), _DTYPES[self.dtype]
        x, y = (torch.randn(shape, generator=made, device=device, dtype=own) for _ in range(2))
        return x, y

    def cut(self, stages: int) -> list[int]:
        """Return the indices of the layers at which equal stages begin, without layer 0."""
        return [self.blocks * stage // stages for stage in range(1, stages)]


def pipeline(
    shape: Shape, model: nn.Sequential, schedule: str | Schedule, x: Tensor, ranks: int, **others: Any
) -> Pipeline:
    """Return a pipeline of pipesched with equal stages."""
    chunks = (schedules.get(schedule) if isinstance(schedule, str) else schedule).chunks_per_rank
    return Pipeline(
        model,
        x[: shape.rows],
        loss_fn=functional.mse_loss,
        schedule=schedule,
        num_microbatches=shape.microbatches,
        boundaries=shape.cut(ranks * chunks),
        **others,
    )


def accumulate(shape: Shape, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run forward and backward of each micro-batch in a loop, so that gradients accumulate."""
    count = shape.microbatches
    for part, target in zip(x.chunk(count), y.chunk(count), strict=True):
        (functional.mse_loss(model(part), target) / count).backward()


def gradients_of(model: nn.Module | Pipeline) -> dict[str, Tensor]:
    """Return the gradients, keyed by the names of the parameters."""
    return {name: own.grad for name, own in model.named_parameters() if own.grad is not None}


def gradient_error(own: Mapping[str, Tensor], due: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient; 0 stands for equal bits."""
    return max((_error(grad, due[name]) for name, grad in own.items()), default=0.0)


def _error(own: Tensor, other: Tensor) -> float:
    due = other.to(own.device)
    if torch.equal(own, due):
        return 0.0
    return float((own.double() - due.double()).norm() / due.double().norm())
