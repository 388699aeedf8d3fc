"""Unsplit model: runs a model as a whole, with the random numbers and the tied weights of a pipeline."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.model.attributes import set_attributes
from pipesched.model.containers import Shells
from pipesched.model.module_tree import is_in_a_row
from pipesched.model.padded_encoder import encoders_in, padded
from pipesched.model.tied_weights import with_stand_ins
from pipesched.runtime.stage.added_losses import AddedLosses
from pipesched.runtime.stage.batch_norm import Norms
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.function_transforms import running_transform
from pipesched.tensors.keyed_random import InBackward, Key, KeyedRandom
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Unsplit"]


#: (layer, number of the call, parameters) -> replacements of parameters. The layer is "" for a call outside layers.
StandIns = Callable[[str, int, Collection[nn.Parameter]], Mapping[nn.Parameter, Tensor]]


class _Functions(TorchFunctionMode):
    """Passes each call of a torch function to ``call``."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


class Unsplit:
    """Runs a model as a whole. The Key passed to a call determines all random numbers drawn in the call.

    Args:
        model: the user's module.
        layers: the layers, keyed by name.
        stand_ins: a function that returns, for each call, tensors that replace some of the parameters. Default: none.
        norms: collects BatchNorm statistics over whole mini-batches. Default: None.
        step_data: receives the losses that layers add. Default: None (they are dropped).

    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        stand_ins: StandIns = lambda layer, number, parameters: {},
        norms: Norms | None = None,
        step_data: StepData | None = None,
    ) -> None:
        self._layers = layers
        self._shells = None if is_in_a_row(model) else Shells(model, layers, self._call, layers)
        self._root = self._row if self._shells is None else self._shells.model
        self._stand_ins = stand_ins
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._random = KeyedRandom(device)
        self._norms = norms
        #: The losses that layers add.
        self.added = AddedLosses(self._random)
        self.added.step_data = step_data or StepData(0, 0, [])
        own = self._random, self.added
        self._intercept = Intercept(*own) if norms is None else Intercept(*own, norms)
        #: The context for backward passes: recomputation repeats random numbers, and other random calls raise an error.
        uncounted = () if norms is None else (norms.uncounted,)
        self.in_backward = Intercept(InBackward(self._random), self.added.in_backward, *uncounted)
        self._key = Key(0, 0, 0)
        self._counts: dict[str, int] = {}
        self._inside = self._running = False
        self._code = ExitStack()
        self._code_parts = 0

    def __call__(self, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._key = key
        self._counts = {}
        self._inside = False
        self._code_parts = 0
        self._random.enter(key, "")
        self.added.begin(key)
        if self._norms is not None:
            self._norms.microbatch = key.microbatch
        self._running = True
        try:
            with self._intercept, _Functions(self._between), self._code:
                self._begin_code()
                output = self._root(*args, **kwargs)
        finally:
            self._running = False
        if self._shells is not None:
            set_attributes(self._shells.changed())
        return output

    def _begin_code(self) -> None:
        """Seed Python's and numpy's generators for the code that runs before the next layer, or after the last."""
        self._code.enter_context(self._random.outside("", self._code_parts))
        self._code_parts += 1

    def _row(self, *args: Any, **kwargs: Any) -> Any:
        """Run a chain of layers. The first layer gets the model's inputs."""
        for name, layer in self._layers.items():
            args = (self._call(name, layer, args, kwargs),)
            kwargs = {}
        return args[0]

    def loss(self, loss_fn: Callable[[Any, Any], Any], key: Key, output: Any, target: Any) -> Any:
        """Compute the loss, with the same random numbers as in a pipeline."""
        self._random.enter(key, "loss_fn")
        with self._intercept:
            return loss_fn(output, target)

    def _between(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function. Count a call outside layers that uses parameters, and replace the parameters."""
        used = [] if self._inside else [leaf for leaf in tensors_in((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        if used and running_transform() is None:  # gradients from inside a transform go to the parameter itself
            number = self._counts[""] = self._counts.get("", -1) + 1
            others = self._stand_ins("", number, dict.fromkeys(used))
            args, kwargs = with_stand_ins((args, kwargs), others) if others else (args, kwargs)
        return func(*args, **kwargs)

    def _call(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or not self._running:  # for example a backward that recomputes the call
            return layer(*args, **kwargs)
        drawn = self._random.op
        number = self._counts.get(name, 0)
        self._random.enter(self._key, name, number)
        self._inside = True
        self._code.close()
        try:
            used = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, nn.Parameter)]
            named = dict(layer.named_parameters())
            others = self._stand_ins(name, number, dict.fromkeys([*named.values(), *used]))
            own = {key: others[parameter] for key, parameter in named.items() if parameter in others}
            if others and used:
                args, kwargs = with_stand_ins((args, kwargs), others)
            with self._random.outside(name, number), padded(encoders_in(layer)):
                result = torch.func.functional_call(layer, dict(own), args, kwargs) if own else layer(*args, **kwargs)
            self._counts[name] = number + 1
            return result
        finally:
            self._inside = False
            self._random.enter(self._key, "", 0, drawn)
            self._begin_code()
