"""Split module: a module of the user's model that holds this rank's block of its weights.

The module stays the same object. Its class becomes a subclass of its class, as with torch's ``fully_shard``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipesched.errors import InputError
from pipesched.parallel.tensor_group import TensorGroup

__all__ = ["Held", "SplitForm", "become", "held_by", "is_split", "restore"]

_HELD = "tensor_parallel"  # the attribute of a split module


@dataclass(frozen=True, eq=False)
class Held:
    """What a split module knows besides the attributes of its class.

    Attributes:
        group: the tensor group.
        original: the class of the module before it was split.
        attributes: the attributes that were changed, with their values in the whole module.
        options: the options of the module's style.

    """

    group: TensorGroup
    original: type[nn.Module]
    attributes: Mapping[str, Any]
    options: Mapping[str, Any]

    def __deepcopy__(self, memo: Any) -> "Held":
        return self


def become(
    module: nn.Module, mixin: type[nn.Module] | None, group: TensorGroup, attributes: Mapping[str, Any], **options: Any
) -> None:
    """Let a module run the forward of ``mixin``, and give it this rank's values of ``attributes``.

    Without a mixin, the module keeps its forward. Raises InputError if the module is divided already.
    """
    present = vars(module)
    if _HELD in present:
        raise InputError(
            f"a module must be divided once; a {type(module).__name__} of tensor_parallel= is divided already; give a "
            f"style to the module or to the layers inside it, not to both, and split a model once"
        )
    whole = {name: present[name] for name in attributes}
    held = Held(group, type(module), whole, options)
    if mixin is not None:
        module.__class__ = _subclass(mixin, type(module))
    present.update(attributes)
    present[_HELD] = held


def held_by(module: nn.Module) -> Held:
    """Return what a split module knows."""
    held: Held = vars(module)[_HELD]
    return held


def is_split(module: nn.Module) -> bool:
    """Return whether a module has become a split module."""
    return _HELD in vars(module)


def restore(module: nn.Module) -> None:
    """Give a split module its class and attributes back. Its weights stay as they are. Does nothing for others."""
    held = vars(module).pop(_HELD, None)
    if held is not None:
        module.__class__ = held.original
        vars(module).update(held.attributes)


@dataclass(frozen=True, eq=False)
class SplitForm:
    """The class and the attributes of a split module, which ``restore`` takes from it."""

    module: nn.Module
    kind: type[nn.Module]
    held: Held
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> "SplitForm | None":
        """Return the form of a split module; None for any other module."""
        present = vars(module)
        if _HELD not in present:
            return None
        held = held_by(module)
        return cls(module, type(module), held, {name: present[name] for name in held.attributes})

    def put_on(self) -> None:
        """Give the module this form again. Its weights stay as they are."""
        self.module.__class__ = self.kind
        vars(self.module).update(self.attributes)
        vars(self.module)[_HELD] = self.held


_subclasses: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _subclass(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    pair = mixin, original
    if pair not in _subclasses:
        name = original.__name__ if hasattr(mixin, "shows_original") else mixin.__name__
        _subclasses[pair] = type(name, pair, {"__module__": mixin.__module__})
    return _subclasses[pair]
