"""Class state: detects class attributes that forwards change, because stages must not share state through a class."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesched.errors import GraphError
from pipesched.model.state_guard import GROWING, attributes_of, has_attributes, is_of_user, same_bits, unchanged
from pipesched.tensors.payload import pytree

__all__ = [
    "ClassAttribute",
    "ClassState",
    "changed_classes",
    "check_class_state",
    "class_state",
    "other_values",
    "set_class_state",
]

_PLAIN = int, float, complex, str, bytes, type(None), torch.dtype, torch.device  # compared by value


class ClassAttribute(NamedTuple):
    """A class attribute: the class that owns the attribute, and the name of the attribute."""

    owner: type
    name: str


class _AttributeValue(NamedTuple):
    """The value that a class attribute had at one time."""

    #: The attribute's value; if the value is a container, a copy of the container.
    value: Any
    #: A key for comparisons: two values have equal keys if a forward would find no difference between them.
    form: Any
    #: Keeps the value's attributes alive, so that their ids are not reused.
    parts: tuple[Any, ...] = ()


ClassState = Mapping[ClassAttribute, _AttributeValue]


class _Contents:
    """A tensor's values at one time, for comparison with its values at another time.

    Comparisons check the bits as well as the version, because writes through ``.data`` do not change the version.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._copy = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Contents) or self._tensor is not other._tensor or self._version != other._version:
            return False
        # Tensors whose bits cannot be compared are treated as unchanged.
        return same_bits(self._copy, other._copy) or not same_bits(self._copy, self._copy)

    __hash__ = None  # type: ignore[assignment]


def class_state(model: nn.Module) -> ClassState:
    """Return the class attributes of a model's modules, excluding attributes of torch's own classes."""
    owners = {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    return {
        ClassAttribute(owner, name): _held(value)
        for owner in owners
        if is_of_user(owner)
        for name, value in attributes_of(owner).items()
    }


def set_class_state(made: ClassState) -> None:
    """Set class attributes to stored values."""
    for (owner, name), held in made.items():
        setattr(owner, name, held.value)


def _held(value: Any) -> _AttributeValue:
    parts = tuple(vars(value).values()) if has_attributes(value) else ()
    return _AttributeValue(copy.copy(value) if isinstance(value, GROWING) else value, _form(value), parts)


def _form(value: Any, *, inside: bool = True) -> Any:
    """Return a key for comparisons: two values have equal keys if a forward would find no difference between them.

    If ``inside`` is True, containers are compared by their contents, otherwise by identity.
    """
    if isinstance(value, Tensor):
        return _Contents(value)
    if inside and isinstance(value, dict):
        return {key: _form(one, inside=False) for key, one in value.items()}
    if inside and isinstance(value, GROWING):
        return [_form(one, inside=False) for one in value]
    if isinstance(value, tuple):
        return tuple(_form(one, inside=False) for one in value)
    if inside and has_attributes(value):
        return {key: _form(one, inside=False) for key, one in vars(value).items()}
    return value if isinstance(value, _PLAIN) else id(value)


def _differing(one: ClassState, other: ClassState) -> tuple[ClassAttribute, ...]:
    keys = dict.fromkeys([*one, *other])
    return tuple(key for key in keys if key not in one or key not in other or one[key].form != other[key].form)


def changed_classes(
    model: nn.Module,
    before: ClassState,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    forward: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> tuple[ClassState, tuple[ClassAttribute, ...]]:
    """Find the class attributes that forwards change.

    If the first forward changed an attribute, a second forward runs with different tensor values. Attributes that the
    second forward leaves unchanged are set only once, or always to the same value.

    Args:
        model: the user's module.
        before: the class state before the first forward, which has already run.
        sample: the arguments (args, kwargs) of the forward.
        forward: the function that runs another forward.

    Returns:
        The attributes that the first forward set, with their values, and the attributes that every forward changes.

    """
    first = class_state(model)
    changed = _differing(before, first)
    made = {key: first[key] for key in changed if key in first}
    if not changed:
        return made, ()
    for inputs in (other_values(sample), sample):
        with suppress(Exception):  # the model may not accept these values
            forward(*unchanged(inputs))
            return made, _differing(first, class_state(model))
    return made, changed


def other_values(sample: Any) -> Any:
    """Return a sample of the same form whose tensors have different values. Numbers from 0 to 1 stay in that range."""
    return pytree.tree_map_only(Tensor, _other, sample)


def _other(tensor: Tensor) -> Tensor:
    rows = tensor.detach().flip(0) if tensor.dim() else tensor.detach().clone()
    return rows * 0.5 + 0.25 if rows.is_floating_point() else rows


def check_class_state(
    model: nn.Module, changed: Iterable[ClassAttribute], layers: Mapping[str, nn.Module], calls: Collection[str]
) -> None:
    """Raise GraphError if forwards change class attributes that several layers, or several calls of a layer, share.

    Args:
        model: the user's module.
        changed: the class attributes that each forward changes.
        layers: layer name -> layer.
        calls: the layer name of each call.

    """
    for owner, name in changed:
        users = [key for key, module in model.named_modules() if isinstance(module, owner)]
        homes = {
            next((one for one, layer in layers.items() if layer is model or f"{key}.".startswith(f"{one}.")), "")
            for key in users
        }
        if len(homes) == 1 and (home := homes.pop()) and list(calls).count(home) == 1:
            continue
        example = users[0] or type(model).__name__
        modules = (
            f"the only module of class {owner.__name__} ({example!r}) is"
            if len(users) == 1
            else f"all {len(users)} modules of class {owner.__name__} (such as {example!r}) are"
        )
        raise GraphError(
            f"layers must not share state through their class, because the schedule determines the order in which they "
            f"run; forwards change the class attribute {owner.__name__}.{name}, which works only if {modules} inside "
            f"one layer that is called once; keep the state on the instance, as self.{name} or a buffer, or pass "
            f"whole_layers=[...] with the name of a module that contains every module of this class"
        )
