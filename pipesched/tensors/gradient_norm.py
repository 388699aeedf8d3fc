"""Gradient norm: computes the norm of a model's gradients, and clips the gradients. All plans give the same result.

First, the norm of each parameter's whole gradient is computed in float32 (float64 for a float64 gradient). These norms
form a vector in the order of the model's parameters, excluding parameters that have no gradient. The total norm is the
norm of this vector. Clipping multiplies all gradients by ``max_norm / (norm + 1e-6)``, but never by more than 1.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pipesched.checks import shown
from pipesched.errors import InputError

__all__ = ["as_max_norm", "as_norm_type", "clip_to_norm_", "combined_norms", "norm_of", "total_norm"]

_Number = TypeVar("_Number", bound=Any)


@torch.no_grad()
def norm_of(grad: Tensor, norm_type: float) -> Tensor:
    """Return the norm of one gradient as a 0-d tensor of at least float32 precision on the gradient's device.

    The norm of a gradient without elements is 0. The norm of a sharded gradient is reduced over its mesh, so all ranks
    of that mesh must call this function.
    """
    grad = grad.coalesce().values() if grad.is_sparse else grad
    if not grad.numel():
        return torch.zeros((), dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device)
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
    whole = getattr(norm, "full_tensor", None)  # only a DTensor has this method; importing DTensor takes a second
    return norm if whole is None else cast(Tensor, whole())


@torch.no_grad()
def combined_norms(pieces: Tensor, norm_type: float, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return the norms of gradients that are divided into pieces.

    ``pieces`` holds the norms of the pieces in float64: a row for each piece, a column for each gradient. For each
    gradient, the norms are raised to the power ``norm_type`` and added in the order of the pieces. The root of the sum
    is rounded to the dtype that `norm_of` would return.
    """
    if math.isinf(norm_type):
        norms = pieces.amax(0)
    else:
        total = torch.zeros_like(pieces[0])
        for piece in pieces:
            total = total + piece**norm_type
        norms = total.sqrt() if norm_type == 2 else total ** (1 / norm_type)
    rounded = [torch.promote_types(dtype, torch.float32) for dtype in dtypes]
    return torch.stack([norm.to(dtype) for norm, dtype in zip(norms, rounded, strict=True)])


@torch.no_grad()
def total_norm(norms: Sequence[Tensor] | Tensor, norm_type: float) -> Tensor:
    """Compute the total norm from each gradient's norm, on the first norm's device; 0 if there are no gradients."""
    if not len(norms):
        return torch.tensor(0.0, device="cpu")
    vector = norms if isinstance(norms, Tensor) else torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(vector, norm_type)
    return total


def clip_to_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale these parameters' gradients in place if ``norm``, the norm of all gradients, exceeds ``max_norm``."""
    if math.isinf(max_norm):
        return  # for an infinite norm, torch would multiply by inf / inf
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [hasattr(parameter.grad, "full_tensor") for parameter in with_grad]
    for kind in set(sharded):  # a foreach kernel cannot mix sharded and plain tensors
        own = [parameter for parameter, its_kind in zip(with_grad, sharded, strict=True) if its_kind is kind]
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)


def as_max_norm(value: _Number, name: str) -> _Number:
    """Return ``value``, the maximum norm, unchanged. Raises InputError if ``value`` is not a number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise InputError(
            f"{name} must be the largest norm allowed for the gradients, a number above 0; got {shown(value)}; pass "
            f"a number such as 1.0, or math.inf to measure the norm without clipping"
        )
    return value


def as_norm_type(value: Any) -> float:
    """Return ``value``, the order of a norm, as a float. Raises InputError if ``value`` is not a number above 0."""
    number = math.inf if value == "inf" else value
    if isinstance(number, bool) or not isinstance(number, Real) or not float(number) > 0:
        raise InputError(
            f"norm_type must be the order of a norm, a number above 0; got {shown(value)}; pass 2.0, or math.inf for "
            f"the largest absolute value"
        )
    return float(number)
