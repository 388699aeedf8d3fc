"""First forward: finds the attributes and buffers that only a model's first forward sets, such as masks and tables."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.model.attributes import OF_ALL_MODULES, Attributes, attribute
from pipesched.model.class_state import other_values
from pipesched.model.state_guard import buffers_kept, same_bits, unchanged, untouched
from pipesched.tensors.payload import pytree
from pipesched.tensors.torch_functions import version_of

__all__ = ["FirstForward", "exchange_modules", "first_forward", "following_batch"]

_OTHER_SEED = 1


@dataclass(frozen=True)
class FirstForward:
    """The attributes and buffers that a model's first forward sets.

    ``made`` holds all of them, ``kept`` those that a second forward leaves as they are.
    """

    made: Attributes
    kept: Attributes


def first_forward(model: nn.Module, mode: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstForward:
    """Run two forwards, and return what they set. The model stays unchanged.

    Args:
        model: the user's module.
        mode: True for training mode, False for evaluation mode.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.

    """
    with untouched(model, mode), torch.no_grad():
        return _first_forward(model, args, kwargs)


def following_batch(
    model: nn.Module, mode: bool, first: FirstForward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[nn.Module, str]]:
    """Return the attributes in ``first.kept`` whose values depend on values in the batch, or are random.

    A pipeline cannot set such an attribute, because the first batch of the training would set another value.
    """
    args, kwargs = other_values((args, kwargs))
    with untouched(model, mode), torch.no_grad():
        torch.manual_seed(_OTHER_SEED)
        try:
            other = _first_forward(model, args, kwargs)
        except Exception:  # the model may not accept these values
            return []
    return [key for key, own in first.kept.items() if not _alike(own, other.made.get(key, own))]


def exchange_modules(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run a forward if the model's first forward, and no later one, exchanges modules but keeps all weights.

    The new modules stay in the model. Returns whether there are any.
    """
    with untouched(model, model.training), torch.no_grad():
        before = _identity(model)
        try:
            _run(model, args, kwargs)
            after = _identity(model)
            if after == before or after[1] != before[1]:
                return False
            _run(model, args, kwargs)
        except Exception:  # the model may not run outside of a recording, for example on the meta device
            return False
        if _identity(model) != after:
            return False
    with buffers_kept(model), torch.no_grad():
        _run(model, args, kwargs)
    return True


def _identity(model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of a model's modules and parameters, by name."""
    modules = {name: id(module) for name, module in model.named_modules()}
    return modules, {name: id(parameter) for name, parameter in model.named_parameters()}


def _first_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstForward:
    before = _attributes(model)
    _run(model, args, kwargs)
    now = _attributes(model)
    made = {key: attribute(*key) for key, value in now.items() if before.get(key, _attributes) is not value}
    versions = {key: _version(now[key]) for key in made}
    _run(model, args, kwargs)
    later = _attributes(model)
    kept = {
        key: value
        for key, value in made.items()
        if later.get(key, _attributes) is now[key] and _version(now[key]) == versions[key]
    }
    return FirstForward(made=made, kept=kept)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a forward on copies of its arguments, because the model may write to them."""
    own_args, own_kwargs = pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), unchanged((args, kwargs)))
    model(*own_args, **own_kwargs)


def _attributes(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return the attributes and the buffers of a model's modules."""
    found: dict[tuple[nn.Module, str], Any] = {}
    for module in model.modules():
        found.update({(module, name): value for name, value in vars(module).items() if name not in OF_ALL_MODULES})
        found.update({(module, name): value for name, value in module._buffers.items()})
    return found


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values hold equal tensors and numbers. Other objects are not compared."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(ones) == len(others) and all(map(_alike_leaves, ones, others))


def _alike_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)
    plain = bool, int, float, complex, str
    return not (isinstance(one, plain) and isinstance(other, plain)) or one == other
