"""Whole layers: the modules of a model that are never cut, because the user chose them or because of their code."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from pipesched.capture.capture import Capture
from pipesched.capture.first_forward import exchange_modules
from pipesched.checks import as_list, shown
from pipesched.errors import InputError
from pipesched.model.containers import as_whole, find_layers, is_small
from pipesched.model.module_tree import installs_recorders

__all__ = ["as_whole_layers", "opened"]

_LISTS = nn.ModuleList | nn.ModuleDict  # containers that are never called


def as_whole_layers(model: nn.Module, names: Any) -> tuple[str, ...]:
    """Check and return the names of modules to keep whole.

    Raises InputError for an unknown name, or for a ModuleList or ModuleDict, which has no forward.
    """
    remedy = "pass a list such as ['block.moe']"
    given = as_list(names, "whole_layers must be a list of names of modules", remedy)
    known = dict(model.named_modules())
    for name in given:
        if not isinstance(name, str) or not name or name not in known:
            raise InputError(
                f"whole_layers must name modules within the model; none of the model's {len(known) - 1} modules is "
                f"named {shown(name)}; {remedy}"
            )
        if isinstance(known[name], _LISTS):
            above = name.rpartition(".")[0]
            raise InputError(
                f"whole_layers may only name modules that are called; {name!r} is a {type(known[name]).__name__}, "
                f"which is never called; pass {f'{above!r}, which contains it' if above else 'its elements'} instead"
            )
    return tuple(given)


def opened(
    model: nn.Module,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    look: Callable[[Mapping[str, nn.Module]], Capture],
    whole: Collection[str] = (),
) -> tuple[dict[str, nn.Module], Capture]:
    """Find the layers of a model and record a forward that calls them.

    Three kinds of modules are kept whole: modules that the user names, modules that the recorder finds indivisible, and
    parts of blocks, such as mixtures of experts, that use tensor values to decide which layers to call.

    Args:
        model: the user's module.
        sample: the arguments (args, kwargs) of the forward.
        look: a function that takes the layers, records a forward, and returns the capture.
        whole: names of modules to keep whole. Default: none.

    Returns:
        A dict from name to layer, and the capture of the forward.

    """
    try:
        return _opened(model, look, whole)
    except Exception:  # the forward may fail without transformers' hooks, or because it exchanges modules
        prepared = [installs_recorders(model), exchange_modules(model, *sample)]
        if not any(prepared):
            raise
    return _opened(model, look, whole)


def _opened(
    model: nn.Module, look: Callable[[Mapping[str, nn.Module]], Capture], whole: Collection[str]
) -> tuple[dict[str, nn.Module], Capture]:
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
    """Return whether a module is inside a ModuleList or ModuleDict and is small enough to be one layer."""
    parts = name.split(".")
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts))]
    return any(isinstance(one, _LISTS) for one in above) and is_small(model.get_submodule(name), model)


def _callable(model: nn.Module, name: str) -> str:
    """Return the name of the module, or of the nearest enclosing module that is not a ModuleList or ModuleDict."""
    while name and isinstance(model.get_submodule(name), _LISTS):
        name = name.rpartition(".")[0]
    return name
