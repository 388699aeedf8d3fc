"""Microbatch state: what a stage keeps of one micro-batch, from F to the end of B or W."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipesched.runtime.stage.buffer_copies import Buffers
from pipesched.runtime.stage.weight_products import Product
from pipesched.runtime.stage.weight_stash import Tensors
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.payload import Payload

__all__ = ["MicrobatchState"]


@dataclass(eq=False, kw_only=True)
class MicrobatchState:
    """What a stage keeps of one micro-batch from F to the end of B or W."""

    microbatch: int
    key: Key
    wanted: tuple[int, ...]  # of each value that arrived, how many gradients go back
    inputs: bool  # the model's inputs come before what arrived
    weights: Tensors  # the version in use; empty: the Parameters themselves
    counted: tuple[Any, float | None] | None  # where a loss is asked for: its target and its factor
    deferred: bool = field(default=False, init=False)  # F left weight gradients to W
    staying: frozenset[int] = field(default=frozenset(), init=False)  # addresses of what others hold
    input_grads: list[Tensor | None] = field(default_factory=list, init=False)
    edges: Sequence[GradientEdge] = field(default=(), init=False)
    products: Sequence[Product] = field(default=(), init=False)
    left: Mapping[str, Buffers] | None = field(default=None, init=False)  # the buffers as F has left them, for B
    grads: Sequence[tuple[Tensor, Tensor]] = field(default=(), init=False)  # of the version's tensors, from I to W
    buffers: Mapping[str, Buffers] | None = field(default=None, init=False)  # what a run uses in place of the layers'
    # between a checkpointed F and its R:
    bare: bool = field(default=False, init=False)  # nothing of it is differentiated: R has nothing to do
    arrived: Payload | None = field(default=None, init=False)
