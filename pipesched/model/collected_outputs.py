"""Collected outputs: what modules inside a layer hand to the enclosing model's code through the transformers library.

The library's hooks append outputs, such as the logits of a router, to lists that the code reads when all layers have
run. A stage that skips a layer must append to the same lists what the layer would have appended.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesched.errors import GraphError
from pipesched.model.module_tree import RECORDING, recorders_of
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import Pattern, tensors_in

__all__ = ["Collected", "Collecting", "collect", "described", "more_given"]


_COLLECTOR = "_active_collector"  # the library's variable that holds the lists


class Collected(NamedTuple):
    """An entry that a layer's call appends to a list. ``sources`` holds where each of its tensors comes from.

    A source is the tensor's place among the values that the call gives; for an argument, it is ``~position`` of the
    tensor among the call's tensor arguments.
    """

    key: str
    pattern: Pattern
    sources: tuple[int, ...]


class Collecting:
    """Watches the lists of the code that is running while a layer runs."""

    def __init__(self, layer: nn.Module) -> None:
        _check_found(layer)
        self._before = {key: len(entries) for key, entries in _lists().items()}
        self._repeated = False

    def forget(self) -> None:
        """Remove the new entries, because the layer runs again with stand-ins for meta tensors."""
        for key, entries in _lists().items():
            del entries[self._before.get(key, 0) :]
        self._repeated = True

    def entries(self) -> list[tuple[str, Any]]:
        """Return the new entries, with their keys. Entries that a layer computed from stand-ins become meta tensors."""
        found = []
        for key, entries in _lists().items():
            begin = self._before.get(key, 0)
            if self._repeated:
                entries[begin:] = pytree.tree_map_only(Tensor, _on_meta, entries[begin:])
            found += [(key, entry) for entry in entries[begin:]]
        return found


def described(
    entries: Iterable[tuple[str, Any]], taken: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[tuple[Collected, ...], list[Tensor]]:
    """Return descriptions of entries, and their tensors that are neither results (``given``) nor arguments (``taken``).

    These tensors follow the results in the values that the call gives.
    """
    sources = {id(tensor): ~position for position, tensor in reversed(list(enumerate(taken)))}
    sources |= {id(tensor): place for place, tensor in reversed(list(enumerate(given)))}
    found = []
    more: list[Tensor] = []
    for key, entry in entries:
        for tensor in tensors_in(entry):
            if id(tensor) not in sources:
                sources[id(tensor)] = len(given) + len(more)
                more.append(tensor)
        found.append(Collected(key, Pattern(entry), tuple(sources[id(tensor)] for tensor in tensors_in(entry))))
    return tuple(found), more


def more_given(
    collected: Sequence[Collected], entries: Sequence[tuple[str, Any]], results: int
) -> dict[int, Tensor] | None:
    """Return the tensors of entries that follow the results in the values that the call gives: place -> tensor.

    Returns None if the entries are not of the described form.
    """
    more = {}
    if len(entries) != len(collected):
        return None
    for one, (key, entry) in zip(collected, entries, strict=True):
        if key != one.key or not Pattern(entry).is_like(one.pattern):
            return None
        for source, tensor in zip(one.sources, tensors_in(entry), strict=True):
            if source >= results:
                more[source] = tensor
    return more


def collect(collected: Iterable[Collected], taken: Sequence[Any], given: Sequence[Any]) -> None:
    """Append to the library's lists the entries of a call that is skipped.

    Args:
        collected: the descriptions of the entries.
        taken: the call's tensor arguments.
        given: the values that the call gives.

    """
    lists = _lists()
    for key, pattern, sources in collected:
        tensors = [given[source] if source >= 0 else taken[~source] for source in sources]
        lists[key].append(pattern.build(iter(tensors)))


def _lists() -> dict[str, list[Any]]:
    """Return the lists of the model whose code is running: key, such as "router_logits" -> entries."""
    active = getattr(sys.modules.get(RECORDING), _COLLECTOR, None)
    found = None if active is None else active.get()
    return {key: entries for key, entries in (found or {}).items() if isinstance(entries, list)}


def _check_found(layer: nn.Module) -> None:
    """Raise GraphError if the library records outputs in this layer, but in lists that are not found."""
    library = sys.modules.get(RECORDING)
    if library is None or hasattr(library, _COLLECTOR):
        return
    if any(recorders_of(module) for module in layer.modules()):
        raise GraphError(
            f"a stage must know where transformers records outputs of layers, such as hidden states; this version of "
            f"transformers has no {RECORDING}.{_COLLECTOR}; install transformers 5.24, or make the model again and set "
            f"output_hidden_states, output_attentions and output_router_logits to False"
        )


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.to(torch.device("meta"))
