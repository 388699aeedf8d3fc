"""Divided copies: the gradients of a bucket, arranged so that each replica receives only its own part of their sum."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipesched.devices.streams import used_here
from pipesched.tensors.flat_buffers import by_gradient_dtype, places

__all__ = ["Divided", "DividedCopies"]


class Divided(Protocol):
    """Splits parameters by rows across replicas, and receives the gradients of this replica's rows."""

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter."""

    def parts(self, parameter: nn.Parameter, tensor: Tensor) -> list[Tensor | None]:
        """Return each replica's rows of ``tensor``, which has the parameter's shape; None for replicas without rows."""

    def own(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor | None:
        """Return this replica's rows of ``tensor``; None if this replica has no rows."""

    def take(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Receive this replica's rows of the parameter's gradient. ``grad`` is None if this replica has no rows."""


class DividedCopies:
    """The gradients of a bucket in buffers with a row for each replica, one buffer for each dtype.

    A replica's row contains that replica's part of each gradient. Like the buffers of undivided gradients, each row
    ends with one number per parameter: 1 if the parameter has a gradient, else 0. After the sum over replicas, this
    number shows how many replicas have a gradient. The constructor sets the parameters' own gradients to None.

    Args:
        divided: for each parameter of the bucket, the object that receives this replica's rows of the sum.

    """

    def __init__(self, divided: Mapping[nn.Parameter, Divided]) -> None:
        self._divided = divided
        self._groups = by_gradient_dtype(divided)
        #: The parameters that have a gradient in this replica.
        self._given = {parameter for parameter in divided if parameter.grad is not None}
        self.buffers = [self._arranged(dtype, parameters) for dtype, parameters in self._groups.items()]
        for parameter in divided:
            parameter.grad = None

    @torch.no_grad()
    def _arranged(self, dtype: torch.dtype, parameters: list[nn.Parameter]) -> Tensor:
        parts = [self._divided[parameter].parts(parameter, self._gradient(parameter)) for parameter in parameters]
        sizes = [sum(0 if part is None else part.numel() for part in own) for own in zip(*parts, strict=True)]
        buffer = torch.zeros(len(sizes), max(sizes) + len(parameters), dtype=dtype, device=parameters[0].device)
        buffer[:, -len(parameters) :] = buffer.new_tensor([parameter in self._given for parameter in parameters])
        for row, own in zip(buffer, zip(*parts, strict=True), strict=True):
            held = [(parameter, part) for parameter, part in zip(parameters, own, strict=True) if part is not None]
            for (parameter, _), (part, place) in zip(held, places([part for _, part in held], row), strict=True):
                if parameter in self._given:
                    place.copy_(part)
        return buffer

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter's gradient or, if it is None, a one-element placeholder expanded to the whole shape."""
        if parameter.grad is not None:
            return parameter.grad
        return parameter.new_empty(()).expand(self._divided[parameter].shape(parameter))

    @torch.no_grad()
    def deliver(self, before: dict[nn.Parameter, Any]) -> None:
        """Pass the sums, plus the earlier gradients in ``before``, to ``Divided.take``.

        The gradients of these parameters are removed from ``before``.
        """
        for buffer, parameters in zip(self.buffers, self._groups.values(), strict=True):
            used_here(buffer)  # another stream may have allocated it
            counts = buffer[-len(parameters) :]
            rows = {parameter: self._divided[parameter].own(parameter, parameter.detach()) for parameter in parameters}
            held = {parameter: own for parameter, own in rows.items() if own is not None}
            totals = {
                parameter: place for parameter, (_, place) in zip(held, places(held.values(), buffer), strict=True)
            }
            for parameter, count in zip(parameters, counts, strict=True):
                total = totals.get(parameter)
                old = before.pop(parameter, None)
                if old is not None:
                    own = self._divided[parameter].own(parameter, old)
                    total = None if own is None or total is None else own + total
                used = parameter in self._given or old is not None
                if used or (parameter.requires_grad and count.item()):
                    self._divided[parameter].take(parameter, total)
