"""Compiled layers: layers that run through torch.compile, with random numbers that still belong to their place.

No mode sees the calls of a compiled graph. So nothing of it is left to W, and a layer that draws random numbers does so
from the default generator, seeded for that call: other numbers than in eager code, but the same ones whatever the plan,
and again when the layer is recomputed.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.capture.stage_body import call_with
from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.model.fingerprint import fingerprint, form_of
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.tensors.keyed_random import KeyedRandom

__all__ = ["Compiled", "compiler"]

#: Functions by what they are compiled for: a device, and layers of one form.
_Made = dict[tuple[torch.device, str], Callable[..., Any]]


def compiler(compile: Any, batch_norm: BatchNormMode) -> "Callable[[torch.device], Compiled | None]":
    """What makes the compiled layers of a stage on a device; nothing where nothing is compiled.

    compile, batch_norm: as in Pipeline.

    Raises InputError for what is neither a bool nor a mapping, and where both are asked for.
    """
    if not isinstance(compile, bool | Mapping):
        raise InputError(
            f"compile is True, or the arguments of torch.compile by name; got {compile!r}; pass one of them, such as "
            f"compile={{'mode': 'reduce-overhead'}}"
        )
    if compile is False:
        return lambda device: None
    if batch_norm == "mini-batch":
        raise InputError(
            "batch_norm='mini-batch' sees each call of batch_norm, and sees none in a compiled layer; both were asked "
            "for; leave one of them out"
        )
    options = {} if compile is True else dict(compile)
    if options:
        _check(options)
    made: _Made = {}
    return lambda device: Compiled(options, device, made)


def _check(options: dict[Any, Any]) -> None:
    """Raise InputError for what torch.compile refuses, before a layer is compiled."""
    try:
        if not isinstance(backend := options.get("backend", ""), str) and not callable(backend):
            raise TypeError(f"backend is a name or a function, not {backend!r}")  # noqa: TRY301
        torch.compile(nn.Identity(), **options)
    except Exception as error:  # of any type
        raise InputError(
            f"compile holds arguments of torch.compile by name; got {shown(options)}, of which it says: "
            f"{str(error).strip()}; correct them, or pass compile=True"
        ) from error


class Compiled:
    """The compiled layers of one stage. options: of torch.compile. made: shared by stages, and left to later ones."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, made: _Made) -> None:
        self._options = options
        self._device = device
        self._made = made
        self._layers: dict[nn.Module, _Layer] = {}
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
        compiled = self._layers.get(layer)
        if compiled is None:
            compiled = self._layers[layer] = _Layer(layer, self._compiled(layer))
        named = {f"layer.{name}": tensor for name, tensor in own.items()}
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

    def _compiled(self, layer: nn.Module) -> Callable[..., Any]:
        """What calls layers of this form. Others have other code: torch compiles any code for eight cases at most, and
        then leaves it as it is, which would depend on what else was compiled, and when.
        """
        form = fingerprint(form_of(layer))
        if (self._device, form) not in self._made:
            code = _call.__code__.replace(co_name=f"{type(layer).__name__}_{form}")  # torch learns shapes by names
            self._made.setdefault((self._device, form), torch.compile(FunctionType(code, globals()), **self._options))
        return self._made[self._device, form]


def _call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


class _Layer(nn.Module):
    """A layer and what calls it, as one module: so others may stand in for its tensors."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.layer, args, kwargs)
