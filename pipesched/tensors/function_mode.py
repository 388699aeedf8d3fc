"""Function mode: a TorchFunctionMode that calls handlers in place of torch functions.

Keyed random numbers and deferred weight gradients both intercept calls in a stage. They share one mode, so that
there is only one lookup per call.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipesched.tensors.torch_insides import check_body

__all__ = ["COMPOSITES", "Handler", "Intercept"]

#: Python functions that multiply by weights in their body. The calls in the body are intercepted one by one.
COMPOSITES = frozenset({functional.multi_head_attention_forward})

#: (function, args, kwargs) -> result, in place of the call
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Provider(Protocol):
    """Provides handlers for some torch functions."""

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        """Return the handler for a torch function, or None if the function is not intercepted."""


class Intercept(TorchFunctionMode):
    """Calls a handler in place of each torch function that has a handler. The lookup takes about 1 us per call."""

    def __init__(self, *providers: _Provider) -> None:
        super().__init__()
        self._providers = providers
        self._table: dict[Any, Handler | None] = {}
        self._copies: dict[types.FunctionType, types.FunctionType] = {}

    def __torch_function__(
        self, func: Any, kinds: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            handler = self._table[func]
        except KeyError:
            handler = self._table[func] = self._find(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})

    def passes(self, function: Any) -> bool:
        """Return whether this function was called before and is not intercepted.

        Such a function can be called without the mode, because torch disables the mode while the function's body runs.
        """
        return isinstance(function, types.FunctionType) and self._table.get(function, self) is None

    def _find(self, func: Any) -> Handler | None:
        if func in COMPOSITES:
            return self._inside
        found = (provider.handler_for(func) for provider in self._providers)
        return next((handler for handler in found if handler), None)

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_body(func)
        return self._opened(func)(*args, **kwargs)

    def _opened(self, func: types.FunctionType) -> Callable[..., Any]:
        """Return a copy of a torch function, such as ``multi_head_attention_forward``, whose body calls handlers.

        Functions without a handler are called directly. This is faster, because few calls need a handler.
        """
        if func not in self._copies:
            named = {**func.__globals__, **_ANSWERS}
            copy = types.FunctionType(func.__code__, named, func.__name__, func.__defaults__, func.__closure__)
            copy.__kwdefaults__ = func.__kwdefaults__
            self._copies[func] = copy
            called = {name: func.__globals__.get(name) for name in func.__code__.co_names if name not in _ANSWERS}
            named.update((name, self._within(func, other)) for name, other in called.items() if callable(other))
        return self._copies[func]

    def _within(self, func: types.FunctionType, other: Any) -> Any:
        """Return the function that the copy of ``func`` must call instead of ``other``."""
        handler = self._find(other)
        if handler is not None:
            return lambda *args, **kwargs: handler(other, args, kwargs)
        same_file = isinstance(other, types.FunctionType) and other.__globals__ is func.__globals__
        return self._opened(other) if same_file else other


def _no(*_: Any) -> bool:
    return False


#: Replacements for the checks through which torch's Python functions enter the mode. A copy must not enter the mode.
_ANSWERS = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
