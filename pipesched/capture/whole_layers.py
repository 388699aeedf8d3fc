"""Whole layers: which modules of a model stay in one piece, because the user names them or because of their code."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from pipesched.capture.capture import Capture
from pipesched.checks import as_list, shown
from pipesched.errors import InputError
from pipesched.model.containers import as_whole, find_layers, is_small

__all__ = ["as_whole_layers", "opened"]

_LISTS = nn.ModuleList | nn.ModuleDict  # whose modules are called, and not they themselves


def as_whole_layers(model: nn.Module, names: Any) -> tuple[str, ...]:
    """Names of modules of a model. Raises InputError for others, and for lists of modules, which are not called."""
    remedy = "pass such as ['block.moe']"
    given = as_list(names, "whole_layers is a list of names of modules", remedy)
    known = dict(model.named_modules())
    for name in given:
        if not isinstance(name, str) or not name or name not in known:
            raise InputError(
                f"whole_layers names modules within the model; {shown(name)} is none of its {len(known) - 1}; {remedy}"
            )
        if isinstance(known[name], _LISTS):
            above = name.rpartition(".")[0]
            raise InputError(
                f"whole_layers names modules that are called; {name!r} is a {type(known[name]).__name__}, whose parts "
                f"are; name {f'{above!r}, which holds it' if above else 'its parts'}"
            )
    return tuple(given)


def opened(
    model: nn.Module, look: Callable[[Mapping[str, nn.Module]], Capture], whole: Collection[str] = ()
) -> tuple[dict[str, nn.Module], Capture]:
    """(the layers by name, what a forward does that calls them). look: runs such a forward. whole: modules that are not
    opened. Nor are those whose code needs its layers in one piece, and parts of blocks whose code decides by contents
    of tensors which layers it calls, such as mixtures of experts.
    """
    closed = set(whole)
    while True:
        layers = find_layers(model, closed)
        capture = look(layers)
        if not capture.layer_calls:
            layers = as_whole(model)
            return layers, look(layers)
        more = {_callable(model, name) for name in capture.indivisible} - {""}
        more |= {name for name in capture.deciding if _is_in_a_block(model, name)}
        if more <= closed:
            return layers, capture
        closed |= more


def _is_in_a_block(model: nn.Module, name: str) -> bool:
    """Whether a module is a small part of a model, in a list of modules."""
    parts = name.split(".")
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts))]
    return any(isinstance(one, _LISTS) for one in above) and is_small(model.get_submodule(name), model)


def _callable(model: nn.Module, name: str) -> str:
    """The module itself, or the one above it that is called."""
    while name and isinstance(model.get_submodule(name), _LISTS):
        name = name.rpartition(".")[0]
    return name
