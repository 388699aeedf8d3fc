"""Stage body: the computation of one stage, either a chain of layers or the stage's calls of a captured forward.

The last stage also has a Head, which computes the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pipesched.errors import InputError
from pipesched.model.sharded_modules import ShardedModules
from pipesched.tensors.keyed_random import KeyedRandom, outside_state
from pipesched.user_warning import warn

if TYPE_CHECKING:
    from pipesched.capture.loss_rule import LossRule

__all__ = ["Body", "CallLayer", "Head", "LayerChain", "call_with", "loss_entry"]

#: (name, number of earlier calls of the layer, the layer, args, kwargs) -> the layer's output
CallLayer = Callable[[str, int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Body(Protocol):
    """The computation of a stage for each micro-batch."""

    #: Whether the stage needs the model's inputs even if it receives values from other stages.
    late_inputs: bool
    #: The modules whose weights are divided among several processes; None if no module is sharded.
    sharded: ShardedModules | None
    #: Makes the random numbers of the stage on its device.
    random: Callable[[torch.device], KeyedRandom]

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Layer name -> layer that this stage calls. Assign to this dict before the first run to replace a layer."""

    def begin(self) -> None:
        """Prepare for a step. The model's mode and flags may have changed since the previous step."""

    def over(self, layers: Mapping[str, nn.Module], device: torch.device) -> "Body":
        """Return a stage body that runs copies of the layers, for another thread."""

    def inputs(self, inputs: Any, path: int = 0) -> Any:
        """Return the model's inputs (args, kwargs), with meta tensors for the tensors that this stage does not need.

        ``path`` is the path of the micro-batch through the code between layers; 0 is the path of the sample.
        """

    def run(self, inputs: Any, arrived: tuple[Any, ...], call: CallLayer, random: KeyedRandom, path: int = 0) -> Any:
        """Compute the stage's output.

        Args:
            inputs: the model's inputs (args, kwargs); None if the stage does not get them.
            arrived: one value from each sending stage.
            call: the function that calls a layer.
            random: the micro-batch's random number generator.
            path: the path of the micro-batch through the code between layers. Default: 0, the path of the sample.

        Returns:
            On the last stage, the model's output. On other stages, the value to send, or a PerConsumer with one value
            for each receiving stage.

        """


class LayerChain:
    """A chain of layers. The first layer's arguments are the model's inputs or the output of the previous stage.

    If ``watched`` is True, the first run in training mode warns about layers that draw random numbers from Python or
    numpy.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, watched: bool = False) -> None:
        self.layers = dict(layers)
        self._watched = watched
        self.late_inputs = False
        self.sharded: ShardedModules | None = None
        self.random: Callable[[torch.device], KeyedRandom] = KeyedRandom

    def begin(self) -> None:
        """Do nothing, because each layer runs in its own mode."""

    def over(self, layers: Mapping[str, nn.Module], device: torch.device) -> "LayerChain":
        return LayerChain(layers)

    def inputs(self, inputs: Any, path: int = 0) -> Any:
        return inputs

    def run(self, inputs: Any, arrived: tuple[Any, ...], call: CallLayer, random: KeyedRandom, path: int = 0) -> Any:
        args, kwargs = (arrived, {}) if inputs is None else inputs
        if self._watched and any(layer.training for layer in self.layers.values()):
            self._watched = False
            call = _watching(call)
        for name, layer in self.layers.items():
            args = (call(name, 0, layer, args, kwargs),)
            kwargs = {}
        return args[0]


def _watching(call: CallLayer) -> CallLayer:
    """Wrap ``call`` to warn about a layer that draws random numbers from Python's or numpy's global generator."""

    def watched(name: str, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = outside_state()
        result = call(name, number, layer, args, kwargs)
        if outside_state() != before:
            warn(
                f"layers of an nn.Sequential must draw their random numbers from torch; layer {name!r} draws from "
                f"Python's or numpy's global generator, so the layer's results depend on the schedule; draw from "
                f"torch, or call the layers from the forward of your own module, where pipesched captures these "
                f"random numbers"
            )
        return result

    return watched


def call_with(
    own: Mapping[str, Tensor], module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module with the tensors in ``own`` in place of its weights and buffers. The module stays unchanged.

    If ``own`` is a dict, a buffer that the module assigns during the call is stored in this dict.
    """
    if own and isinstance(module, nn.Module):
        return torch.func.functional_call(module, own if isinstance(own, dict) else dict(own), args, kwargs)
    return module(*args, **kwargs)


@dataclass(frozen=True)
class Head:
    """Computes the loss on the last stage, with the user's loss function or from the model's own output."""

    loss_fn: Callable[[Any, Any], Any] | None
    #: The rule that the first calls of a user's loss function show. Default: None (the options of a torch loss, or the
    #: model's own loss).
    rule: "LossRule | None" = None
    #: Returns the whole output for metrics and for the user, if each rank of a tensor group holds a part. Collective.
    whole: Callable[[Any], Any] | None = None

    def loss(self, output: Any, target: Any, own: Mapping[str, Tensor]) -> Tensor:
        """Compute the scalar loss of one micro-batch. ``own`` replaces the tensors of a loss module.

        Raises InputError if the loss is not a scalar.
        """
        if self.loss_fn is None:
            loss = loss_entry(output)
        else:
            try:
                loss = call_with(own, self.loss_fn, (output, target), {}) if own else self.loss_fn(output, target)
            except (TypeError, AttributeError) as error:
                if isinstance(output, Tensor):
                    raise
                error.add_note(
                    f"loss_fn gets the model's whole output, {_described(output)}; choose a part of it, such as "
                    f"loss_fn=lambda output, target: loss_fn(output[0], target)"
                )
                raise
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss
        if self.loss_fn is None and not isinstance(output, Tensor):
            raise InputError(
                f"without loss_fn, the model's output must be a scalar loss, or have one as its 'loss' entry or "
                f"attribute; got {_described(output)}; return a dict such as {{'logits': logits, 'loss': loss}} from "
                f"the model, pass a loss_fn= that takes the output, or call forward"
            )
        source = (
            "loss_fn(output, target) must return"
            if self.loss_fn
            else "without loss_fn, the model's output or its 'loss' entry must be"
        )
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"{source} a scalar loss; got {shape}; pass a loss_fn= that reduces the loss with mean() or sum(), or "
            f"call forward"
        )


def _described(output: Any) -> str:
    """Describe a model's output: its type, and the shapes of the tensors in a tuple, a list or a dict."""

    def each(value: Any) -> str:
        return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of " + ", ".join(f"{key!r}: {each(one)}" for key, one in output.items())
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of " + ", ".join(map(each, output))
    return each(output)


def loss_entry(output: Any) -> Any:
    """Return a model's own loss: the output if it is a tensor, else the output's ``loss`` (None if there is none)."""
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
