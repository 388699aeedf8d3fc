"""Capture: the record of one forward, with each layer call, each function call between layers, and the data flow.

The recorder runs the model's own code on a sample. A value is one tensor: an input of the model, or a tensor that a
call returned. Each recorded call lists the values among its arguments. Replay runs the same code again, but skips the
calls of other stages. No code is translated, so the code between layers can be any Python code.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from pipesched.model.attributes import Attributes
from pipesched.model.class_state import ClassAttribute
from pipesched.model.collected_outputs import Collected
from pipesched.model.tied_weights import Place
from pipesched.tensors.caller_context import CodeModes
from pipesched.tensors.tree_structure import Pattern

__all__ = ["INPUT", "Call", "Capture", "FunctionCall", "Value"]

INPUT = -1  # the call index of a Value that is one of the model's inputs

#: A tensor: (index of the call that returned the tensor, position in the result), or (INPUT, name of the input).
Value = tuple[int, Any]


@dataclass(kw_only=True)
class Call:
    """One call in the model's code, either of a layer or of a torch function between layers."""

    index: int
    #: The layer's name; empty for a function.
    layer: str
    #: The number of earlier calls of this layer. For a function, the number of earlier function calls that use
    #: parameters or buffers.
    number: int
    function: str
    #: The values among the call's arguments.
    takes: tuple[Value, ...]
    #: Names of the parameters and buffers that the call uses.
    uses: tuple[str, ...]
    #: The number of values that the call returns or changes in place.
    gives: int
    pattern: Pattern
    #: Place of a tensor that is in the result more than once -> its first place, which is the tensor's Value.
    repeats: dict[int, int] = field(default_factory=dict)
    #: Position of each tensor argument that the call changes in place -> index of the changed tensor in the results.
    changes: Mapping[int, int] = field(default_factory=dict)
    #: The Value of each tensor argument, or None for a tensor without a Value. Empty if the call changes no argument.
    arguments: tuple[Value | None, ...] = ()
    #: All earlier values whose tensors use the memory that the call changes in place; see ``Capture.free``.
    writes: tuple[Value, ...] = ()
    #: Whether the call returns plain Python values instead of tensors.
    reads: bool = False
    #: The plain Python value that the call returned, if it reads values. The code may branch on it.
    outcome: Any = None
    random: bool = False
    #: Whether this is a call of a function that runs without gradients, possibly inside an autograd.Function.
    sealed: bool = False
    #: All calls from the call at this index to this call must stay in one stage. None: no such constraint.
    joined: int | None = None
    #: Whether the call changes memory that existed before the forward, such as an input, or adds a loss to the step.
    outward: bool = False
    #: The names in ``uses`` that are not the layer's own parameters and buffers.
    loose: tuple[str, ...] = ()
    #: Whether this is a function transform such as ``torch.vmap``. The functions inside it are not recorded, and
    #: its results have Values only once a later call takes them.
    transform: bool = False
    #: Position of a tensor argument that a transform returned -> the argument's Value. See ``Transforms``.
    adopts: dict[int, Value] = field(default_factory=dict)
    #: The entries that a layer appends to the lists of outputs of the transformers library; see
    #: ``pipesched.model.collected_outputs``.
    collected: tuple[Collected, ...] = ()
    #: The number of values in ``collected`` that the call neither takes nor returns. They follow the results.
    num_collected: int = 0
    #: Parameters and buffers in addition to ``uses`` that the layer reads through another module or a reference.
    reached: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """A key for a call that uses parameters. The key is the same in training mode and in evaluation mode."""
        return self.layer, self.number

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that the tensors in the call's result depend on."""
        return () if self.reads else self.uses

    def join(self, index: int) -> None:
        """Keep all calls from the call at ``index`` to this call in one stage."""
        self.joined = index if self.joined is None else min(self.joined, index)

    def __str__(self) -> str:
        return self.layer + f" (call {self.number + 1})" * bool(self.number) if self.layer else self.function


class FunctionCall(NamedTuple):
    """A call of a function between layers.

    ``values`` holds the Value of each tensor argument, or None for a tensor that was not recorded.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    values: tuple[Value | None, ...]


@dataclass(kw_only=True)
class Capture:
    """The record of one forward. Calls are referred to by their index in ``calls``."""

    calls: list[Call] = field(default_factory=list)
    #: The values that make up the model's output.
    output: tuple[Value, ...] = ()
    #: Names of functions that are not recorded as calls, because they only query shapes and similar properties.
    quiet: set[str] = field(default_factory=set)
    #: The values whose shape, type or similar property the code between layers queried.
    looked_at: set[Value] = field(default_factory=set)
    #: Value -> the size of the tensor for the sample, in bytes.
    nbytes: dict[Value, int] = field(default_factory=dict)
    #: Call index -> the arguments (args, kwargs) of the layer call, for measuring.
    examples: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    #: Layers that drew from Python's or numpy's random generators; "" is the code between layers.
    outside: set[str] = field(default_factory=set)
    #: Layers that differentiate in forward mode; "" is the code between layers.
    forward_mode: set[str] = field(default_factory=set)
    #: Pairs of calls. The second call uses a tensor that the first call created but did not return.
    hidden: list[tuple[Call, Call]] = field(default_factory=list)
    #: (container module, name of an attribute that the forward set) -> the attribute's new value.
    changed: Attributes = field(default_factory=dict)
    #: Names of buffers that layers replaced or made.
    replaced: list[str] = field(default_factory=list)
    #: The tensors of the model's output.
    results: list[Tensor] = field(default_factory=list)
    #: Call index -> attributes that other code set on the layer before this call.
    told: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: Call index -> the function and its arguments, for measuring.
    functions: dict[int, FunctionCall] = field(default_factory=dict)
    #: Call index -> the modes in which the code makes this call, if they differ from those around the model.
    modes: dict[int, CodeModes] = field(default_factory=dict)
    #: The tensors of all calls for the sample, and what calls that read values returned, for rehearsals.
    values: dict[Value, Any] = field(default_factory=dict)
    #: The containers and enums of the output; see ``form_of``.
    output_form: Any = None
    #: Names of modules that must stay in one stage, because their code computes gradients or has a single backward.
    indivisible: set[str] = field(default_factory=set)
    #: The attributes that code has set on tensors, by value; only those that are numbers, strings or None.
    attributes: dict[Value, dict[str, Any]] = field(default_factory=dict)
    #: Modules whose own code reads the values of tensors and then calls layers inside the module.
    deciding: set[str] = field(default_factory=set)
    #: Class attributes that each forward changes; see ``class_state``.
    changed_classes: tuple[ClassAttribute, ...] = ()
    #: The layers that the model's own code calls inside ``torch.utils.checkpoint``.
    recomputed: set[str] = field(default_factory=set)
    #: (layer, attribute) of the plain values of layers that the code between layers reads, such as ``training``.
    attributes_read: set[tuple[str, str]] = field(default_factory=set)
    #: Call index -> the Value of each tensor in ``examples``, or None for a tensor without a Value.
    taken: dict[int, tuple[Value | None, ...]] = field(default_factory=dict)

    @cached_property
    def layer_calls(self) -> list[Call]:
        """The calls of layers, in call order."""
        return [call for call in self.calls if call.layer]

    @cached_property
    def free(self) -> frozenset[int]:
        """The calls that any stage may repeat instead of receiving their values, such as calls that compute masks.

        Free calls use no weights, draw no random numbers, and take only the model's inputs and the values of other free
        calls. Calls that are not free must not write to these inputs and values, because a stage that repeats the free
        calls does not repeat these writes.
        """
        written: set[Value] = set()
        while True:
            free = self._free_without(written)
            changed = {value for call in self.calls if call.index not in free for value in call.writes}
            if changed <= written:
                return free
            written |= changed

    def _free_without(self, written: Set[Value]) -> frozenset[int]:
        """Return the free calls, assuming that calls that are not free write to the values in ``written``."""
        free: set[int] = set()
        made_by = {index for index, _ in written}
        for call in self.calls:
            own = call.layer or call.uses or call.random or call.outward or call.index in made_by
            taken = all(value[0] in free or (value[0] == INPUT and value not in written) for value in call.takes)
            if not own and taken:
                free.add(call.index)
        return frozenset(free)

    @cached_property
    def uses(self) -> frozenset[str]:
        """The names of the parameters and buffers that the calls use."""
        return frozenset(name for call in self.calls for name in call.uses)

    @cached_property
    def first_read(self) -> int:
        """The first call that reads a value of layers, which is known only in a step; the number of calls if none.

        Later functions may get such a value as a plain number, on which the number of their results may depend.
        """
        reads = (call.index for call in self.calls if call.reads and call.index not in self.free)
        return next(reads, len(self.calls))

    @cached_property
    def draws(self) -> dict[int, int]:
        """The calls of random functions: call index -> number of earlier random calls."""
        return {call.index: number for number, call in enumerate(call for call in self.calls if call.random)}

    @cached_property
    def roots(self) -> dict[Value, Value]:
        """Map each value that results from an in-place change to the earliest value that is the same tensor object."""
        roots: dict[Value, Value] = {}
        for call in self.calls:
            for position, place in call.changes.items():
                before = call.arguments[position]
                if before is not None:
                    roots[call.index, place] = roots.get(before, before)
        return roots

    @property
    def way(self) -> tuple[Any, ...]:
        """The calls and the data flow, without shapes and plain numbers. Equal ways are one path of the code."""
        calls = ((str(call), call.takes, call.uses, call.gives, call.reads) for call in self.calls)
        return *calls, self.output

    def queries_within(self, other: "Capture") -> bool:
        """Return whether the code queries only properties, such as shapes, that it also queries in ``other``."""
        return self.quiet <= other.quiet and self.looked_at <= other.looked_at

    @cached_property
    def written_inputs(self) -> frozenset[Any]:
        """The names of the model's inputs that some call writes to, without indices in lists."""
        return frozenset(name[:2] for call in self.calls for index, name in call.writes if index == INPUT)

    @cached_property
    def free_writes(self) -> dict[Value, list[int]]:
        """For each value, the free calls that write to the value's memory.

        A stage that repeats the call that created the value must also repeat these free calls.
        """
        found: dict[Value, list[int]] = {}
        for call in self.calls:
            for value in call.writes if call.index in self.free else ():
                found.setdefault(value, []).append(call.index)
        return found

    def trained(self, parameters: Set[str]) -> set[Value]:
        """Return the values that need gradients if these parameters are trained."""
        values: set[Value] = set()
        for call in self.calls:
            modes = self.modes.get(call.index)
            if (
                not call.reads
                and (modes is None or modes.grad)
                and not (values.isdisjoint(call.takes) and parameters.isdisjoint(call.uses))
            ):
                values.update((call.index, place) for place in range(call.gives))
                values.update(call.writes)
        return values

    @cached_property
    def crossing_bytes(self) -> list[int]:
        """For each call, the number of bytes that would be sent across a stage boundary before this call."""
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
        """The calls before which a stage may begin, except the first call."""
        barred: set[int] = set()
        for call in self.calls:
            if call.joined is not None:
                barred.update(range(call.joined + 1, call.index + 1))
        for before, call in pairwise(self.calls):
            if before.sealed and call.sealed:
                barred.add(call.index)
        return [call.index for call in self.calls[1:] if call.index not in barred]
