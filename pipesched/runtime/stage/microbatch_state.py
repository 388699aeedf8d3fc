"""Micro-batch state: the values that a stage keeps for one micro-batch, from its F to the end of its B or W."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipesched.runtime.stage.attribute_changes import AttributeValues
from pipesched.runtime.stage.buffer_copies import Buffers
from pipesched.runtime.stage.weight_products import Product
from pipesched.runtime.stage.weight_stash import Tensors
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.loss_factors import LossFactor
from pipesched.tensors.payload import Payload

__all__ = ["Additions", "MicrobatchState"]


@dataclass(slots=True, eq=False)
class Additions:
    """The losses that the layers of one stage add for one micro-batch."""

    #: The factor of the micro-batch's loss; None leaves a loss unscaled.
    factor: LossFactor
    #: Whether the forward has run once, so that a recompute does not count the losses again.
    counted: bool = False
    #: The graph edges of the losses, from which the backward starts.
    edges: list[GradientEdge] = field(default_factory=list)
    #: The initial gradient of each edge: the scale of the loss; None for 1.
    grads: list[Tensor | None] = field(default_factory=list)
    num_added: int = 0

    def again(self) -> "Additions":
        """Return empty additions for the recompute of the same micro-batch."""
        return Additions(self.factor, counted=True)


@dataclass(eq=False, kw_only=True)
class MicrobatchState:
    """The values that a stage keeps for one micro-batch between its actions."""

    microbatch: int
    key: Key
    #: The micro-batch's path through the code between layers; 0 is the path of the sample.
    path: int = 0
    #: For each value received from a producer stage, the number of gradients to return.
    num_grads: tuple[int, ...]
    #: Whether the stage takes inputs of the model, before the values received from other stages.
    takes_inputs: bool
    #: The tensors of the weight version to use; empty to use the Parameters themselves.
    weights: Tensors
    #: The target and the factor of the loss, if this stage computes the loss.
    loss_inputs: tuple[Any, LossFactor] | None
    #: Whether I defers the weight gradients of large matrix products and convolutions to W.
    deferred: bool = field(default=False, init=False)
    #: Addresses of the memory of the batch and of the outputs, which must stay on the device.
    staying: frozenset[int] = field(default=frozenset(), init=False)
    input_grads: list[Tensor | None] = field(default_factory=list, init=False)
    edges: Sequence[GradientEdge] = field(default=(), init=False)
    products: Sequence[Product] = field(default=(), init=False)
    #: The weight version's tensors and their gradients, kept from I to W.
    version_grads: Sequence[tuple[Tensor, Tensor]] = field(default=(), init=False)
    #: The losses that layers have added; None if no layer has added a loss.
    added: Additions | None = field(default=None, init=False)
    #: Whether the metrics of the outputs have been computed.
    measured: bool = field(default=False, init=False)
    #: Tensors that replace the layers' buffers during the next F or R.
    buffers: Mapping[str, Buffers] | None = field(default=None, init=False)
    #: Copies of the buffers with the values that F left in them, for the backward.
    written_buffers: Mapping[str, Buffers] | None = field(default=None, init=False)
    #: The values of the attributes that F changes, from before F, for R.
    attributes: AttributeValues | None = field(default=None, init=False)
    #: The inputs that a checkpointed F keeps for R.
    arrived: Payload | None = field(default=None, init=False)
    #: Whether no output of a checkpointed F requires a gradient, so that R has nothing to do.
    needs_no_backward: bool = field(default=False, init=False)
