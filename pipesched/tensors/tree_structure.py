"""Tree structure: the nested containers of a value, including slices and users' objects, and the tensors in them."""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pipesched.tensors.payload import LEAF, children_of, is_record, pytree
from pipesched.tensors.structures import NUMBERS, Structure, structure_of

__all__ = [
    "Pattern",
    "Taken",
    "key_of",
    "map_tensors",
    "named_leaves",
    "objects_in",
    "positional",
    "tensors_in",
    "tensors_in_objects",
]

_ATOMS = frozenset({bool, int, float, complex, str, type(None)})
_SETS = set, frozenset


class Pattern:
    """The structure of a value, without the tensors. The numbers in the value are kept separately, in ``numbers``.

    Objects of users' classes are taken apart into their attributes, except those in ``objects``.

    Args:
        value: any value.
        objects: the objects among the arguments of the call that returned the value; see ``objects_in``.
        tensors: the tensors of the value are added to this list, in the order that ``build`` expects.

    """

    def __init__(self, value: Any, objects: Sequence[Any] = (), tensors: list[Tensor] | None = None) -> None:
        taker = _Taker(objects, [] if tensors is None else tensors)
        self._root = taker.tree(value, ())
        #: The plain values other than tensors that may depend on the batch, such as sizes.
        self.numbers = tuple(taker.numbers)

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor."""
        return type(self._root) is _TensorPlace

    @property
    def is_list(self) -> bool:
        """Whether the value is a list or a plain tuple, which may have more or fewer entries for other batches."""
        return isinstance(self._root, _Tree) and self._root.kind in (list, tuple)

    def is_like(self, other: "Pattern") -> bool:
        """Return whether both patterns have the same containers, with leaves of the same kinds in the same places."""
        return self._root.is_like(other._root)

    def has_numbers_of(self, other: "Pattern") -> bool:
        """Return whether both patterns have the same numbers. Numbers of different types are not the same."""
        return list(map(key_of, self.numbers)) == list(map(key_of, other.numbers))

    def strange(self, other: "Pattern") -> Any:
        """Return the first object that is not equal to the object in its place in ``other``; None if there is none.

        The objects are those that cannot be taken apart, such as functions. The patterns must be alike.
        """
        pairs = zip(self._root.opaque(), other._root.opaque(), strict=True)
        return next((one for one, known in pairs if not _same(one, known)), None)

    def build(self, tensors: Iterator[Any], numbers: Iterable[Any] | None = None, objects: Sequence[Any] = ()) -> Any:
        """Rebuild the value from these tensors, ``numbers`` (default: the value's own numbers) and ``objects``."""
        return self._root.build(tensors, iter(self.numbers if numbers is None else numbers), [*objects])


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # the comparison is the user's code
        return False


def key_of(number: Any) -> Any:
    """Return a key that is equal for equal plain values of the same type."""
    if isinstance(number, np.ndarray):
        return np.ndarray, number.dtype, number.shape, number.tobytes()
    return type(number), repr(number)  # repr distinguishes 0.0 from -0.0


class _TensorPlace:
    """Marks the place of a tensor in a Pattern."""

    def is_like(self, other: Any) -> bool:
        return type(other) is type(self)

    def opaque(self) -> Iterator[Any]:
        return iter(())

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any], objects: list[Any]) -> Any:
        return next(tensors)


class _Number(_TensorPlace):
    """Marks the place of a number in a Pattern."""

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any], objects: list[Any]) -> Any:
        number = next(numbers)
        return number.copy() if isinstance(number, np.ndarray) else number


class _Argument(_TensorPlace):
    """Marks the place of an object that is among the call's arguments, or that occurs earlier in the value."""

    def __init__(self, number: int) -> None:
        self._number = number

    def is_like(self, other: Any) -> bool:
        return isinstance(other, _Argument) and other._number == self._number

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any], objects: list[Any]) -> Any:
        return objects[self._number]


class _Opaque(_TensorPlace):
    """An object that cannot be taken apart, such as a function."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def is_like(self, other: Any) -> bool:
        return isinstance(other, _Opaque) and type(other._value) is type(self._value)

    def opaque(self) -> Iterator[Any]:
        yield self._value

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any], objects: list[Any]) -> Any:
        return self._value


class _Whole(_TensorPlace):
    """A value with parts. Values of equal ``form`` have the same number of parts."""

    def __init__(self, form: Any, parts: Sequence[_TensorPlace]) -> None:
        self._form = form
        self._parts = parts

    def is_like(self, other: Any) -> bool:
        if type(other) is not type(self) or self._form != other._form:
            return False
        return all(one.is_like(part) for one, part in zip(self._parts, other._parts, strict=True))

    def opaque(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part.opaque()


class _Tree(_Whole):
    """Nested containers with their parts."""

    def __init__(self, kind: type, spec: pytree.TreeSpec, parts: Sequence[_TensorPlace]) -> None:
        super().__init__(spec, parts)
        self.kind = kind
        self._spec = spec

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any], objects: list[Any]) -> Any:
        leaves = [part.build(tensors, numbers, objects) for part in self._parts]
        try:
            return pytree.tree_unflatten(leaves, self._spec)
        except Exception:  # a named tuple whose own __new__ rejects stand-ins, such as PackedSequence
            return _unchecked(iter(leaves), self._spec)


class _Object(_Whole):
    """An object that is no pytree node, with its parts."""

    def __init__(self, structure: Structure, parts: Sequence[_TensorPlace]) -> None:
        super().__init__((structure.kind, list(structure.keys)), parts)
        self._rebuilt = structure.rebuilt

    def build(self, tensors: Iterator[Any], numbers: Iterator[Any], objects: list[Any]) -> Any:
        made = self._rebuilt([part.build(tensors, numbers, objects) for part in self._parts])
        objects.append(made)
        return made


class _Taker:
    """Takes one value apart."""

    def __init__(self, objects: Sequence[Any], tensors: list[Tensor]) -> None:
        #: id of an object -> its number among the call's arguments, followed by the objects taken apart so far
        self._objects = {id(own): number for number, own in enumerate(objects)}
        self._count = len(objects)
        self._tensors = tensors
        self.numbers: list[Any] = []

    def tree(self, value: Any, above: tuple[int, ...]) -> _TensorPlace:
        leaves, spec = pytree.tree_flatten(value)
        parts = [self._part(leaf, above) for leaf in leaves]
        return parts[0] if spec.is_leaf() else _Tree(type(value), spec, parts)

    def _part(self, leaf: Any, above: tuple[int, ...]) -> _TensorPlace:
        if isinstance(leaf, Tensor):
            self._tensors.append(leaf)
            return _TensorPlace()
        if _is_number(leaf):
            self.numbers.append(leaf.copy() if isinstance(leaf, np.ndarray) else leaf)
            return _Number()
        if id(leaf) in self._objects:
            return _Argument(self._objects[id(leaf)])
        structure = None if id(leaf) in above else structure_of(leaf)
        if structure is None:
            return _Opaque(leaf)
        made = _Object(structure, [self.tree(part, (*above, id(leaf))) for part in structure.values])
        self._objects[id(leaf)] = self._count
        self._count += 1
        return made


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject
    if isinstance(leaf, _SETS):
        return all(map(_is_number, leaf))
    if isinstance(leaf, slice):
        return all(part is None or _is_number(part) for part in (leaf.start, leaf.stop, leaf.step))
    return isinstance(leaf, NUMBERS)


def _unchecked(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    """Unflatten like ``pytree.tree_unflatten``, but make named tuples without running their own ``__new__``."""
    if spec.is_leaf():
        return next(leaves)
    parts = [_unchecked(leaves, child) for child in children_of(spec)]
    if spec.type is namedtuple:
        return spec.context._make(parts)
    return pytree.tree_unflatten(parts, pytree.TreeSpec(spec.type, spec.context, [LEAF] * len(parts)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a value, also of those in slices and dataclasses, but not of those in other objects.

    A tensor that occurs twice is yielded twice.
    """
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif type(leaf) not in _ATOMS and (isinstance(leaf, slice) or is_record(leaf)):
            structure = structure_of(leaf)
            yield from tensors_in(list(structure.values)) if structure is not None else ()


def _leaves(value: Any) -> Iterable[Any]:
    """Return the leaves of a pytree. For plain containers this takes much less time than torch's function."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, Tensor):
        return (value,)
    if kind is tuple or kind is list:
        return [leaf for part in value for leaf in _leaves(part)]
    if kind is dict:
        return [leaf for part in value.values() for leaf in _leaves(part)]
    leaves: list[Any] = pytree.tree_leaves(value)
    return leaves


class Taken(NamedTuple):
    """The tensors and the objects among the arguments of a call, and the tensors in these objects."""

    tensors: Sequence[Tensor]
    objects: Sequence[Any] = ()
    in_objects: Sequence[Tensor] = ()


def objects_in(value: Any) -> list[Any]:
    """Return the objects among the leaves of a value whose classes pipesched does not know."""
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) not in _ATOMS and not _is_known(leaf)]


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or _is_number(leaf) or isinstance(leaf, slice) or is_record(leaf)


def tensors_in_objects(objects: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in the attributes of objects."""
    tensors: list[Tensor] = []
    for one in objects:
        Pattern(one, tensors=tensors)
    return tensors


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with ``change`` applied to its tensors, also to those in objects.

    A part in which no tensor changes stays the same object.
    """
    return _mapped(change, value, {})


def _mapped(change: Callable[[Tensor], Tensor], value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    leaves, spec = pytree.tree_flatten(value)
    made = [_mapped_leaf(change, leaf, done) for leaf in leaves]
    if all(one is leaf for one, leaf in zip(made, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(made, spec)


def _mapped_leaf(change: Callable[[Tensor], Tensor], leaf: Any, done: dict[int, Any]) -> Any:
    """Return the changed leaf. ``done`` holds the results for the objects so far, which may occur again."""
    if isinstance(leaf, Tensor):
        return change(leaf)
    if type(leaf) in _ATOMS or (structure := structure_of(leaf)) is None:
        return leaf
    if id(leaf) not in done:
        done[id(leaf)] = leaf  # while the object is taken apart, which may refer to itself
        made = [_mapped(change, part, done) for part in structure.values]
        if any(one is not part for one, part in zip(made, structure.values, strict=True)):
            done[id(leaf)] = structure.rebuilt(made)
    return done[id(leaf)]


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
