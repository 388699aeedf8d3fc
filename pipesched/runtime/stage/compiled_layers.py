"""Compiled layers: layers that run through torch.compile, with random numbers that do not depend on the plan.

A TorchFunctionMode does not see the calls inside a compiled graph. Therefore the weight gradients of a compiled layer
are never deferred to the W action. A compiled layer that draws random numbers uses the default generator, which is
seeded for each call. The numbers differ from those of eager code, but they do not depend on the plan, and a
recomputation draws the same numbers.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

from pipesched.capture.stage_body import call_with
from pipesched.checks import shown
from pipesched.errors import InputError, TorchVersionError
from pipesched.model.fingerprint import fingerprint, form_of
from pipesched.runtime.stage.batch_norm import BatchNormMode
from pipesched.runtime.stage.compile_turns import CompileTurns
from pipesched.tensors.added_losses import Route, added_loss, routed
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.payload import Payload

__all__ = ["Compiled", "compiler"]

_COMPILES_IN_THREADS = "2.13"  # the first tested version of torch whose compiler does not crash in threads

#: Compiled functions, keyed by device and layer structure.
_Made = dict[tuple[torch.device, str], Callable[..., Any]]


def compiler(
    compile: Any, batch_norm: BatchNormMode, *, in_threads: bool
) -> "Callable[[torch.device], Compiled | None]":
    """Return a function that makes a `Compiled` for a stage's device, or returns None if ``compile`` is False.

    Args:
        compile: True, False, or a dict of arguments for ``torch.compile``, as in Pipeline.
        batch_norm: the option ``batch_norm`` of the pipeline.
        in_threads: whether ranks are threads of one process.

    Raises:
        TorchVersionError: the compiler of this torch crashes in threads.
        InputError: ``compile`` has another type, torch.compile refuses its arguments, or ``batch_norm`` is "mini-batch"
            and ``compile`` is not False.

    """
    if not isinstance(compile, bool | Mapping):
        raise InputError(
            f"compile= must be a bool, or a dict of arguments for torch.compile; got {compile!r}; pass True, or "
            f"for example compile={{'mode': 'reduce-overhead'}}"
        )
    if compile is False:
        return lambda device: None
    if batch_norm == "mini-batch":
        raise InputError(
            "batch_norm='mini-batch' must be used without compile=, because pipesched cannot intercept batch_norm "
            "calls inside compiled layers; both options were passed; leave one option out"
        )
    if in_threads and TorchVersion(torch.__version__) < _COMPILES_IN_THREADS:
        raise TorchVersionError(
            f"compile= in one process needs torch {_COMPILES_IN_THREADS} or newer, because the compiler of earlier "
            f"versions can crash in a second pipeline's threads; torch {torch.__version__} is installed; install a "
            f"newer torch, leave compile= out, or run one process for each stage with mesh="
        )
    options = {} if compile is True else dict(compile)
    if options:
        _check(options)
    made: _Made = {}
    return lambda device: Compiled(options, device, made)


def _check(options: dict[Any, Any]) -> None:
    """Raise InputError for arguments that torch.compile refuses, before any layer is compiled."""
    try:
        if not isinstance(backend := options.get("backend", ""), str) and not callable(backend):
            raise TypeError(f"backend must be a name or a function, not {backend!r}")  # noqa: TRY301
        torch.compile(nn.Identity(), **options)
    except Exception as error:  # torch.compile may raise any type
        raise InputError(
            f"compile= must contain valid arguments of torch.compile; with {shown(options)}, torch.compile raised: "
            f"{str(error).strip()}; correct the arguments, or pass compile=True"
        ) from error


class Compiled:
    """The compiled layers of one stage.

    Args:
        options: the arguments of ``torch.compile``.
        device: the device of the stage.
        made: the functions compiled so far, shared by all stages and by later plans.

    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, made: _Made) -> None:
        self._options = options
        self._device = device
        self._made = made
        self._layers: dict[nn.Module, _CompiledLayer] = {}
        self._quiet: set[nn.Module] = set()
        self._turns = CompileTurns()
        self._route = torch.compiler.disable(_add)  # breaks the graph where a layer adds a loss

    def begin(self) -> None:
        """Start a run. The first call of each layer checks whether the layer draws random numbers."""
        self._quiet.clear()

    def turn(self, path: int, arrived: Payload) -> AbstractContextManager[None]:
        """A context for a forward of the stage, in which torch may compile layers.

        Args:
            path: the number of the path that the forward takes through the model's code.
            arrived: the inputs of the stage.

        """
        leaves = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in arrived.leaves)
        autocast = torch.is_autocast_enabled(self._device.type)
        return self._turns.turn((path, leaves, arrived.needs_grad, torch.is_grad_enabled(), autocast))

    def call(
        self,
        mode: TorchFunctionMode,
        random: KeyedRandom,
        layer: nn.Module,
        own: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a compiled layer. The tensors in ``own`` replace tensors of the layer.

        ``mode`` is the active TorchFunctionMode, which this method deactivates during the call.
        """
        compiled = self._layers.get(layer)
        if compiled is None:
            compiled = self._layers[layer] = _CompiledLayer(layer, self._compiled(layer))
        named = {f"layer.{name}": tensor for name, tensor in own.items()}
        act = partial(_called, partial(self._route, mode), named, compiled, args, kwargs)
        mode.__exit__(None, None, None)
        try:
            if layer in self._quiet:
                return act()
            output, drew = random.keyed(act)
            if not drew:
                self._quiet.add(layer)
            return output
        finally:
            mode.__enter__()

    def _compiled(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the compiled function for all layers that have the same structure as ``layer``.

        Every structure gets its own code object, because torch.compile specialises a code object at most eight times
        and then runs it eagerly. If structures shared a code object, the result would depend on which structures
        were compiled first.
        """
        form = fingerprint(form_of(layer))
        if (self._device, form) not in self._made:
            code = _call.__code__.replace(
                co_name=f"{type(layer).__name__}_{form}"
            )  # torch remembers dynamic shapes by function name
            self._made.setdefault((self._device, form), torch.compile(FunctionType(code, globals()), **self._options))
        return self._made[self._device, form]


def _add(mode: TorchFunctionMode, *added: Any) -> None:
    """Pass an added loss to ``mode``, the stage's TorchFunctionMode, which is inactive in compiled layers."""
    mode.__torch_function__(added_loss, (), added)


def _called(
    route: Route,
    named: Mapping[str, Tensor],
    compiled: "_CompiledLayer",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a compiled layer. Losses that the layer adds are passed to ``route``."""
    with routed(route):
        return call_with(named, compiled, args, kwargs)


def _call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


class _CompiledLayer(nn.Module):
    """Calls a layer through a compiled function. ``functional_call`` can replace the layer's tensors."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.layer, args, kwargs)
