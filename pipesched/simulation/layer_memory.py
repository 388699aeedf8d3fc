"""Layer memory: computes the memory of a sequence of layers from the measured memory of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby, pairwise

__all__ = [
    "DELIVERED_BYTES",
    "SCALARS_BYTES",
    "LayerMemory",
    "LossMemory",
    "dropping_bytes",
    "offloaded_bytes",
    "stage_memory",
]

#: The weight-gradient action (W) computes gradients in groups of about this size, then adds them to
#: the gradients of the parameters.
DELIVERED_BYTES = 1 << 20

#: The size of all scalars of a step, such as the losses of up to 16 micro-batches.
SCALARS_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Memory of a layer, or of several layers in sequence, for one micro-batch, in bytes.

    `pipesched.Costs` has fields of the same names for whole stages. A transient is the peak memory that an action needs
    in addition to the memory held when the action begins.
    """

    #: Size of the input.
    input_bytes: int = 0
    #: Size of the output, and of its gradient.
    output_bytes: int = 0
    #: Memory held from the forward to the backward. Tensors that share memory are counted once.
    activation_bytes: int = 0
    #: The part of `activation_bytes` that shares memory with the input.
    kept_input_bytes: int = 0
    #: The part of `activation_bytes` that shares memory with the output.
    kept_output_bytes: int = 0
    #: Activations that are expensive to compute; "recompute-cheap" holds them.
    dear_bytes: int = 0
    #: The part of `dear_bytes` that shares memory with the output.
    dear_output_bytes: int = 0
    #: Memory held from the input gradients (I) to the weight gradients (W).
    weight_grad_bytes: int = 0
    #: The part of `weight_grad_bytes` that shares memory with the input.
    left_input_bytes: int = 0
    #: The part of `weight_grad_bytes` that consists of gradients, which W frees one by one.
    left_grad_bytes: int = 0
    #: Size of the gradients of the parameters.
    gradient_bytes: int = 0
    #: The part of `gradient_bytes` that W computes.
    deferred_gradient_bytes: int = 0
    #: Size of the buffers.
    buffer_bytes: int = 0
    #: Transient of a forward (F) or recompute (R). Includes the input, which stays in memory, but not the activations
    #: that F or R produces.
    forward_transient_bytes: int = 0
    #: Transient of a full backward (B) that adds to existing gradients of parameters. Includes the output's gradient.
    backward_transient_bytes: int = 0
    #: Transient of the first full backward (B), which allocates the gradients of parameters. Includes these gradients.
    first_backward_transient_bytes: int = 0
    #: Transient of I. Includes the memory held for W.
    input_grad_transient_bytes: int = 0
    #: Transient of W.
    weight_grad_transient_bytes: int = 0
    #: 1 if the activations are offloaded to the host, else 0.
    offloads: int = 0

    def __add__(self, other: "LayerMemory") -> "LayerMemory":
        """Return the memory of two layers in sequence.

        Memory that is held both as the first layer's output and as the second layer's input is counted once.

        Layers run one at a time, so the transient of the sequence is a maximum over its layers, not a sum. While one
        layer runs, the other layer holds its activations.
        """
        shared = min(self.kept_output_bytes, other.kept_input_bytes)
        kept = self.activation_bytes + other.activation_bytes - shared
        freed = kept - self.activation_bytes  # by the second layer's backward
        return LayerMemory(
            input_bytes=self.input_bytes,
            output_bytes=other.output_bytes,
            activation_bytes=kept,
            kept_input_bytes=self.kept_input_bytes,
            kept_output_bytes=other.kept_output_bytes,
            dear_bytes=self.dear_bytes + other.dear_bytes,
            dear_output_bytes=other.dear_output_bytes,
            weight_grad_bytes=self.weight_grad_bytes + other.weight_grad_bytes,
            left_input_bytes=self.left_input_bytes,
            left_grad_bytes=self.left_grad_bytes + other.left_grad_bytes,
            gradient_bytes=self.gradient_bytes + other.gradient_bytes,
            deferred_gradient_bytes=self.deferred_gradient_bytes + other.deferred_gradient_bytes,
            buffer_bytes=self.buffer_bytes + other.buffer_bytes,
            forward_transient_bytes=max(self.forward_transient_bytes - freed, other.forward_transient_bytes),
            backward_transient_bytes=max(self.backward_transient_bytes - freed, other.backward_transient_bytes),
            first_backward_transient_bytes=max(
                other.gradient_bytes + self.first_backward_transient_bytes - freed,
                other.first_backward_transient_bytes,
            ),
            input_grad_transient_bytes=max(
                other.weight_grad_bytes + self.input_grad_transient_bytes - freed, other.input_grad_transient_bytes
            ),
            weight_grad_transient_bytes=max(self.weight_grad_transient_bytes, other.weight_grad_transient_bytes),
            offloads=min(self.offloads, other.offloads),
        )

    def of_batch(self) -> "LayerMemory":
        """Return the memory of this layer if it is the model's first.

        The model's inputs are not counted, because they belong to the batch.
        """
        return replace(
            self,
            activation_bytes=self.activation_bytes - self.kept_input_bytes,
            kept_input_bytes=0,
            input_bytes=0,
            forward_transient_bytes=max(0, self.forward_transient_bytes - (self.input_bytes - self.kept_input_bytes)),
        )

    def recomputed(self, *, keeps_dear: bool) -> "LayerMemory":
        """Return the memory of this layer if its forward is recomputed before the backward.

        Until the recomputation, the layer holds its input, copies of its buffers and, with ``keeps_dear``, the
        activations that are expensive to compute.
        """
        recomputed = self.activation_bytes - self.kept_input_bytes
        kept = self.input_bytes + self.buffer_bytes + keeps_dear * self.dear_bytes
        return replace(
            self,
            activation_bytes=kept,
            kept_input_bytes=self.input_bytes,
            kept_output_bytes=keeps_dear * self.dear_output_bytes,
            forward_transient_bytes=max(0, self.activation_bytes + self.forward_transient_bytes - kept),
            backward_transient_bytes=recomputed + self.backward_transient_bytes,
            first_backward_transient_bytes=recomputed + self.first_backward_transient_bytes,
            input_grad_transient_bytes=recomputed + self.input_grad_transient_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """Measured memory of a loss, in bytes. All fields are 0 if the loss was not measured."""

    #: Memory held for the backward.
    kept_bytes: int = 0
    #: The part of `kept_bytes` that shares memory with the model's output.
    kept_input_bytes: int = 0
    #: Transient of the forward.
    forward_bytes: int = 0
    #: Transient of the backward.
    backward_bytes: int = 0

    def as_layer(self, output_bytes: int) -> LayerMemory:
        """Return the loss as a layer whose input has ``output_bytes`` bytes.

        The memory of a step's scalars, such as the losses, is included.

        A loss that was not measured is assumed to be cross entropy: the loss holds a tensor of the output's size, and
        the backward pass of the loss creates two gradients of that size.
        """
        measured = self.backward_bytes > 0
        backward = self.backward_bytes if measured else 2 * output_bytes
        return LayerMemory(
            input_bytes=output_bytes,
            activation_bytes=self.kept_bytes if measured else output_bytes,
            kept_input_bytes=self.kept_input_bytes,
            buffer_bytes=SCALARS_BYTES,
            forward_transient_bytes=self.forward_bytes if measured else output_bytes,
            backward_transient_bytes=backward,
            first_backward_transient_bytes=backward,
            input_grad_transient_bytes=backward,
        )


def stage_memory(layers: Sequence[LayerMemory]) -> LayerMemory:
    """Return the memory of a stage made of these layers.

    The stage holds its input until its forward ends, and the incoming gradient until its backward ends, even after the
    layers that use these tensors have run.
    """
    if not layers:
        return LayerMemory()
    return replace(
        reduce(LayerMemory.__add__, layers),
        forward_transient_bytes=_forward(layers),
        weight_grad_transient_bytes=max(_delivered(layers), *(layer.weight_grad_transient_bytes for layer in layers)),
        **_backwards(layers),
    )


def _shared(layers: Sequence[LayerMemory]) -> list[int]:
    """Return, for each layer, how many bytes of its held input the previous layer also holds as its output."""
    pairs = [min(one.kept_output_bytes, other.kept_input_bytes) for one, other in pairwise(layers)]
    return [0, *pairs]


def _forward(layers: Sequence[LayerMemory]) -> int:
    most = held = received = 0
    for layer, shared in zip(layers, _shared(layers), strict=True):
        held += layer.activation_bytes - shared
        most = max(most, received + held + layer.forward_transient_bytes)
        received = layers[0].input_bytes - layers[0].kept_input_bytes
    return most - held


def offloaded_bytes(layers: Sequence[LayerMemory]) -> int:
    """Return the size in bytes of the activations that are copied to the host and back.

    In a run of consecutive offloaded layers, memory shared with the first layer's input or the last layer's output
    stays on the device, because other layers can hold this memory.
    """
    copied = 0
    for offloads, run in groupby(layers, lambda layer: layer.offloads):
        if offloads:
            whole = reduce(LayerMemory.__add__, run)
            copied += max(0, whole.activation_bytes - whole.kept_input_bytes - whole.kept_output_bytes)
    return copied


def dropping_bytes(layers: Sequence[LayerMemory]) -> int:
    """Return the bytes that a stage's forward needs in addition to the input, if the forward keeps no activations.

    This is a maximum over the layers.
    """
    inside = [layer.activation_bytes + layer.forward_transient_bytes for layer in layers]
    return max(0, inside[0] - layers[0].input_bytes, *inside[1:]) if layers else 0


def _backwards(layers: Sequence[LayerMemory]) -> dict[str, int]:
    """Return the transient memory of the stage's backward passes, keyed by the field names of `LayerMemory`.

    Transient memory is the memory that a backward pass needs in addition to the stage's activations.

    The weight gradients (W) need the inputs of matrix products. Until the previous layer's backward pass has run, such
    an input can also be held as that layer's output. This memory is counted only once.
    """
    freed = made = left = whole = first = split = twice = received = 0
    for layer, shared in zip(reversed(layers), reversed(_shared(layers)), strict=True):
        twice = min(layer.kept_output_bytes, twice)
        whole = max(whole, received - freed + layer.backward_transient_bytes)
        first = max(first, received - freed + made + layer.first_backward_transient_bytes)
        split = max(split, received - freed + left - twice + layer.input_grad_transient_bytes)
        freed += layer.activation_bytes - shared
        made += layer.gradient_bytes
        left += layer.weight_grad_bytes
        twice = layer.left_input_bytes
        received = layers[-1].output_bytes
    return {
        "backward_transient_bytes": whole,
        "first_backward_transient_bytes": first,
        "input_grad_transient_bytes": split,
    }


def _delivered(layers: Sequence[LayerMemory]) -> int:
    """Return the transient memory of the weight gradients (W), which are computed in groups.

    It is the peak over all groups: the weight gradients of the group so far, plus the transient of the next layer,
    minus the output gradients that the group has freed.
    """
    most = group = gone = 0
    for layer in reversed(layers):
        most = max(most, group - gone + layer.weight_grad_transient_bytes)
        group += layer.deferred_gradient_bytes
        gone += layer.left_grad_bytes
        if group >= DELIVERED_BYTES:
            group = gone = 0
    return most
