"""Payload: the pytrees of tensors and plain values that stages exchange."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipesched.errors import TorchVersionError
from pipesched.tensors.torch_insides import pytree

__all__ = [
    "LEAF",
    "Gradients",
    "Opened",
    "Payload",
    "PerConsumer",
    "children_of",
    "fields_of",
    "flatten",
    "form_of",
    "has_a_row_each",
    "is_record",
    "memory_of",
    "opened",
    "pytree",
    "record_of",
    "trainable_leaves",
]

#: The gradient of each payload leaf that needs a gradient; None if the leaf got none.
Gradients = tuple[Tensor | None, ...]


class PerConsumer(tuple[Any, ...]):
    """One value for each consuming stage. A value of any other type is sent to all consuming stages."""


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if the tensor is not strided."""
    return 0 if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


@dataclass(slots=True, eq=False)
class Payload:
    """A flattened value. A tensor that appears in several places is one leaf.

    Immutable by convention; a frozen dataclass would take twice as long to create.
    """

    leaves: tuple[Any, ...]
    #: For each place in the value, the index of the leaf at this place.
    places: tuple[int, ...]
    spec: pytree.TreeSpec
    #: For each leaf, whether the leaf is a tensor with a gradient that must be sent back.
    needs_grad: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, detached: Callable[[Tensor], Tensor] = Tensor.detach) -> "Payload":
        """Flatten a value, and apply ``detached`` to its tensors.

        By default, the payload's tensors share memory and version counters with the value's tensors.
        """
        if isinstance(value, Tensor):  # the usual case
            return cls((detached(value),), (0,), LEAF, (value.requires_grad,))
        leaves, places, spec = _distinct(value)
        needs_grad = tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])
        apart = tuple([detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        return cls(apart, places, spec, needs_grad)

    @classmethod
    def joined(cls, payloads: "Sequence[Payload]") -> "Payload":
        """Return one payload for a tuple of the payloads' values. A tensor in two values becomes two leaves."""
        leaves: list[Any] = []
        places: list[int] = []
        for payload in payloads:
            places += (len(leaves) + place for place in payload.places)
            leaves += payload.leaves
        value = tuple(payload.value for payload in payloads)
        spec = pytree.tree_structure(value)
        if spec.num_leaves != len(places):  # the leaves of dataclasses
            spec = pytree.tree_structure(opened(value))
        needs_grad = tuple(needs for payload in payloads for needs in payload.needs_grad)
        return cls(tuple(leaves), tuple(places), spec, needs_grad)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    @property
    def overlapping(self) -> list[Tensor]:
        """The tensors that share memory with another tensor of the payload, such as a view and its base."""
        tensors = self.tensors
        counts = Counter(map(memory_of, tensors))
        return [tensor for tensor in tensors if counts[memory_of(tensor)] > 1]

    @property
    def value(self) -> Any:
        """The value rebuilt from the leaves."""
        return self._together(self.leaves)

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The tensors whose gradients must be sent back."""
        if len(self.leaves) == 1:
            return self.leaves if self.needs_grad[0] else ()
        return tuple(leaf for leaf, needs in zip(self.leaves, self.needs_grad, strict=True) if needs)

    def with_wanted(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value, rebuilt with ``tensors`` in place of the tensors in ``wanted``."""
        if self.spec is LEAF:
            return (tensors or self.leaves)[0]
        if not tensors or len(self.leaves) == 1:
            return self._together(tensors or self.leaves)
        fill = iter(tensors)
        return self._together(
            [next(fill) if needs else leaf for leaf, needs in zip(self.leaves, self.needs_grad, strict=True)]
        )

    def same_form(self) -> "Callable[[Sequence[Any]], Any]":
        """Return a function that rebuilds the value from other leaves, without keeping this payload's leaves alive."""
        return Payload((), self.places, self.spec, ())._together

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Payload":
        """Return a payload with ``change`` applied to each tensor, for example to copy tensors to another device."""
        leaves = tuple(change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return Payload(leaves, self.places, self.spec, self.needs_grad)

    def _together(self, leaves: Sequence[Any]) -> Any:
        if self.spec is _ARGUMENT:
            return (leaves[0],), {}
        if self.spec is LEAF or self.spec.is_leaf():
            return leaves[0]
        return pytree.tree_unflatten([leaves[place] for place in self.places], self.spec)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten like ``pytree.tree_flatten``, with a fast path for a single tensor and for (args, kwargs) of tensors."""
    if isinstance(value, Tensor):
        return [value], LEAF
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        leaves = [*value[0], *value[1].values()]
        if len(leaves) == len(value[0]) == 1 and isinstance(leaves[0], Tensor):
            return leaves, _ARGUMENT
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            return leaves, _call_spec(len(value[0]), tuple(value[1]))
    return pytree.tree_flatten(value)


@cache
def _call_spec(num_args: int, names: tuple[Any, ...]) -> pytree.TreeSpec:
    return pytree.tree_structure(((0,) * num_args, dict.fromkeys(names, 0)))


#: The structure of a value that is a single leaf.
LEAF: Any = None
_ARGUMENT: Any = None
with suppress(TorchVersionError):  # code that flattens a value raises it
    LEAF = pytree.tree_structure(0)
    _ARGUMENT = _call_spec(1, ())


def _distinct(value: Any) -> tuple[list[Any], tuple[int, ...], pytree.TreeSpec]:
    flat, spec = flatten(value)
    for leaf in flat:
        if not isinstance(leaf, Tensor) and is_record(leaf):
            flat, spec = flatten(opened(value))
            break
    if len(flat) == 1:
        return flat, (0,), spec
    leaves: list[Any] = []
    index: dict[int, int] = {}
    for leaf in flat:
        if id(leaf) not in index:
            index[id(leaf)] = len(leaves)
            leaves.append(leaf)
    return leaves, tuple(index[id(leaf)] for leaf in flat), spec


class Opened:
    """A pytree node for a dataclass instance whose class is not registered; unflattening returns such an instance."""

    def __init__(self, fields: Mapping[str, Any], kind: type) -> None:
        self.fields = fields
        self.kind = kind

    @staticmethod
    def closed(values: Iterable[Any], form: tuple[Any, tuple[str, ...]]) -> Any:
        """Return an instance of the dataclass with these field values. ``form`` holds the class and the fields."""
        kind, names = form
        return record_of(kind, dict(zip(names, values, strict=True)))


with suppress(TorchVersionError):  # code that flattens a value raises it
    pytree.register_pytree_node(
        Opened, lambda one: (list(one.fields.values()), (one.kind, tuple(one.fields))), Opened.closed
    )

_NO_RECORDS = (
    Enum,
    dict,
    list,
    tuple,
    set,
    frozenset,
    str,
    bytes,
    int,
    float,
)  # objects of these types have contents other than fields


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass instance whose only contents are its fields."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, *_NO_RECORDS))


def children_of(spec: pytree.TreeSpec) -> Iterable[pytree.TreeSpec]:
    """Return the parts of a spec."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs  # torch 2.11 has only the attribute


def fields_of(record: Any) -> dict[str, Any]:
    """Return the stored fields of a dataclass instance, without running the class's own ``__getattribute__``.

    Fields that were never set are left out, as are fields that cannot be read.
    """
    found: dict[str, Any] = {}
    for item in dataclasses.fields(record):
        with suppress(Exception):  # a property, or a check of the class, may raise any error
            found[item.name] = object.__getattribute__(record, item.name)
    return found


def record_of(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass with these fields, without running ``__init__``."""
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def opened(value: Any) -> Any:
    """Replace the dataclass instances in a value with pytree nodes."""

    def open_one(leaf: Any) -> Any:
        if not is_record(leaf):
            return leaf
        return Opened({name: opened(own) for name, own in fields_of(leaf).items()}, type(leaf))

    return pytree.tree_map(open_one, value)


def form_of(value: Any) -> tuple[pytree.TreeSpec, list[type]]:
    """Return the structure of a value without its leaves: the tree of containers, and the type of each enum member."""
    leaves, spec = pytree.tree_flatten(opened(value))
    return spec, [type(leaf) for leaf in leaves if isinstance(leaf, Enum)]


def trainable_leaves(value: Any) -> list[Tensor]:
    """Return the distinct tensors of a value that require a gradient, in the order of a Payload's leaves."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [leaf for leaf in _distinct(value)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]


def has_a_row_each(value: Any) -> bool:
    """Return whether a value is a list with one dict for each row of the batch, such as detection targets."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
