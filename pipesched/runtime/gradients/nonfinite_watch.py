"""Nonfinite watch: records whether layers' outputs and their gradients are finite, and finds the first nonfinite value.

A record is the largest absolute value of a tensor. The record stays on the device as a 0-d tensor, so that
recording never waits for a GPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Nonfinite", "NonfiniteWatch"]


class Nonfinite(NamedTuple):
    """The origin of a recorded value. Tuples compare in the order of computation: all outputs, then all gradients."""

    #: Whether the value is the gradient of a layer's output, rather than the output itself.
    backward: bool
    microbatch: int
    #: The layer's position in the model; negated for gradients, which are computed in reverse order.
    place: int
    #: The layer's name; "" for the loss.
    layer: str

    def __str__(self) -> str:
        value = f"the output of layer {self.layer!r}" if self.layer else "the loss"
        return f"{'the gradient of ' * self.backward}{value} for micro-batch {self.microbatch}"


class NonfiniteWatch:
    """The records of one step in one process.

    Args:
        layers: the names of all layers of the model, in order.
        first: the number of this replica's first micro-batch among the micro-batches of all replicas. Default: 0.

    """

    def __init__(self, layers: Sequence[str], first: int = 0) -> None:
        self._first = first
        self._places = {name: place for place, name in enumerate(layers)}
        self._notes: list[tuple[Nonfinite, Tensor]] = []

    def output(self, microbatch: int, layer: str, value: Any) -> None:
        """Record the output of a layer ("" for the loss), and the output's gradient once it has been computed."""
        place = self._places.get(layer, len(self._places))
        for tensor in tensors_in(value):
            if tensor.is_floating_point() and tensor.numel():
                number = self._first + microbatch
                self._note(Nonfinite(False, number, place, layer), tensor.detach())
                if tensor.requires_grad and torch.is_grad_enabled():
                    note = Nonfinite(True, number, -place, layer)
                    tensor.register_hook(lambda grad, note=note: self._note(note, grad))

    def _note(self, note: Nonfinite, tensor: Tensor | None) -> None:
        """Record a value. ``tensor`` is None for the gradient of an output that nothing used: torch passes no zeros."""
        if tensor is None:
            return
        with torch.no_grad():
            self._notes.append((note, torch.linalg.vector_norm(tensor, float("inf"))))

    def first(self) -> Nonfinite | None:
        """Return the first nonfinite output, or else the first nonfinite gradient, or else None. Waits for a GPU."""
        return min((note for note, peak in self._notes if not peak.isfinite()), default=None)
