"""Interception: one TorchFunctionMode that sees every torch function a stage calls, and a table of what to do.

Keyed random numbers and deferred weight gradients both need to see calls; they are providers of one table, so that
a call is looked up once.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["COMPOSITES", "Handler", "Intercept", "Provider"]

#: Functions that multiply by weights inside a body of Python: the calls in the body are intercepted one by one.
COMPOSITES = frozenset({functional.multi_head_attention_forward})

#: (function, args, kwargs) -> result, in place of the call
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Provider(Protocol):
    """Says which functions it wants to handle."""

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        """The handler for a torch function, or None to leave it alone."""


class Intercept(TorchFunctionMode):
    """While entered, each torch function goes to the first provider that wants it; about 1 us a call."""

    def __init__(self, *providers: Provider) -> None:
        super().__init__()
        self._providers = providers
        self._table: dict[Any, Handler | None] = {}

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

    def _find(self, func: Any) -> Handler | None:
        if func in COMPOSITES:
            return self._inside
        found = (provider.handler_for(func) for provider in self._providers)
        return next((handler for handler in found if handler), None)

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self:
            return _opened(func)(*args, **kwargs)


@functools.cache
def _opened(func: types.FunctionType) -> Callable[..., Any]:
    """A copy of a function of torch.nn.functional that runs its body under the mode.

    The original hands itself over to the mode before its first line and would do so for ever; in the copy that
    question is always answered with no.
    """
    answers = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False
