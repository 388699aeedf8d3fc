"""Layer memory: what layers need in memory, one after the other, from what each needs alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

__all__ = ["DELIVERED_BYTES", "SCALARS_BYTES", "Footprint", "dropping_bytes", "of_loss", "of_stage"]

#: Weight gradients that W makes are delivered in groups of about so many bytes.
DELIVERED_BYTES = 1 << 20

#: Losses of up to 16 micro-batches, and the like.
SCALARS_BYTES = 128
_BACKWARDS = ("backward_transient_bytes", "first_backward_transient_bytes", "input_grad_transient_bytes")


@dataclass(frozen=True)
class Footprint:
    """What a layer, or several one after the other, need for one micro-batch, in bytes.

    activation_bytes: what is kept from the forward for the backward, each memory once; kept_input_bytes and
    kept_output_bytes of it lie in inputs and outputs. dear_bytes: results that take long to compute, dear_output_bytes
    of them in outputs. weight_grad_bytes: what is kept between I and W, left_input_bytes of it in inputs;
    left_grad_bytes are gradients, which W frees one by one. gradient_bytes, buffer_bytes: of the layer's own;
    deferred_gradient_bytes: of these gradients those that are left to W. Transients: the most that an action needs
    beyond what is held as it begins; of a forward beyond what it leaves, with its inputs, which somebody holds while it
    runs; of a backward with the gradients of the outputs. The first backward makes the gradients of weights, to which
    others add: these belong to its own.
    """

    input_bytes: int = 0
    output_bytes: int = 0
    activation_bytes: int = 0
    kept_input_bytes: int = 0
    kept_output_bytes: int = 0
    dear_bytes: int = 0
    dear_output_bytes: int = 0
    weight_grad_bytes: int = 0
    left_input_bytes: int = 0
    left_grad_bytes: int = 0
    gradient_bytes: int = 0
    deferred_gradient_bytes: int = 0
    buffer_bytes: int = 0
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    first_backward_transient_bytes: int = 0
    input_grad_transient_bytes: int = 0
    weight_grad_transient_bytes: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        """Both, the other one behind: what one keeps of its outputs is what the other keeps of its inputs.

        While one of them runs, the other holds what it keeps: so the most of a transient counts, not the sum.
        """
        shared = min(self.kept_output_bytes, other.kept_input_bytes)
        kept = self.activation_bytes + other.activation_bytes - shared
        freed = kept - self.activation_bytes  # once the other's backward is over
        return Footprint(
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
        )

    def of_batch(self) -> "Footprint":
        """The same where its inputs are the model's, which lie in the batch anyway."""
        return replace(
            self,
            activation_bytes=self.activation_bytes - self.kept_input_bytes,
            kept_input_bytes=0,
            input_bytes=0,
            forward_transient_bytes=max(0, self.forward_transient_bytes - (self.input_bytes - self.kept_input_bytes)),
        )


def of_stage(layers: Sequence[Footprint]) -> Footprint:
    """What a stage of these layers needs. Until its forward ends it holds what came to it, and until its backward ends
    the gradient that came to it, where the layer that takes it has long run.
    """
    if not layers:
        return Footprint()
    return replace(
        reduce(Footprint.__add__, layers),
        forward_transient_bytes=_forward(layers),
        weight_grad_transient_bytes=max(_delivered(layers), *(layer.weight_grad_transient_bytes for layer in layers)),
        **_backwards(layers),
    )


def _shared(layers: Sequence[Footprint]) -> list[int]:
    """Of each layer, what it keeps of its inputs that the one before keeps of its outputs."""
    pairs = [min(one.kept_output_bytes, other.kept_input_bytes) for one, other in pairwise(layers)]
    return [0, *pairs]


def _forward(layers: Sequence[Footprint]) -> int:
    most = held = came = 0
    for layer, shared in zip(layers, _shared(layers), strict=True):
        held += layer.activation_bytes - shared
        most = max(most, came + held + layer.forward_transient_bytes)
        came = layers[0].input_bytes - layers[0].kept_input_bytes
    return most - held


def dropping_bytes(layers: Sequence[Footprint]) -> int:
    """What a forward of these layers needs beyond its input where nothing of it is kept: the most of one layer."""
    inside = [layer.activation_bytes + layer.forward_transient_bytes for layer in layers]
    return max(0, inside[0] - layers[0].input_bytes, *inside[1:]) if layers else 0


def _backwards(layers: Sequence[Footprint]) -> dict[str, int]:
    """What backwards need beyond the stage's activations. A product's input that W needs is kept twice until the layer
    before, which keeps it as its output, has run.
    """
    last = layers[-1]
    freed = made = left = whole = first = split = twice = came = 0
    for layer, shared in zip(reversed(layers), reversed(_shared(layers)), strict=True):
        twice = min(layer.kept_output_bytes, twice)
        whole = max(whole, came - freed + layer.backward_transient_bytes)
        first = max(first, came - freed + made + layer.first_backward_transient_bytes)
        split = max(split, came - freed + left - twice + layer.input_grad_transient_bytes)
        freed += layer.activation_bytes - shared
        made += layer.gradient_bytes
        left += layer.weight_grad_bytes
        twice, came = layer.left_input_bytes, last.output_bytes
    return dict(zip(_BACKWARDS, (whole, first, split), strict=True))


def _delivered(layers: Sequence[Footprint]) -> int:
    """The most that one group of weight gradients has, beyond the gradients of products that made them and are gone."""
    most = group = gone = 0
    for layer in reversed(layers):
        most = max(most, group - gone + layer.weight_grad_transient_bytes)
        group += layer.deferred_gradient_bytes
        gone += layer.left_grad_bytes
        if group >= DELIVERED_BYTES:
            group = gone = 0
    return most


def of_loss(output_bytes: int, kept: int = 0, kept_input: int = 0, forward: int = 0, backward: int = 0) -> Footprint:
    """A loss of outputs of this size; there are some scalars, too. kept, of which kept_input lies in the outputs,
    forward and backward, its transients, were measured; where they are 0 it is taken to keep, as cross entropy, as much
    as the output that it is of, and its backward to make two gradients of that size.
    """
    if not backward:
        kept, forward, backward = output_bytes, output_bytes, 2 * output_bytes
    return Footprint(
        input_bytes=output_bytes,
        activation_bytes=kept,
        kept_input_bytes=kept_input,
        buffer_bytes=SCALARS_BYTES,
        forward_transient_bytes=forward,
        **dict.fromkeys(_BACKWARDS, backward),
    )
