"""Kept batches: notices if the caller changes a batch of an asynchronous schedule that backwards still read.

Stages use the memory of a batch that is on their device, without a copy. In a synchronous step, the caller cannot
change it meanwhile. An asynchronous step returns before its backwards have run.
"""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.program.actions import Kind
from pipesched.program.dependencies import BACKWARDS
from pipesched.program.segments import Segments
from pipesched.tensors.payload import opened, pytree

__all__ = ["KeptBatches"]


class _KeptBatch(NamedTuple):
    """The tensors of a step's batch, each with its version when the step began."""

    step: int
    versions: list[tuple[Tensor, int]]


class KeptBatches:
    """The batches that the steps of a stream may still read.

    Args:
        segments: the parts of the stream.
        ahead: the number of parts that may be unfinished when a step returns.
        devices: the devices of the ranks.

    """

    def __init__(self, segments: Segments, ahead: int, devices: Collection[torch.device]) -> None:
        self._devices = devices
        self._kept: deque[_KeptBatch] = deque(maxlen=ahead + _lag(segments))

    def add(self, step: int, values: object) -> None:
        """Keep the tensors of a step's batch that stages use without a copy."""
        leaves = [leaf for leaf in pytree.tree_leaves(opened(values)) if isinstance(leaf, Tensor)]
        used = [leaf for leaf in leaves if leaf.device in self._devices and not leaf.is_inference()]
        self._kept.append(_KeptBatch(step, [(leaf, leaf._version) for leaf in used]))

    def check(self) -> None:
        """Raise InputError if the caller has changed a batch that backwards may not have read yet."""
        for step, versions in self._kept:
            if any(tensor._version != version for tensor, version in versions):
                raise InputError(
                    f"a batch of an asynchronous schedule must not be changed in place until its backwards have run, "
                    f"{self._kept.maxlen} steps later; the batch of step {step} of this stream was changed; pass new "
                    f"tensors to each step, for example x.clone(), or use a synchronous schedule"
                )


def _lag(segments: Segments) -> int:
    """Return for how many parts after its own a step's micro-batches still have actions."""
    step = 1 + 2 * segments.program.num_ranks
    actions = (action for order in segments.segment(step) for action in order)
    first = min(action.microbatch for action in actions if action.kind in (*BACKWARDS, Kind.W))
    return step - first // segments.num_microbatches
