"""Output metrics: named scalars that a user's function computes from a micro-batch's outputs and target."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.tensors.payload import Payload

__all__ = ["Metrics", "measured"]

#: (outputs, target) -> scalars, keyed by name
Metrics = Callable[[Any, Any], Mapping[str, Any]]


def measured(metrics: Metrics, output: Any, target: Any) -> dict[str, Tensor]:
    """Call the user's function without gradients; return its scalars as float64 on their own devices, keyed by name.

    Raises InputError if the function does not return a dict that maps names to scalars.
    """
    with torch.no_grad():
        found = metrics(Payload.of(output).value, target)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise InputError(
                f"metrics(outputs, target) must return a dict that maps names to scalars; got {shown(found)}; for "
                f"example, return {{'accuracy': (outputs.argmax(-1) == target).float().mean()}}"
            )
        return {name: _scalar(name, value) for name, value in found.items()}


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
        return value.detach().double()
    if isinstance(value, int | float):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    form = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
    raise InputError(f"each metric must be a scalar; metric {name!r} is {form}; reduce it with mean() or sum()")
