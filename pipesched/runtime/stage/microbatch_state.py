"""Microbatch state: what a stage keeps of one micro-batch, from F to the end of B or W."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from pipesched.errors import ExecutionError, InputError
from pipesched.runtime.stage.buffer_copies import Buffers
from pipesched.runtime.stage.weight_products import Product
from pipesched.runtime.stage.weight_stash import Tensors
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.payload import Payload, PerConsumer, trainable_leaves

__all__ = ["MicrobatchState", "buffers_of", "dropping", "roots_of"]


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


def roots_of(saved: MicrobatchState, value: Any) -> list[Tensor]:
    """What of a stage's output is differentiated; nothing where all in front of it is frozen."""
    roots = [leaf for part in value for leaf in trainable_leaves(part)] if isinstance(value, PerConsumer) else None
    roots = trainable_leaves(value) if roots is None else roots
    if not roots and saved.counted is not None and saved.counted[1] != 0:
        raise InputError(
            "a step trains something; the loss depends on no parameter that requires a gradient; "
            "unfreeze one, or call evaluate"
        )
    return roots


def buffers_of(layer: Any) -> Buffers:
    """Copies of a layer's buffers, as they are now."""
    return {name: buffer.clone() for name, buffer in layer.named_buffers()} if isinstance(layer, nn.Module) else {}


def dropping() -> saved_tensors_hooks:
    """Within, autograd saves nothing: what runs is not differentiated, but sees all as if it were."""
    return saved_tensors_hooks(_drop, _dropped)


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(_: None) -> Tensor:
    raise ExecutionError(
        "a checkpointed forward keeps nothing to differentiate; a layer differentiates inside its own forward "
        "(autograd.grad); use checkpoint='never'"
    )
