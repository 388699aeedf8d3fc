"""Stage body: what a stage computes from what arrives: a chain of layers, or its part of a model's own forward.

The last stage also has a head, which computes the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipesched.errors import InputError
from pipesched.tensors.keyed_random import KeyedRandom, outside_state
from pipesched.user_warning import warn

__all__ = ["Body", "CallLayer", "Chain", "Head", "call_with", "loss_entry"]

#: (name, how many calls of it came before, the layer, args, kwargs) -> what it returns
CallLayer = Callable[[str, int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Body(Protocol):
    """What a stage runs for each micro-batch.

    late_inputs: it gets the model's inputs also where something arrives from other stages.
    """

    late_inputs: bool

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers that it calls, by name; who replaces one before the first run puts it there."""

    def begin(self) -> None:
        """A step begins: modes and flags of the model may have changed."""

    def over(self, layers: Mapping[str, nn.Module], device: torch.device) -> "Body":
        """The same over copies of the layers, for another thread."""

    def inputs(self, inputs: Any) -> Any:
        """What is needed here of the model's inputs (args, kwargs)."""

    def run(self, inputs: Any, arrived: tuple[Any, ...], call: CallLayer, random: KeyedRandom) -> Any:
        """The stage's output, as PerConsumer where its consumers get different ones; on the last stage the model's.

        random: knows the micro-batch; call tells it the layer.
        """


class Chain:
    """Layers in a row: the first takes one argument a producer, or the model's inputs; each further one the output.

    watched: warn of random numbers that have no key, where the first run that trains draws some.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, watched: bool = False) -> None:
        self.layers = dict(layers)
        self._watched = watched
        self.late_inputs = False

    def begin(self) -> None:
        """Nothing to do: layers have their own modes."""

    def over(self, layers: Mapping[str, nn.Module], device: torch.device) -> "Chain":
        """A chain of these."""
        return Chain(layers)

    def inputs(self, inputs: Any) -> Any:
        """All of them."""
        return inputs

    def run(self, inputs: Any, arrived: tuple[Any, ...], call: CallLayer, random: KeyedRandom) -> Any:
        """Call one after the other."""
        args, kwargs = (arrived, {}) if inputs is None else inputs
        if self._watched and any(layer.training for layer in self.layers.values()):
            self._watched = False
            call = _watching(call)
        for name, layer in self.layers.items():
            args = (call(name, 0, layer, args, kwargs),)
            kwargs = {}
        return args[0]


def _watching(call: CallLayer) -> CallLayer:
    """The same, with a warning of a layer that draws outside torch."""

    def watched(name: str, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = outside_state()
        result = call(name, number, layer, args, kwargs)
        if outside_state() != before:
            warn(
                f"random numbers are keyed where the capture of a model sees them; layer {name!r} of an nn.Sequential, "
                f"which is not captured, draws from Python's or numpy's global generator, so that the result depends "
                f"on the schedule; draw from torch's, or call the layers in the forward of a module of your own"
            )
        return result

    return watched


def call_with(
    own: Mapping[str, Tensor], module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module; with buffers or weights given, on those and not on its own, which stay as they are. A dict of them
    has afterwards what the module has put in their place.
    """
    if own and isinstance(module, nn.Module):
        return torch.func.functional_call(module, own if isinstance(own, dict) else dict(own), args, kwargs)
    return module(*args, **kwargs)


@dataclass(frozen=True)
class Head:
    """How the loss comes about on the last stage: the user's loss function, or none for the model's own loss."""

    loss_fn: Callable[[Any, Any], Any] | None

    def loss(self, output: Any, target: Any, own: Mapping[str, Tensor]) -> Tensor:
        """The scalar loss of one micro-batch. own: in place of a loss module's tensors. Raises InputError for none."""
        if self.loss_fn is not None:
            loss = call_with(own, self.loss_fn, (output, target), {}) if own else self.loss_fn(output, target)
        else:
            loss = loss_entry(output)
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss
        what = (
            "what loss_fn(output, target) returns"
            if self.loss_fn
            else "without loss_fn the model's output, or its 'loss',"
        )
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"{what} is a scalar loss; got {shape}; pass loss_fn= and reduce it with mean() or sum(), or call forward"
        )


def loss_entry(output: Any) -> Any:
    """A model's own loss: its output, or the ``loss`` there."""
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
