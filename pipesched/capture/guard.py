"""Guard: tests whether a micro-batch takes a known path, by repeating only what the code between layers reads."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.capture.capture import INPUT, Call, Capture, Value
from pipesched.capture.code_draws import CodeDraws
from pipesched.tensors.meta_tensors import with_look_of
from pipesched.tensors.torch_functions import is_shaped_by_contents, only_looked_at
from pipesched.tensors.tree_structure import Pattern, tensors_in

__all__ = ["Guard", "guard_of"]

_COMPARABLE = bool, int, float, complex, str


class _GuardedCall(NamedTuple):
    """One function call."""

    call: Call
    func: Any
    arguments: Pattern
    #: For each tensor in the arguments, its Value, or the tensor itself if it has no Value.
    tensors: list[Value | Tensor]
    #: The number of earlier random calls; None for a function that draws nothing.
    draw: int | None
    #: The shapes that the results must have; None if their shapes do not depend on values, or the code reads no shape.
    shapes: list[torch.Size] | None


class Guard:
    """Repeats the functions on which the values depend that the code between layers reads.

    A micro-batch of the same form takes the same path if it gives the same values, if functions that return lists (such
    as ``unbind``) return as many results, and if results whose shapes depend on values have the same shapes. A function
    that fails does not give the same values.

    Args:
        steps: the functions, in call order.
        names: the name of each tensor of the model's inputs; None for other inputs.
        written: the names of the inputs that the functions change in place.

    """

    def __init__(self, steps: Sequence[_GuardedCall], names: Sequence[Any], written: frozenset[Any]) -> None:
        self._steps = steps
        self._names = names
        self._written = written

    def holds(self, leaves: Sequence[Any], draws: CodeDraws) -> bool:
        """Return whether the code between layers reads the same values from these inputs."""
        values: dict[Value, Tensor] = {}
        for name, leaf in zip(self._names, leaves, strict=True) if self._steps else ():
            if name is not None:
                values[INPUT, name] = leaf.clone() if name[:2] in self._written else leaf
        with torch.no_grad():
            return all(self._repeats(step, values, draws) for step in self._steps)

    @staticmethod
    def _repeats(step: _GuardedCall, values: dict[Value, Tensor], draws: CodeDraws) -> bool:
        call = step.call
        if not all(isinstance(one, Tensor) or one in values for one in step.tensors):
            return False  # an earlier function returned fewer results
        given = (one if isinstance(one, Tensor) else values[one] for one in step.tensors)
        args, kwargs = step.arguments.build(given)
        try:
            if step.draw is None:
                result = step.func(*args, **kwargs)
            else:
                result = draws.call_at(step.draw, step.func, *args, **kwargs)
        except Exception:  # a function may require what only some micro-batches have, such as more than 14 rows
            return False
        if call.reads:
            return type(result) is type(call.outcome) and bool(result == call.outcome)
        if call.pattern.is_list and not Pattern(result).is_like(call.pattern):
            return False
        tensors = list(tensors_in(result))
        if step.shapes is not None and step.shapes != [tensor.shape for tensor in tensors]:
            return False
        values.update(((call.index, place), tensor) for place, tensor in enumerate(tensors))
        if call.changes:
            taken = list(tensors_in((args, kwargs)))
            values.update(((call.index, place), taken[position]) for position, place in call.changes.items())
        return True


def guard_of(capture: Capture, names: Sequence[Any]) -> Guard | None:
    """Return the guard of a path; None if a guard cannot repeat the reads.

    A guard cannot repeat layers, or numbers drawn from the generators of Python and numpy. Values computed from layers
    and weights are not compared, because the stages compare the calls that follow.

    Args:
        capture: the record of the path.
        names: the name of each tensor of the model's inputs; None for other inputs.

    """
    if "" in capture.outside:
        return None
    unknown = _unknown(capture)
    shaped = _shaped_by_contents(capture) & {index for index, _ in capture.looked_at}
    needed: set[Value] = set()
    chosen: list[Call] = []
    for call in reversed(capture.calls):
        gives = {(call.index, place) for place in range(call.gives)}
        compared = call.reads or call.index in shaped or (call.pattern.is_list and not call.layer)
        if call.index in unknown or not (compared or needed & gives or needed & {*call.writes}):
            continue
        if not _repeatable(capture, call):
            return None
        chosen.append(call)
        needed.update(_values_read(capture, call))
    draws = capture.draws
    return Guard(
        [_step(capture, call, draws, call.index in shaped) for call in chosen[::-1]], names, capture.written_inputs
    )


def _unknown(capture: Capture) -> set[int]:
    """Return the calls whose results depend on weights or buffers."""
    found: set[int] = set()
    written: set[Value] = set()
    for call in capture.calls:
        takes = _values_read(capture, call)
        if call.uses or any(index in found for index, _ in takes) or not written.isdisjoint(takes):
            found.add(call.index)
            written.update(call.writes)
    return found


def _values_read(capture: Capture, call: Call) -> list[Value]:
    """Return the values whose contents a call reads. Some functions only ask one argument for its shape and dtype."""
    looked_at = _looked_at(capture, call)
    if looked_at is None:
        return [*call.takes]
    read = [value for place, value in enumerate(capture.functions[call.index].values) if place != looked_at]
    return [value for value in read if value is not None]


def _looked_at(capture: Capture, call: Call) -> int | None:
    """Return the position, among the tensor arguments of a function, of the one that it only looks at."""
    function = capture.functions.get(call.index)
    place = None if function is None else only_looked_at(call.function, args := function.arguments[0])
    return None if place is None else len(list(tensors_in(args[:place])))


def _shaped_by_contents(capture: Capture) -> set[int]:
    """Return the function calls whose results have shapes that may depend on values of their arguments."""
    found: set[int] = set()
    for call in capture.calls:
        function = capture.functions.get(call.index)
        own = function is not None and is_shaped_by_contents(call.function, function.arguments[0])
        if not call.changes and (own or any(index in found for index, _ in call.takes)):
            found.add(call.index)
    return found


def _repeatable(capture: Capture, call: Call) -> bool:
    function = capture.functions.get(call.index)
    if function is None or (call.reads and not isinstance(call.outcome, _COMPARABLE)):
        return False
    tensors: list[Tensor] = []
    Pattern(function.arguments, tensors=tensors)
    return len(tensors) == len(function.values)  # not if there are tensors in objects


def _step(capture: Capture, call: Call, draws: Mapping[int, int], is_shaped: bool) -> _GuardedCall:
    function = capture.functions[call.index]
    tensors: list[Tensor] = []
    arguments = Pattern(function.arguments, tensors=tensors)
    looked_at = _looked_at(capture, call)
    given: list[Value | Tensor] = []
    for place, (value, tensor) in enumerate(zip(function.values, tensors, strict=True)):
        if place == looked_at:  # tensors of the same form have the same shapes
            given.append(with_look_of(tensor, torch.device("cpu") if tensor.is_meta else tensor.device))
        else:
            given.append(tensor if value is None else value)
    shapes = [capture.values[call.index, place].shape for place in range(call.gives)] if is_shaped else None
    return _GuardedCall(call, function.function, arguments, given, draws.get(call.index), shapes)
