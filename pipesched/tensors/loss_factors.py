"""Loss factors: the factors by which the losses of micro-batches are multiplied.

A factor is a number, or a 0-d tensor if it follows from targets on an accelerator: to read it, the host would have to
wait for the device. A factor of None stands for 1. A factor of 0 replaces the loss with zero, even if the loss is NaN.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

__all__ = ["LossFactor", "LossWeights", "drop_unweighted_gradients", "is_known_zero", "normalized", "read", "scaled"]

LossFactor = float | Tensor | None
#: The weights of micro-batches: numbers, or a 1-d tensor on an accelerator.
LossWeights = Sequence[float] | Tensor


def normalized(weights: Tensor) -> list[LossFactor]:
    """Return the weights, divided by their sum. All are NaN if the sum is 0, like a mean over no labels in PyTorch."""
    wide = weights.double()
    return list((wide / wide.sum()).unbind())


def read(factor: LossFactor) -> float | None:
    """Return a factor as a number. For a factor on an accelerator, the host waits."""
    return float(factor) if isinstance(factor, Tensor) else factor


def is_known_zero(factor: LossFactor) -> bool:
    """Return whether a factor is a number, and is 0."""
    return not isinstance(factor, Tensor) and factor == 0


def scaled(loss: Tensor, factor: LossFactor) -> Tensor:
    """Multiply a loss by its factor. A tensor gives the same bits as the number that it holds."""
    if factor is None:
        return loss
    if not isinstance(factor, Tensor):
        return loss * factor if factor else torch.zeros_like(loss)
    wide = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
    here = factor.to(wide.device, non_blocking=True)
    product = torch.where(here == 0, 0, wide * here.to(wide.dtype))
    return product.to(loss.dtype)


def drop_unweighted_gradients(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Make the gradients of these tensors zero if a loss has the factor 0.

    Without this, they would be NaN: the mean over no labels divides by 0.
    """
    for tensor in tensors:
        tensor.register_hook(partial(_unless_zero, factor))


def _unless_zero(factor: Tensor, grad: Tensor) -> Tensor:
    return torch.where(factor == 0, 0, grad)
