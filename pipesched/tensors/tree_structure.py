"""Tree structure: the nested containers of a value, including users' dataclasses, and the tensors in them."""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from pipesched.tensors.payload import LEAF, children_of, fields_of, is_record, pytree, record_of

__all__ = ["Pattern", "named_leaves", "positional", "tensors_in"]

#: Types of values other than tensors that may depend on the batch, such as sizes.
_NUMBERS = bool, int, float, complex, torch.Size, str, bytes, range, slice, set, frozenset


class Pattern:
    """The structure of a value, without the tensors. The numbers in the value are kept separately, in ``numbers``."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(value)
        self._parts: list[Any] = [_part(leaf) for leaf in leaves]
        self.numbers = tuple(_numbers_in(value))

    def is_like(self, other: "Pattern") -> bool:
        """Return whether both patterns have the same containers, with leaves of the same kinds in the same places."""
        kinds = [type(part) for part in self._parts]
        others = [type(part) for part in other._parts]
        return self._spec == other._spec and kinds == others

    def build(self, tensors: Iterator[Any], numbers: Iterable[Any] | None = None) -> Any:
        """Rebuild the value from these tensors and from ``numbers`` (default: the value's own numbers)."""
        present = iter(self.numbers if numbers is None else numbers)
        kinds = _Place | _Number | _Record
        leaves = [part.build(tensors, present) if isinstance(part, kinds) else part for part in self._parts]
        try:
            return pytree.tree_unflatten(leaves, self._spec)
        except Exception:  # a named tuple whose own __new__ rejects stand-ins, such as PackedSequence
            return _unchecked(iter(leaves), self._spec)


def _unchecked(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    """Unflatten like ``pytree.tree_unflatten``, but make named tuples without running their own ``__new__``."""
    if spec.is_leaf():
        return next(leaves)
    parts = [_unchecked(leaves, child) for child in children_of(spec)]
    if spec.type is namedtuple:
        return spec.context._make(parts)
    return pytree.tree_unflatten(parts, pytree.TreeSpec(spec.type, spec.context, [LEAF] * len(parts)))


class _Place:
    """Marks the place of a tensor in a Pattern."""

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
        return next(tensors)


class _Number:
    """Marks the place of a number in a Pattern."""

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
        return next(numbers)


@dataclass(frozen=True)
class _Record:
    """The place of a dataclass instance whose class is not a pytree node, with a Pattern for each field."""

    kind: type
    parts: Mapping[str, Pattern]

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
        return record_of(self.kind, {name: part.build(tensors, numbers) for name, part in self.parts.items()})


def _part(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Place()
    if isinstance(leaf, _NUMBERS):
        return _Number()
    if is_record(leaf):
        return _Record(type(leaf), {name: Pattern(own) for name, own in fields_of(leaf).items()})
    return leaf


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a value, in the order that ``Pattern.build`` expects.

    A tensor that occurs twice is yielded twice.
    """
    return _leaves_in(value, Tensor)


def _numbers_in(value: Any) -> Iterator[Any]:
    """Iterate over the numbers of a value. A number that occurs twice is yielded twice."""
    return _leaves_in(value, _NUMBERS)


def _leaves_in(value: Any, kinds: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, kinds):
            yield leaf
        elif is_record(leaf):
            for own in fields_of(leaf).values():
                yield from _leaves_in(own, kinds)


def positional(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's parameters that can be passed by position."""
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in signature(forward).parameters.items() if parameter.kind in kinds]


#: The name of a leaf: the name of its argument, its place outside lists, and its indices in lists.
LeafName = tuple[str, tuple[int, ...], tuple[int, ...]]


def named_leaves(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[LeafName, Any]]:
    """Iterate over a call's leaves as (name, leaf), in pytree order.

    A leaf has the same name whether its argument is passed by position or by keyword. The leaves of a list have the
    same names except for their indices, because a list can have one entry for each row, and another batch may have more
    or fewer rows.

    Args:
        names: the names of positional arguments.
        args: the positional arguments.
        kwargs: the keyword arguments.

    """
    more = (f"argument {position}" for position in range(len(names), len(args)))
    for name, value in (*zip((*names, *more), args, strict=False), *kwargs.items()):
        for place, indices, leaf in _placed_leaves(value, (), ()):
            yield (name, place, indices), leaf


def _placed_leaves(
    value: Any, place: tuple[int, ...], indices: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Any]]:
    if isinstance(value, Tensor):  # the usual case
        yield place, indices, value
        return
    for number, part in enumerate(pytree.tree_leaves(value, is_leaf=_is_list)):
        if _is_list(part):
            for index, one in enumerate(part):
                yield from _placed_leaves(one, (*place, number), (*indices, index))
        else:
            yield (*place, number), indices, part


def _is_list(value: Any) -> bool:
    return type(value) is list
