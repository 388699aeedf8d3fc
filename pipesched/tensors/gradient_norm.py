"""Gradient norm: the norm of all gradients of a model, by a rule whose result does not depend on the plan.

The rule: the norm of each parameter's whole gradient, in float32 (float64 for a float64 gradient); these numbers as one
vector in the model's order of parameters; the norm of that vector. A parameter without a gradient has no number. All
gradients are then multiplied by ``max_norm / (norm + 1e-6)``, and by at most 1.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pipesched.checks import shown
from pipesched.errors import InputError

__all__ = ["as_max_norm", "as_norm_type", "clip_to_norm_", "norm_of", "total_norm"]

_Number = TypeVar("_Number", bound=Any)


@torch.no_grad()
def norm_of(grad: Tensor, norm_type: float) -> Tensor:
    """The norm of one gradient, a 0-d tensor of at least float32 on the gradient's device.

    The norm of a sharded gradient is gathered over its mesh, so all ranks of that mesh must call this.
    """
    grad = grad.coalesce().values() if grad.is_sparse else grad
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
    whole = getattr(norm, "full_tensor", None)  # of a DTensor, whose import takes a second
    return norm if whole is None else cast(Tensor, whole())


@torch.no_grad()
def total_norm(norms: Sequence[Tensor] | Tensor, norm_type: float) -> Tensor:
    """The norm of the norms of all gradients, a sequence or a vector, on the device of the first; 0 without any."""
    if not len(norms):
        return torch.tensor(0.0)
    vector = norms if isinstance(norms, Tensor) else torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(vector, norm_type)
    return total


def clip_to_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale these parameters' gradients in place, given the norm of all gradients, so that it becomes ``max_norm``."""
    if math.isinf(max_norm):
        return  # torch would multiply by inf / inf where the norm is infinite
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [hasattr(parameter.grad, "full_tensor") for parameter in with_grad]
    for kind in set(sharded):  # a foreach kernel takes tensors of one kind
        own = [parameter for parameter, its_kind in zip(with_grad, sharded, strict=True) if its_kind is kind]
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)


def as_max_norm(value: _Number, name: str) -> _Number:
    """Check a largest norm and return it. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise InputError(
            f"{name} must be the largest norm that the gradients may have, a number above 0; got {shown(value)}; pass "
            f"a number such as 1.0, or math.inf to measure the norm without clipping"
        )
    return value


def as_norm_type(value: Any) -> float:
    """Check the order of a norm and return it as a float. Raises InputError."""
    number = math.inf if value == "inf" else value
    if isinstance(number, bool) or not isinstance(number, Real) or not float(number) > 0:
        raise InputError(
            f"norm_type must be the order of a norm, a number above 0; got {shown(value)}; pass 2.0, or math.inf for "
            f"the largest absolute value"
        )
    return float(number)
