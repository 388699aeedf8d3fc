"""Scout: a run of the code between layers for one micro-batch, without the layers.

The model's inputs have values, so the code reads masks, lengths and keyed random numbers as it does in a step. A layer
returns meta tensors of the right shapes. If the code reads a value that a layer computes, the scout continues with
the value that the code read on a known path. The stages compare the calls with this path later.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.capture import Call, Capture
from pipesched.capture.code_draws import CodeDraws
from pipesched.capture.size_rules import SizeRules
from pipesched.model.module_tree import recorders_of
from pipesched.tensors.keyed_random import outside_kept
from pipesched.tensors.meta_tensors import call_beside
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import Pattern, tensors_in

__all__ = ["LayerForms", "Scout", "UnknownValueError", "form_of_call"]

_MOST_FORMS = 4096
_MOST_ALIKE = 32  # calls that are compared to find a similar point on a known path
_PLAIN = int, float, str, type(None), torch.dtype, torch.device

#: The dtypes, shapes and plain values of a call's arguments.
Form = tuple[Any, ...]


class UnknownValueError(Exception):
    """The code between layers reads a value that layers compute, at a point that no known path has reached."""


def form_of_call(leaves: Sequence[Any], spec: Hashable) -> Form | None:
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
class _ResultForm:
    """The form of a layer's result."""

    pattern: Pattern
    tensors: list[tuple[torch.dtype, torch.Size]]
    #: For each tensor, the position at which it occurs first.
    firsts: list[int]

    @classmethod
    def of(cls, value: Any) -> "_ResultForm":
        tensors: list[Tensor] = []
        pattern = Pattern(value, tensors=tensors)
        ids = [id(tensor) for tensor in tensors]
        return cls(pattern, [(tensor.dtype, tensor.shape) for tensor in tensors], [*map(ids.index, ids)])

    def is_like(self, other: "_ResultForm") -> bool:
        return self.tensors == other.tensors and self.has_form_of(other)

    def has_form_of(self, other: "_ResultForm") -> bool:
        """Return whether both results are equal except for their tensors."""
        same = self.firsts == other.firsts and self.pattern.has_numbers_of(other.pattern)
        return same and self.pattern.is_like(other.pattern)

    @property
    def sizes(self) -> list[int]:
        return [size for _, shape in self.tensors for size in shape]

    def with_sizes(self, sizes: Iterable[int]) -> "_ResultForm":
        """Return the form of a result that has other sizes."""
        rest = iter(sizes)
        tensors = [(dtype, torch.Size(next(rest) for _ in shape)) for dtype, shape in self.tensors]
        return _ResultForm(self.pattern, tensors, self.firsts)

    def stand_ins(self) -> Any:
        made = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self.tensors]
        return self.pattern.build(made[first] for first in self.firsts)


class LayerForms:
    """The forms of the results of layers. Each layer runs once, and each kind of layer a few times.

    Layers are of one kind if they have the same class and shapes of weights, and gave results of the same form when
    they first ran with arguments of the same form.

    Args:
        own: the names of layers whose calls only use their arguments and weights, and only return tensors.

    """

    def __init__(self, own: Collection[str]) -> None:
        self.own = own
        self._kinds: dict[str, int] = {}
        self._first: dict[Any, list[tuple[_ResultForm, int]]] = {}
        self._results: dict[Any, _ResultForm] = {}
        #: (kind, mode, form of the arguments without sizes) -> a result, and the rules for its sizes
        self._rules: dict[Any, tuple[_ResultForm, SizeRules]] = {}

    @classmethod
    def of(cls, capture: Capture, layers: Mapping[str, nn.Module]) -> "LayerForms":
        """Return the forms of the layers in a capture. ``layers`` maps names to layers."""
        special = {call.layer for pair in capture.hidden for call in pair}
        special |= {capture.calls[index].layer for index in capture.told}
        special |= {call.layer for call in capture.calls if call.changes or call.loose or call.reached}
        special |= {
            call.layer
            for call in capture.layer_calls
            if not {*call.takes} <= {*capture.taken[call.index]}
            or call.num_collected  # else only the layer's own hooks append entries, which ``result`` calls
            or len(call.collected) > len(recorders_of(layers[call.layer]))
        }
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
        known = None if form is None else self._known(name, layer.training, form)
        if known is not None:
            result = known.stand_ins()
            for record in recorders_of(layer):
                record(layer, args, result)
            return result
        with outside_kept():
            result = call_beside(layer, args, kwargs, again)
        if form is not None and all(tensor.is_meta for tensor in tensors_in(result)):  # else the code may read values
            self._learn(name, layer, form, _ResultForm.of(result))
        return result

    def _known(self, name: str, training: bool, form: Form) -> _ResultForm | None:
        kind = self._kinds.get(name)
        if (found := self._results.get((kind, training, form))) is not None:
            return found
        sort, sizes = _apart(form)
        if (kind, training, sort) not in self._rules:
            return None
        result, rules = self._rules[kind, training, sort]
        predicted = rules.predict(sizes)
        return None if predicted is None else result.with_sizes(predicted)

    def _learn(self, name: str, layer: nn.Module, form: Form, made: _ResultForm) -> None:
        kind = self._kinds.setdefault(name, self._kind(layer, form, made))
        for table in (self._results, self._rules):
            if len(table) >= _MOST_FORMS:
                table.clear()
        self._results[kind, layer.training, form] = made
        sort, sizes = _apart(form)
        result, rules = self._rules.setdefault((kind, layer.training, sort), (made, SizeRules()))
        if result.has_form_of(made) and len(result.sizes) == len(made.sizes):
            rules.learn(sizes, made.sizes)
        else:
            self._rules[kind, layer.training, sort] = made, SizeRules()

    def _kind(self, layer: nn.Module, form: Form, made: _ResultForm) -> int:
        """Return the kind of a layer that has run for the first time."""
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        alike = self._first.setdefault((type(layer), shapes, layer.training, form), [])
        kind = next((kind for other, kind in alike if made.is_like(other)), len(self._kinds))
        alike.append((made, kind))
        return kind


def _apart(form: Form) -> tuple[Form, list[int]]:
    """Return a form without the sizes of tensors, and the sizes."""
    sort: list[Any] = []
    sizes: list[int] = []
    for part in form:
        if isinstance(part, tuple) and len(part) > 2:
            dtype, shape, is_meta = part
            sort.append((dtype, len(shape), is_meta))
            sizes += shape
        else:
            sort.append(part)
    return tuple(sort), sizes


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
        """Return the value that a known path reads after these calls, or else after the most similar calls.

        Raises UnknownValueError if no known path calls this function after the last of these calls.
        """
        at = len(calls)
        own = [(str(call), call.takes) for call in calls]
        for capture in self._known.values():
            is_like = len(capture.calls) > at and capture.calls[at].function == name and capture.calls[at].reads
            if is_like and own == [(str(call), call.takes) for call in capture.calls[:at]]:
                return capture.calls[at].outcome
        for capture in self._known.values():
            reads = [call for call in capture.calls if call.reads and call.function == name]
            alike = [(_common(calls, capture.calls[: call.index]), call.outcome) for call in reads]
            length, outcome = max(alike, key=itemgetter(0), default=(0, None))
            if length:
                return outcome
        raise UnknownValueError(name)


def _common(one: Sequence[Call], other: Sequence[Call]) -> int:
    """Return how many of the last calls are the same in both; at most ``_MOST_ALIKE`` are compared."""
    pairs = zip(islice(reversed(one), _MOST_ALIKE), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: str(pair[0]) == str(pair[1]), pairs))
