"""Capture: what a model's forward does, seen once: the calls of its layers and the functions between them.

The model's own code runs on a sample. Each call notes which earlier values it takes; a value is one tensor that a call
gave. Replay runs the same code again for a part of the calls; so nothing is translated, and whatever Python the
model's containers are written in, they run as they are.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipesched.model.class_state import ClassAttribute
from pipesched.model.tied_weights import Place
from pipesched.tensors.tree_structure import Pattern

__all__ = ["INPUT", "Call", "Capture", "FunctionCall", "Value"]

INPUT = -1  # in a value's place of a call: it is one of the model's inputs

#: A tensor: (number of the call that gave it, which of the call's tensors), or (INPUT, its name among the inputs).
Value = tuple[int, Any]


@dataclass(kw_only=True)
class Call:
    """One thing that the model's code does: it calls a layer, or a torch function between layers.

    layer: its name; empty for a function. number: of this layer's calls, or of the functions' that use any. takes:
    the values among its arguments. uses: the parameters and buffers by name. gives: how many values, those it changes
    in place included. changes: which of its arguments' tensors it changes -> which of its values that is. reads: it
    gives plain Python. sealed: a function that runs without gradients, maybe in an autograd.Function. joined: it
    stays in one stage with all calls from this one on. loose: those of ``uses`` that are not the layer's own. reached:
    what a layer uses beside ``uses``, through a module or a reference.
    """

    index: int
    layer: str
    number: int
    function: str
    takes: tuple[Value, ...]
    uses: tuple[str, ...]
    gives: int
    pattern: Pattern
    changes: Mapping[int, int] = field(default_factory=dict)
    arguments: tuple[Value | None, ...] = ()
    reads: bool = False
    random: bool = False
    sealed: bool = False
    joined: int | None = None
    outward: bool = False  # it changes memory that was there before, as of an input
    loose: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """What tells it from others that use parameters, in both modes."""
        return self.layer, self.number

    def __str__(self) -> str:
        return self.layer + f" (call {self.number + 1})" * bool(self.number) if self.layer else self.function


class FunctionCall(NamedTuple):
    """A call of a function between layers. values: what the tensors among its arguments are, where they are any."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    values: tuple[Value | None, ...]


@dataclass(kw_only=True)
class Capture:
    """What a forward does. quiet: functions that are no calls: they ask for shapes and the like.

    looked_at: the values whose shape, type or the like the code between layers asked for.
    output: the values of the model's output; nbytes: of each value, for the sample. examples: the arguments of each
    layer's call, for measuring. outside: the layers that drew random numbers outside torch; "": the code between did.
    hidden: calls of which the second takes what the first made and did not return.
    changed: attributes of containers, and to what the forward has set them. results: the output's tensors.
    output_form: ``form_of`` the output.
    taken: for each layer's call, what the tensors of its example are, where they are any.
    told: for a call of a layer, its attributes that were set before. functions: of each call of one, for measuring.
    indivisible: modules whose own code needs the layers within them in one piece. deciding: modules whose own code
    looks at contents of tensors, and then calls layers within them. changed_classes: as of ``class_state``.
    """

    calls: list[Call] = field(default_factory=list)
    output: tuple[Value, ...] = ()
    quiet: set[str] = field(default_factory=set)
    looked_at: set[Value] = field(default_factory=set)
    nbytes: dict[Value, int] = field(default_factory=dict)
    examples: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    hidden: list[tuple[Call, Call]] = field(default_factory=list)
    changed: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)
    results: list[Tensor] = field(default_factory=list)
    told: dict[int, dict[str, Any]] = field(default_factory=dict)
    functions: dict[int, FunctionCall] = field(default_factory=dict)
    output_form: Any = None
    indivisible: set[str] = field(default_factory=set)
    deciding: set[str] = field(default_factory=set)
    changed_classes: tuple[ClassAttribute, ...] = ()
    taken: dict[int, tuple[Value | None, ...]] = field(default_factory=dict)

    @cached_property
    def layer_calls(self) -> list[Call]:
        """Those of layers."""
        return [call for call in self.calls if call.layer]

    @cached_property
    def free(self) -> frozenset[int]:
        """The calls that any stage may run again instead of being sent what they give: they need no weights.

        They take the model's inputs and what other free calls give, and draw no random numbers: positions, masks.
        """
        free: set[int] = set()
        for call in self.calls:
            own = call.layer or call.uses or call.random or call.outward
            if not own and all(source == INPUT or source in free for source, _ in call.takes):
                free.add(call.index)
        return frozenset(free)

    def trained(self, parameters: Set[str]) -> set[Value]:
        """The values that depend on one of these parameters: whose gradients are asked for where those are trained."""
        values: set[Value] = set()
        for call in self.calls:
            if not call.reads and not (values.isdisjoint(call.takes) and parameters.isdisjoint(call.uses)):
                values.update((call.index, place) for place in range(call.gives))
        return values

    @cached_property
    def crossing_bytes(self) -> list[int]:
        """For each call: the bytes that cross where a stage begins with it."""
        last: dict[Value, int] = {}
        for call in self.calls:
            if call.index not in self.free:
                last.update(dict.fromkeys(call.takes, call.index))
        last.update(dict.fromkeys(self.output, len(self.calls)))
        changes = [0] * (len(self.calls) + 2)
        for (index, place), user in last.items():
            if index != INPUT and index not in self.free:
                changes[index + 1] += self.nbytes[index, place]
                changes[user + 1] -= self.nbytes[index, place]
        return list(accumulate(changes))

    @cached_property
    def legal_cuts(self) -> list[int]:
        """The calls before which a stage may begin, without the first."""
        barred: set[int] = set()
        for call in self.calls:
            if call.joined is not None:
                barred.update(range(call.joined + 1, call.index + 1))
        for before, call in pairwise(self.calls):
            if before.sealed and call.sealed:
                barred.add(call.index)
        return [call.index for call in self.calls[1:] if call.index not in barred]
