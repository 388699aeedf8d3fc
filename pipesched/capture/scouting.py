"""Scout: a run of the code between layers for one micro-batch, without the layers.

The model's inputs have values, so the code reads masks, lengths and keyed random numbers as it does in a step. A layer
returns meta tensors of the right shapes. If the code reads a value that a layer computes, the scout continues with
the value that the code read on a known path. The stages compare the calls with this path later.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.capture import Call, Capture
from pipesched.capture.code_draws import CodeDraws
from pipesched.model.module_tree import recorders_of
from pipesched.tensors.keyed_random import outside_kept
from pipesched.tensors.meta_tensors import call_beside
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import Pattern, tensors_in

__all__ = ["LayerForms", "Scout", "UnknownValueError", "form_of_call"]

_MOST_FORMS = 4096
_PLAIN = int, float, str, type(None), torch.dtype, torch.device

#: The dtypes, shapes and plain values of a call's arguments.
Form = tuple[Any, ...]


class UnknownValueError(Exception):
    """The code between layers reads a value that layers compute, at a point that no known path has reached."""


def form_of_call(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Form | None:
    """Return the form of flattened arguments; None if an argument is an object, whose attributes may be anything."""
    found: list[Any] = [spec]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append((leaf.dtype, leaf.shape, leaf.is_meta))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)


@dataclass(frozen=True)
class _Result:
    """The form of a layer's result."""

    pattern: Pattern
    tensors: list[tuple[torch.dtype, torch.Size]]

    @classmethod
    def of(cls, value: Any) -> "_Result":
        return cls(Pattern(value), [(tensor.dtype, tensor.shape) for tensor in tensors_in(value)])

    def is_like(self, other: "_Result") -> bool:
        same = self.tensors == other.tensors and self.pattern.numbers == other.pattern.numbers
        return same and self.pattern.is_like(other.pattern)

    def stand_ins(self) -> Any:
        return self.pattern.build(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self.tensors)


class LayerForms:
    """The forms of the results of layers. Each layer runs once, and each kind of layer once for each new form.

    Layers are of one kind if they have the same class and shapes of weights, and gave results of the same form when
    they first ran with arguments of the same form.

    Args:
        own: the names of layers whose calls only use their arguments and weights, and only return tensors.

    """

    def __init__(self, own: Collection[str]) -> None:
        self.own = own
        self._kinds: dict[str, int] = {}
        self._first: dict[Any, list[tuple[_Result, int]]] = {}
        self._results: dict[Any, _Result] = {}

    @classmethod
    def of(cls, capture: Capture) -> "LayerForms":
        """Return the forms of the layers in a capture."""
        special = {call.layer for pair in capture.hidden for call in pair}
        special |= {capture.calls[index].layer for index in capture.told}
        special |= {call.layer for call in capture.calls if call.changes or call.loose or call.reached}
        return cls({call.layer for call in capture.layer_calls} - special)

    def result(
        self,
        name: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        again: Callable[[], tuple[Any, Any]],
    ) -> Any:
        """Return stand-ins for the result of a layer's call. ``again`` returns copies of the arguments."""
        form = form_of_call(*pytree.tree_flatten((args, kwargs))) if name in self.own else None
        key = self._kinds.get(name), layer.training, form
        if form is not None and key in self._results:
            result = self._results[key].stand_ins()
            for record in recorders_of(layer):
                record(layer, args, result)
            return result
        with outside_kept():
            result = call_beside(layer, args, kwargs, again)
        if form is None or not all(tensor.is_meta for tensor in tensors_in(result)):
            return result  # has values that the code may read
        made = _Result.of(result)
        if len(self._results) >= _MOST_FORMS:
            self._results.clear()
        kind = self._kinds.setdefault(name, self._kind(layer, form, made))
        self._results[kind, layer.training, form] = made
        return result

    def _kind(self, layer: nn.Module, form: Form, made: _Result) -> int:
        """Return the kind of a layer that has run for the first time."""
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        alike = self._first.setdefault((type(layer), shapes, layer.training, form), [])
        kind = next((kind for other, kind in alike if made.is_like(other)), len(self._kinds))
        alike.append((made, kind))
        return kind


class Scout:
    """Answers the calls of the code between layers in one run without layers.

    Args:
        code: draws the random numbers of the code between layers.
        forms: the forms of the layers' results.
        known: the captures of the known paths.

    """

    def __init__(self, code: CodeDraws, forms: LayerForms, known: Mapping[int, Capture]) -> None:
        self.code = code
        self._forms = forms
        self._known = known

    def is_plain(self, name: str) -> bool:
        """Return whether a layer's calls only use their arguments and weights, and only return tensors."""
        return name in self._forms.own

    def layer(
        self,
        name: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        again: Callable[[], tuple[Any, Any]],
    ) -> Any:
        """Return stand-ins for the result of a layer's call. ``again`` returns copies of the arguments."""
        with self.code.paused():
            return self._forms.result(name, layer, args, kwargs, again)

    def assumed(self, name: str, calls: Sequence[Call]) -> Any:
        """Return what a known path with these calls reads next. Raises UnknownValueError if no known path has them."""
        at = len(calls)
        for capture in self._known.values():
            if len(capture.calls) > at and capture.calls[at].function == name and capture.calls[at].reads:
                own = [(str(call), call.takes) for call in calls]
                if own == [(str(call), call.takes) for call in capture.calls[:at]]:
                    return capture.calls[at].outcome
        raise UnknownValueError(name)
