"""Layer memory: what layers need in memory, one after the other, from what each needs alone."""

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

#: Weight gradients that W makes are delivered in groups of about so many bytes.
DELIVERED_BYTES = 1 << 20

#: Losses of up to 16 micro-batches, and the like.
SCALARS_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """What a layer, or several one after the other, need in memory for one micro-batch, in bytes.

    `pipesched.Costs` has columns of the same names: the same sizes, of whole stages. A transient is the most that an
    action needs beyond what is held when it begins.
    """

    #: The input.
    input_bytes: int = 0
    #: The output, and so the gradient that comes back.
    output_bytes: int = 0
    #: What is kept from the forward for the backward. Tensors that share memory count once.
    activation_bytes: int = 0
    #: The part of the activations that lies in the input.
    kept_input_bytes: int = 0
    #: The part of the activations that lies in the output.
    kept_output_bytes: int = 0
    #: Results that take long to compute, which "recompute-cheap" keeps.
    dear_bytes: int = 0
    #: The part of `dear_bytes` that lies in the output.
    dear_output_bytes: int = 0
    #: What is kept between I and W.
    weight_grad_bytes: int = 0
    #: The part of `weight_grad_bytes` that lies in the input.
    left_input_bytes: int = 0
    #: The part of `weight_grad_bytes` that is gradients, which W frees one by one.
    left_grad_bytes: int = 0
    #: The gradients of the parameters.
    gradient_bytes: int = 0
    #: The part of `gradient_bytes` that W makes.
    deferred_gradient_bytes: int = 0
    #: The buffers.
    buffer_bytes: int = 0
    #: Transient of F and R, beyond the activations that they leave. The input counts: somebody holds it meanwhile.
    forward_transient_bytes: int = 0
    #: Transient of a B that adds to gradients of parameters. The gradient of the output counts.
    backward_transient_bytes: int = 0
    #: Transient of the first B, which makes the gradients of parameters. These count, too.
    first_backward_transient_bytes: int = 0
    #: Transient of I. What it leaves for W counts.
    input_grad_transient_bytes: int = 0
    #: Transient of W.
    weight_grad_transient_bytes: int = 0
    #: 1 if the activations wait on the host, else 0.
    offloads: int = 0

    def __add__(self, other: "LayerMemory") -> "LayerMemory":
        """Both, the other one behind: what one keeps of its outputs is what the other keeps of its inputs.

        While one of them runs, the other holds what it keeps: so the most of a transient counts, not the sum.
        """
        shared = min(self.kept_output_bytes, other.kept_input_bytes)
        kept = self.activation_bytes + other.activation_bytes - shared
        freed = kept - self.activation_bytes  # once the other's backward is over
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
        """The same where its inputs are the model's, which lie in the batch anyway."""
        return replace(
            self,
            activation_bytes=self.activation_bytes - self.kept_input_bytes,
            kept_input_bytes=0,
            input_bytes=0,
            forward_transient_bytes=max(0, self.forward_transient_bytes - (self.input_bytes - self.kept_input_bytes)),
        )

    def recomputed(self, *, keeps_dear: bool) -> "LayerMemory":
        """The same where a backward first runs the forward again. Until then its input and copies of its buffers are
        kept, and with ``keeps_dear`` what takes long to compute.
        """
        again = self.activation_bytes - self.kept_input_bytes
        kept = self.input_bytes + self.buffer_bytes + keeps_dear * self.dear_bytes
        return replace(
            self,
            activation_bytes=kept,
            kept_input_bytes=self.input_bytes,
            kept_output_bytes=keeps_dear * self.dear_output_bytes,
            forward_transient_bytes=max(0, self.activation_bytes + self.forward_transient_bytes - kept),
            backward_transient_bytes=again + self.backward_transient_bytes,
            first_backward_transient_bytes=again + self.first_backward_transient_bytes,
            input_grad_transient_bytes=again + self.input_grad_transient_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """What a loss was measured to need in memory, in bytes; 0 where none was measured."""

    #: What it keeps for its backward.
    kept_bytes: int = 0
    #: The part of `kept_bytes` that lies in the output that it is of.
    kept_input_bytes: int = 0
    #: Transient of its forward.
    forward_bytes: int = 0
    #: Transient of its backward.
    backward_bytes: int = 0

    def as_layer(self, output_bytes: int) -> LayerMemory:
        """The loss as a layer behind an output of this size; there are some scalars, too.

        A loss that was not measured is taken to be like cross entropy: it keeps as much as the output, and its backward
        makes two gradients of that size.
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
    """What a stage of these layers needs. Until its forward ends it holds what came to it, and until its backward ends
    the gradient that came to it, where the layer that takes it has long run.
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
    """Of each layer, what it keeps of its inputs that the one before keeps of its outputs."""
    pairs = [min(one.kept_output_bytes, other.kept_input_bytes) for one, other in pairwise(layers)]
    return [0, *pairs]


def _forward(layers: Sequence[LayerMemory]) -> int:
    most = held = came = 0
    for layer, shared in zip(layers, _shared(layers), strict=True):
        held += layer.activation_bytes - shared
        most = max(most, came + held + layer.forward_transient_bytes)
        came = layers[0].input_bytes - layers[0].kept_input_bytes
    return most - held


def offloaded_bytes(layers: Sequence[LayerMemory]) -> int:
    """What goes to the host and back. Of layers one behind the other it is what lies neither in the first one's input
    nor in the last one's output, which others may hold.
    """
    going = 0
    for offloads, run in groupby(layers, lambda layer: layer.offloads):
        if offloads:
            whole = reduce(LayerMemory.__add__, run)
            going += max(0, whole.activation_bytes - whole.kept_input_bytes - whole.kept_output_bytes)
    return going


def dropping_bytes(layers: Sequence[LayerMemory]) -> int:
    """What a forward of these layers needs beyond its input where nothing of it is kept: the most of one layer."""
    inside = [layer.activation_bytes + layer.forward_transient_bytes for layer in layers]
    return max(0, inside[0] - layers[0].input_bytes, *inside[1:]) if layers else 0


def _backwards(layers: Sequence[LayerMemory]) -> dict[str, int]:
    """What backwards need beyond the stage's activations. A product's input that W needs is kept twice until the layer
    before, which keeps it as its output, has run.
    """
    freed = made = left = whole = first = split = twice = came = 0
    for layer, shared in zip(reversed(layers), reversed(_shared(layers)), strict=True):
        twice = min(layer.kept_output_bytes, twice)
        whole = max(whole, came - freed + layer.backward_transient_bytes)
        first = max(first, came - freed + made + layer.first_backward_transient_bytes)
        split = max(split, came - freed + left - twice + layer.input_grad_transient_bytes)
        freed += layer.activation_bytes - shared
        made += layer.gradient_bytes
        left += layer.weight_grad_bytes
        twice = layer.left_input_bytes
        came = layers[-1].output_bytes
    return {
        "backward_transient_bytes": whole,
        "first_backward_transient_bytes": first,
        "input_grad_transient_bytes": split,
    }


def _delivered(layers: Sequence[LayerMemory]) -> int:
    """The most that one group of weight gradients has, beyond the gradients of products that made them and are gone."""
    most = group = gone = 0
    for layer in reversed(layers):
        most = max(most, group - gone + layer.weight_grad_transient_bytes)
        group += layer.deferred_gradient_bytes
        gone += layer.left_grad_bytes
        if group >= DELIVERED_BYTES:
            group = gone = 0
    return most
