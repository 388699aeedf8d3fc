"""Pattern: the form of a value, dataclasses of users among it: where its tensors are, and what is beside them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from pipesched.payload import pytree

__all__ = ["Pattern", "named_leaves", "positional", "tensors_in"]


class Pattern:
    """The form of a value: what it holds beside tensors, and where they go."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(value)
        self._parts: list[Any] = [_part(leaf) for leaf in leaves]

    def build(self, tensors: Iterator[Any]) -> Any:
        """The value with these tensors."""
        leaves = [part.build(tensors) if isinstance(part, _Place | _Record) else part for part in self._parts]
        return pytree.tree_unflatten(leaves, self._spec)


class _Place:
    """Where a tensor goes."""

    def build(self, tensors: Iterator[Any]) -> Any:
        return next(tensors)


@dataclass(frozen=True)
class _Record:
    """A dataclass that pytrees do not know."""

    kind: type
    parts: Mapping[str, Pattern]

    def build(self, tensors: Iterator[Any]) -> Any:
        made: Any = object.__new__(self.kind)
        for name, pattern in self.parts.items():
            object.__setattr__(made, name, pattern.build(tensors))
        return made


def _part(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Place()
    if _is_record(leaf):
        parts = {item.name: Pattern(getattr(leaf, item.name)) for item in dataclasses.fields(leaf)}
        return _Record(type(leaf), parts)
    return leaf


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, each place of it once, in the order of ``Pattern.build``."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif _is_record(leaf):
            for item in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, item.name))


def positional(forward: Callable[..., Any]) -> list[str]:
    """The names of the arguments that may be passed by position."""
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in signature(forward).parameters.items() if parameter.kind in kinds]


def named_leaves(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, int], Any]]:
    """The leaves of a call, in the order of the pytree (args, kwargs), each with (its argument's name, number in it).

    names: of positional arguments. So a leaf has one name, by position or by keyword, in whatever order.
    """
    more = (f"argument {position}" for position in range(len(names), len(args)))
    for name, value in (*zip((*names, *more), args, strict=False), *kwargs.items()):
        for number, leaf in enumerate(pytree.tree_leaves(value)):
            yield (name, number), leaf
