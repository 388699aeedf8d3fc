"""Compiled: layers that run through torch.compile, with random numbers that still belong to their place.

No mode sees the calls of a compiled graph. So nothing of it is left to W, and a layer that draws random numbers does so
from the default generator, seeded for that call: other numbers than in eager code, but the same ones whatever the plan,
and again when the layer is recomputed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.body import call_with
from pipesched.errors import InputError
from pipesched.norms import BatchNormMode
from pipesched.randomness import KeyedRandom

__all__ = ["Compiled", "compiler"]

#: How torch.compile names a module's tensors.
_PREFIX = "_orig_mod."


def compiler(compile: Any, batch_norm: BatchNormMode) -> "Callable[[], Compiled | None]":
    """What makes the compiled layers of a stage; nothing where nothing is compiled.

    compile, batch_norm: as in Pipeline.

    Raises InputError for what is neither a bool nor a mapping, and where both are asked for.
    """
    if not isinstance(compile, bool | Mapping):
        raise InputError(
            f"compile is True, or the arguments of torch.compile by name; got {compile!r}; pass one of them, such as "
            f"compile={{'mode': 'reduce-overhead'}}"
        )
    if compile is False:
        return lambda: None
    if batch_norm == "mini-batch":
        raise InputError(
            "batch_norm='mini-batch' sees each call of batch_norm, and sees none in a compiled layer; both were asked "
            "for; leave one of them out"
        )
    options = {} if compile is True else dict(compile)
    return lambda: Compiled(options)


class Compiled:
    """The compiled layers of one stage. options: of torch.compile."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._made: dict[nn.Module, Any] = {}
        self._quiet: set[nn.Module] = set()

    def begin(self) -> None:
        """A run begins: layers that drew no random numbers may do so now."""
        self._quiet.clear()

    def call(
        self,
        mode: TorchFunctionMode,
        random: KeyedRandom,
        layer: nn.Module,
        own: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a layer outside the stage's mode. own: tensors in place of the layer's."""
        compiled = self._made.get(layer)
        if compiled is None:
            compiled = self._made[layer] = torch.compile(layer, **self._options)
        named = {_PREFIX + name: tensor for name, tensor in own.items()}
        mode.__exit__(None, None, None)
        try:
            if layer in self._quiet:
                return call_with(named, compiled, args, kwargs)
            output, drew = random.keyed(lambda: call_with(named, compiled, args, kwargs))
            if not drew:
                self._quiet.add(layer)
            return output
        finally:
            mode.__enter__()
