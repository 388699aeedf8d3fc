"""Shards: divides parameters among replicas, so that each replica updates only a part of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Shards", "row_cuts"]

#: Pieces start at multiples of this number of elements. A CPU kernel processes most elements in groups with vector
#: instructions, and the last elements one by one, which can round differently. 64 is a multiple of every group size.
_ALIGNED = 64


class Shards:
    """The rows of each parameter that each replica updates.

    A parameter is cut along its first dimension. Parameters that have too few rows or are not contiguous stay whole,
    and so do all parameters if ``cuts`` is False. Each whole parameter is updated by one replica. The whole parameters
    are assigned in descending order of size, frozen parameters last. Each goes to the replica with the fewest elements
    so far.

    Args:
        parameters: the parameters of one stage.
        replica: the replica of this process.
        num_replicas: the number of replicas.
        cuts: whether parameters may be cut.

    """

    def __init__(self, parameters: Sequence[nn.Parameter], replica: int, num_replicas: int, *, cuts: bool) -> None:
        self.num_replicas = num_replicas
        self._replica = replica
        self._rows: dict[nn.Parameter, list[tuple[int, int]]] = {}
        self._shapes: dict[nn.Parameter, torch.Size] = {}
        self._held = [0] * num_replicas  # the number of elements that each replica updates
        self.add(parameters, cuts=cuts)

    def add(self, parameters: Sequence[nn.Parameter], *, cuts: bool) -> None:
        """Divide more parameters in the same way. ``cuts`` states whether these parameters may be cut."""
        num_replicas = self.num_replicas
        held = self._held
        for parameter in parameters:
            self._shapes[parameter] = parameter.shape
            rows = row_cuts(parameter.shape, num_replicas) if cuts and parameter.is_contiguous() else None
            self._rows[parameter] = rows or []
            if rows is not None and parameter.requires_grad:
                size = parameter[:1].numel()
                held[:] = [had + size * (end - start) for had, (start, end) in zip(held, rows, strict=True)]
        whole = [parameter for parameter in parameters if not self._rows[parameter]]
        for parameter in sorted(whole, key=lambda one: (not one.requires_grad, -one.numel())):
            owner = held.index(min(held))
            held[owner] += parameter.numel()
            length = len(parameter) if parameter.dim() else 1
            self._rows[parameter] = [(0, length if replica == owner else 0) for replica in range(num_replicas)]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._rows

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self._shapes[parameter]

    def numbers(self, parameter: nn.Parameter) -> list[int]:
        """Return the number of elements of a parameter that each replica updates."""
        row = self._shapes[parameter][1:].numel()
        return [(end - start) * row for start, end in self._rows[parameter]]

    def own_rows(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return this replica's rows as (first, last + 1); None if the parameter is not cut.

        The first replica has rows of every parameter that is cut.
        """
        rows = self._rows[parameter]
        is_cut = sum(start < end for start, end in rows) > 1
        return rows[self._replica] if is_cut else None

    def parts(self, parameter: nn.Parameter, tensor: Tensor) -> list[Tensor | None]:
        """Return each replica's rows of ``tensor``, which has the parameter's shape; None for replicas without rows."""
        return [_part(tensor, *rows) for rows in self._rows[parameter]]

    def own(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor | None:
        """Return this replica's rows of ``tensor``; None if this replica has no rows of the parameter.

        A tensor whose shape differs from the parameter's shape must contain only these rows, and is returned unchanged.
        """
        if tensor.shape != self._shapes[parameter]:
            start, end = self._rows[parameter][self._replica]
            return tensor if end > start else None
        return _part(tensor, *self._rows[parameter][self._replica])


def _part(tensor: Tensor, start: int, end: int) -> Tensor | None:
    if start == end:
        return None
    return tensor[start:end] if tensor.dim() else tensor


def row_cuts(shape: Sequence[int], num_pieces: int) -> list[tuple[int, int]] | None:
    """Return (first row, last row + 1) for each piece, or None if the tensor has too few rows.

    Elementwise updates of the pieces and of the whole tensor are bit-identical. The pieces have almost the same number
    of rows, and longer pieces come last.
    """
    if not shape or 0 in shape:
        return None
    step = _ALIGNED // math.gcd(_ALIGNED, math.prod(shape[1:]))
    steps = shape[0] // step
    if steps < num_pieces:
        return None
    starts = [steps * piece // num_pieces * step for piece in range(num_pieces)]
    return list(zip(starts, [*starts[1:], shape[0]], strict=True))
