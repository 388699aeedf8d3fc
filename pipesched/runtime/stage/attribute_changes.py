"""Attribute changes: lets a recomputed forward start with the attributes that modules had before the first run."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import nn

from pipesched.model.attributes import OF_ALL_MODULES
from pipesched.model.state_guard import GROWING

__all__ = ["AttributeChanges", "AttributeValues", "with_values"]

#: (module, attribute) -> value; a sentinel for a missing attribute
AttributeValues = Mapping[tuple[nn.Module, str], Any]

_MISSING: Any = object()


class AttributeChanges:
    """The attributes of some modules that their forwards change, such as counters and flags.

    The first run shows which attributes change. Lists, dicts and sets are compared by their items.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._roots = modules
        self._changing: list[tuple[nn.Module, str]] | None = None

    def before(self) -> AttributeValues:
        """Return the values of the attributes before a forward."""
        keys = self._changing
        if keys is None:
            keys = self._all()
        return {key: _kept(_value(key)) for key in keys}

    def after(self, before: AttributeValues) -> AttributeValues:
        """Return the part of ``before`` that forwards change. The first forward has ended when this is first called."""
        if self._changing is None:
            keys = dict.fromkeys([*before, *self._all()])
            self._changing = [key for key in keys if _differ(before.get(key, _MISSING), _value(key))]
        return {key: before.get(key, _MISSING) for key in self._changing}

    def _all(self) -> list[tuple[nn.Module, str]]:
        modules = dict.fromkeys(part for root in self._roots for part in root.modules())
        return [(module, name) for module in modules for name in vars(module).keys() - OF_ALL_MODULES]


@contextmanager
def with_values(values: AttributeValues) -> Iterator[None]:
    """A context in which attributes have the given values. The present values are set again at the end."""
    now = {key: _value(key) for key in values}
    _set(values)
    try:
        yield
    finally:
        _set(now)


def _set(values: AttributeValues) -> None:
    for (module, name), value in values.items():
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value


def _value(key: tuple[nn.Module, str]) -> Any:
    module, name = key
    return vars(module).get(name, _MISSING)


def _kept(value: Any) -> Any:
    return copy.copy(value) if type(value) in GROWING else value


def _differ(one: Any, other: Any) -> bool:
    if type(one) not in GROWING or type(one) is not type(other):
        return one is not other
    ones, others = _items(one), _items(other)
    return len(ones) != len(others) or not all(map(is_, ones, others))


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
