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
    #: Of each value that arrived, how many gradients go back.
    num_grads: tuple[int, ...]
    #: Whether the model's inputs come before what arrived.
    takes_inputs: bool
    #: The version in use. Empty: the Parameters themselves.
    weights: Tensors
    #: The target and the factor of the loss, where one is asked for.
    loss_inputs: tuple[Any, float | None] | None
    #: Whether F has left weight gradients to W.
    deferred: bool = field(default=False, init=False)
    #: The addresses of memory that others hold.
    staying: frozenset[int] = field(default=frozenset(), init=False)
    input_grads: list[Tensor | None] = field(default_factory=list, init=False)
    edges: Sequence[GradientEdge] = field(default=(), init=False)
    products: Sequence[Product] = field(default=(), init=False)
    #: The gradients of the version's tensors, from I to W.
    version_grads: Sequence[tuple[Tensor, Tensor]] = field(default=(), init=False)
    #: What a run uses in place of the layers' buffers.
    buffers: Mapping[str, Buffers] | None = field(default=None, init=False)
    #: The buffers as F has left them, for B.
    written_buffers: Mapping[str, Buffers] | None = field(default=None, init=False)
    #: What a checkpointed F has kept for its R.
    arrived: Payload | None = field(default=None, init=False)
    #: Whether nothing that a checkpointed F made is differentiated: R has nothing to do.
    needs_no_backward: bool = field(default=False, init=False)
