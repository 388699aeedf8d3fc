"""Guard: tests whether a micro-batch takes a known path, by repeating only what the code between layers reads."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.capture.capture import INPUT, Call, Capture, Value
from pipesched.capture.code_draws import CodeDraws
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Guard", "guard_of"]

_COMPARABLE = bool, int, float, complex, str


class _Step(NamedTuple):
    """One function call. The tensors in ``leaves`` are replaced by the values in ``slots``."""

    call: Call
    func: Any
    leaves: list[Any]
    spec: Any
    #: (position in ``leaves``, Value of the tensor)
    slots: list[tuple[int, Value]]
    #: The number of earlier random calls; None for a function that draws nothing.
    draw: int | None


class Guard:
    """Repeats the functions on which the values depend that the code between layers reads.

    A micro-batch of the same form takes the same path if it gives the same values.

    Args:
        steps: the functions, in call order.
        names: the name of each tensor of the model's inputs; None for other inputs.
        written: the names of the inputs that the functions change in place.

    """

    def __init__(self, steps: Sequence[_Step], names: Sequence[Any], written: frozenset[Any]) -> None:
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
    def _repeats(step: _Step, values: dict[Value, Tensor], draws: CodeDraws) -> bool:
        call = step.call
        leaves = list(step.leaves)
        for place, value in step.slots:
            leaves[place] = values[value]
        args, kwargs = pytree.tree_unflatten(leaves, step.spec)
        if step.draw is None:
            result = step.func(*args, **kwargs)
        else:
            result = draws.call_at(step.draw, step.func, *args, **kwargs)
        if call.reads:
            return type(result) is type(call.outcome) and bool(result == call.outcome)
        values.update(((call.index, place), tensor) for place, tensor in enumerate(tensors_in(result)))
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
    needed: set[Value] = set()
    chosen: list[Call] = []
    for call in reversed(capture.calls):
        gives = {(call.index, place) for place in range(call.gives)}
        if call.index in unknown or not (call.reads or needed & gives or needed & {*call.writes}):
            continue
        if not _repeatable(capture, call):
            return None
        chosen.append(call)
        needed.update(call.takes)
    draws = capture.draws
    return Guard([_step(capture, call, draws) for call in chosen[::-1]], names, capture.written_inputs)


def _unknown(capture: Capture) -> set[int]:
    """Return the calls whose results depend on weights or buffers."""
    found: set[int] = set()
    written: set[Value] = set()
    for call in capture.calls:
        if call.uses or any(index in found for index, _ in call.takes) or not written.isdisjoint(call.takes):
            found.add(call.index)
            written.update(call.writes)
    return found


def _repeatable(capture: Capture, call: Call) -> bool:
    function = capture.functions.get(call.index)
    if function is None or (call.reads and not isinstance(call.outcome, _COMPARABLE)):
        return False
    tensors = [leaf for leaf in pytree.tree_leaves(function.arguments) if isinstance(leaf, Tensor)]
    return len(tensors) == len(function.values)  # not if there are tensors in the fields of a dataclass


def _step(capture: Capture, call: Call, draws: Mapping[int, int]) -> _Step:
    function = capture.functions[call.index]
    leaves, spec = pytree.tree_flatten(function.arguments)
    values = iter(function.values)
    slots = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (value := next(values)) is not None:
            slots.append((place, value))
            leaves[place] = None
    return _Step(call, function.function, leaves, spec, slots, draws.get(call.index))
