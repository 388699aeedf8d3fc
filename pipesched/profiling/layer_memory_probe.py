"""Layer memory probe: measures the exact memory needs of a layer by running the layer under a memory tracker."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesched.progress import advance
from pipesched.runtime.stage.recompute import is_dear
from pipesched.runtime.stage.stage import Stage
from pipesched.simulation.layer_memory import LayerMemory
from pipesched.simulation.memory import MessageSizes
from pipesched.tensors.memory_tracker import Books, books_of
from pipesched.tensors.payload import Gradients, Payload, PerConsumer, memory_of
from pipesched.tensors.torch_insides import DispatchMode
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Layer", "Sizes", "sizes_of"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer that runs as a stage, or a whole stage. The layer or stage has already run F, I and W once."""

    stage: Stage
    #: (input, whether to leave weight gradients to W) -> output, as a PerConsumer if consumers get different values.
    run: Callable[[Payload, bool], Payload | PerConsumer]
    #: Frees the inputs and input gradients that a forward and a backward have stored.
    release: Callable[[], None]
    #: The trained parameters.
    weights: Sequence[Tensor]
    buffer_bytes: int


@dataclass(frozen=True)
class Sizes:
    """The measured memory of a stage, and the sizes of the messages that it sends."""

    memory: LayerMemory
    #: The sizes of the message to each consumer stage. `MessageSizes.back` is set when the consumer is measured.
    gives: tuple[MessageSizes, ...]
    #: The size in bytes of the gradients that are sent back to each producer stage.
    backs: tuple[int, ...]


def sizes_of(layer: Layer, arrived: Payload) -> Sizes:
    """Measure a layer's memory, first with B, then with I and W. Uses copies of the input, and frees the gradients."""
    books = books_of(layer.stage.device)
    for weight in layer.weights:
        weight.grad = None
    with books.watching(), _collector_paused():
        first, whole = (_Pass(layer, arrived, books, split=False) for _ in range(2))  # the first allocates gradients
        split = _Pass(layer, arrived, books, split=True)
    trained = [weight for weight in layer.weights if weight.grad is not None]
    for weight in trained:
        weight.grad = None
    kept = max(whole.kept, split.kept)
    memory = LayerMemory(
        input_bytes=sum(tensor.nbytes for tensor in arrived.tensors),
        output_bytes=whole.output_bytes,
        activation_bytes=kept,
        kept_input_bytes=whole.kept_input,
        kept_output_bytes=whole.kept_output,
        dear_bytes=whole.dear,
        dear_output_bytes=whole.dear_output,
        weight_grad_bytes=split.left,
        left_input_bytes=split.left_input,
        left_grad_bytes=split.left_grad,
        gradient_bytes=sum(weight.nbytes for weight in trained),
        deferred_gradient_bytes=split.deferred,
        buffer_bytes=layer.buffer_bytes,
        forward_transient_bytes=max(0, whole.forward - kept),
        backward_transient_bytes=whole.backward,
        first_backward_transient_bytes=first.backward,
        input_grad_transient_bytes=split.backward,
        weight_grad_transient_bytes=split.delivery,
    )
    return Sizes(memory, tuple(whole.gives), tuple(whole.backs))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from freeing older memory, which would count as memory that the layer frees."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Notes:
    """Defines the dispatch method outside the mode class; `pipesched.tensors.memory_tracker` explains why."""

    results: list[tuple[int, int]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_dear(func):
            self.results += _memories(tensors_in(made)).items()
        return made


class _Dear(_Notes, DispatchMode):
    """Records the memory of the results that `pipesched.runtime.stage.recompute` keeps for "recompute-cheap"."""

    def __init__(self) -> None:
        super().__init__()
        self.results = []


class _Pass:
    """Measures the memory of one forward (F) and of its backward.

    The backward is either whole (B), or an input gradient (I) followed by a weight gradient (W). All attributes are in
    bytes. Except where stated, a layer's input and output are counted only if the stage keeps them.

    - ``forward``: the peak during F, always including the input.
    - ``backward``: the peak during B or I, minus the kept activations. The peak includes the output's gradients.
    - ``left``: the memory in use between I and W.
    - ``left_input``: the part of ``left`` that the layer's inputs occupy.
    - ``left_grad``: the part of ``left`` that the gradients for W occupy.
    - ``delivery``: the peak during W, minus ``left``.
    - ``deferred``: the size of the weight gradients that W computes.
    """

    def __init__(self, layer: Layer, arrived: Payload, books: Books, *, split: bool) -> None:
        self._books = books
        begin = books.bytes
        books.mark()
        given = arrived.map_tensors(lambda tensor: tensor.to(layer.stage.device, copy=True))
        own = {memory_of(tensor) for tensor in given.tensors}
        inputs = books.bytes - begin
        with _Dear() as dear:
            output = layer.run(given, split)
        self.forward = max(0, books.peak - begin)
        outputs: list[Payload] = list(output) if isinstance(output, PerConsumer) else [output]
        del output
        self.output_bytes = sum(tensor.nbytes for one in outputs for tensor in one.tensors)
        made = _memories(tensor for one in outputs for tensor in one.tensors)
        self.dear = sum(size for _, size in dear.results)
        self.dear_output = sum(dict(result for result in dear.results if result[0] in made).values())
        before = books.bytes
        grads: list[Gradients] = [tuple([torch.ones_like(tensor) for tensor in one.wanted]) for one in outputs]
        came = books.bytes - before
        self.gives = [self._given(outputs) for _ in grads]
        new = sum(size for memory, size in made.items() if memory not in own)
        self.kept_output = max(0, new - self._dropped(before + came))
        held = books.bytes
        del given
        layer.release()
        self.kept_input = max(0, inputs - self._dropped(held))  # the input can free caches, too
        self.kept_output += min(self.kept_input, sum(size for memory, size in made.items() if memory in own))
        self.gives = [one._replace(kept=min(one.kept, self.kept_output)) for one in self.gives]
        base = books.bytes - came
        self.kept = max(0, base - begin)  # layers can free earlier garbage
        books.mark()
        act = layer.stage.input_grad if split else layer.stage.backward
        back = act(0, *grads)
        advance()
        self.backward = max(0, books.peak - base)
        self.backs = [sum(_memories(grad for grad in one if grad is not None).values()) for one in back]
        del grads, back
        layer.release()
        self.left = self.left_input = self.left_grad = self.delivery = self.deferred = 0
        if split:
            left = books.bytes
            products = [product for product in layer.stage.products(0) if product.grad is not None]
            self.deferred = sum(weight.nbytes for weight in {weight for one in products for weight in one.weights})
            used = _memories(product.input for product in products)
            self.left_input = sum(size for memory, size in used.items() if memory in own)
            self.left_grad = sum(_memories(product.grad for product in products if product.grad is not None).values())
            del products
            self.left = max(0, left - begin)
            books.mark()
            layer.stage.weight_grad(0)
            self.delivery = max(0, books.peak - left)

    def _given(self, outputs: list[Payload]) -> MessageSizes:
        """Remove and free the first output. Returns the sizes of the message that would carry this output."""
        before = self._books.bytes
        one = outputs.pop(0)
        arriving = sum(tensor.nbytes for tensor in one.tensors)
        made = sum(_memories(one.tensors).values())
        del one
        return MessageSizes(arriving=arriving, made=made, kept=made - self._dropped(before), back=0)

    def _dropped(self, before: int) -> int:
        return before - self._books.bytes


def _memories(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the memory that the tensors use: address -> size in bytes."""
    return {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
