"""Replay: runs a stage's part of a model's forward, by running the model's own code with the other calls left out.

The code of the containers runs from its beginning in every stage. A call of another stage is not made: where this
stage uses what it gives, that has been received; elsewhere its place is held by a tensor without contents. Once the
stage's last call is done, the code is left. A way through the code that differs from the captured one is an error.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.capture.capture import INPUT, Call, Capture, Value
from pipesched.capture.stage_body import CallLayer
from pipesched.capture.stage_parts import Part
from pipesched.errors import GraphError
from pipesched.model.containers import Shells
from pipesched.model.module_tree import recorders_of
from pipesched.model.tied_weights import Place, with_stand_ins
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.payload import pytree
from pipesched.tensors.torch_functions import name_of
from pipesched.tensors.tree_structure import Pattern, named_leaves, positional, tensors_in

__all__ = ["Look", "Looks", "Replay", "StandIns"]

#: What calls take in the place of parameters.
StandIns = Mapping[Place, Mapping[nn.Parameter, Tensor]]
#: Type and shape of a value.
Look = tuple[Any, ...]

_NUMBERS = "numbers"  # in a value's place of a call: the look is those that it gave beside tensors

_DEVICE = "torch.Tensor.device.__get__"


class Looks:
    """What values look like that were not sent; one leaf of what is. Never changed; equal ones are alike in types.

    values: (value, its look) each.
    """

    __slots__ = ("_key", "values")

    def __init__(self, *values: tuple[Value, Look]) -> None:
        self.values = values
        self._key = tuple(
            [(value, repr(look) if value[1] == _NUMBERS else look) for value, look in values]
        )  # 1 == True

    @classmethod
    def of(cls, values: Mapping[Value, Look]) -> "Looks":
        """Those by value."""
        return cls(*values.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Looks) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Done(BaseException):
    """The stage's last call has been made. No container may take it for an error of its own."""


class Replay:
    """One stage's part of a forward; used by one thread at a time. last: run to the end, and return the output.

    tied: what calls take in the place of weights that several use. called: the stage's own layers.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        capture: Capture,
        part: Part,
        device: torch.device,
        tied: StandIns,
        called: Mapping[str, nn.Module],
        *,
        last: bool,
    ) -> None:
        self.capture = capture
        self.part = part
        self.device = device
        self.called = called
        self.tied = {place: stand_ins for place, stand_ins in tied.items() if stand_ins}
        self.end = len(capture.calls) if last else part.end
        self.roots = _roots(capture)
        self.draws = {call.index: number for number, call in enumerate(c for c in capture.calls if c.random)}
        self.wanted = {value for values in part.gives.values() for value in values}
        self.shells = Shells(model, layers, self._layer, called)
        self.refresh = self.shells.refresh
        #: The run whose containers' code runs now; None while a layer runs.
        self.running: _Run | None = None
        self._positional = positional(model.forward)

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        received: Mapping[Value, Any],
        looks: Mapping[Value, Look],
        present: Mapping[Tensor, Tensor],
        call: CallLayer,
        random: KeyedRandom,
    ) -> tuple[dict[Value, Any], dict[Value, Look], Any]:
        """Run it for one micro-batch. received: what earlier stages gave. looks: of what they did not give.

        present: what stands for parameters and buffers that are no layer's own. call: calls a layer. random: knows the
        micro-batch, and is told which function draws.
        Returns (what is given to later stages, all looks, the output where this is the last stage).
        """
        run = _Run(self, received, looks, present, call, random)
        args, kwargs = self._inputs(args, kwargs, run.given)
        if self.capture.changed:
            self.refresh()
        self.running = run
        output = None
        try:
            with run:
                output = self.shells.model(*args, **kwargs)
        except _Done:
            pass
        finally:
            self.running = None
            if present:
                self.refresh()  # `self.count += 1` has put what stands for a buffer in its place
        return run.made, run.looks, run.ended(output)

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[Value, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs; those that earlier stages have changed, as they were received."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        for place, (name, _) in enumerate(named_leaves(self._positional, args, kwargs)):
            leaves[place] = given.get((INPUT, name), leaves[place])
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, spec)
        return made

    def _layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the containers' code calls in the place of a layer."""
        return layer(*args, **kwargs) if self.running is None else self.running.layer(name, layer, args, kwargs)


class _Run(TorchFunctionMode):
    """One run of a replay, for one micro-batch: how far it is, and what was given so far."""

    def __init__(
        self,
        replay: Replay,
        received: Mapping[Value, Any],
        looks: Mapping[Value, Look],
        present: Mapping[Tensor, Tensor],
        call: CallLayer,
        random: KeyedRandom,
    ) -> None:
        super().__init__()
        self._replay = replay
        self._calls = replay.capture.calls
        self._quiet = replay.capture.quiet
        self._runs = replay.part.runs
        self._present = present
        self._call = call
        self._random = random
        self._position = 0
        self._grad = torch.is_grad_enabled()
        self._code = ExitStack()
        self._code_parts = 0
        self._error: GraphError | None = None
        self._blank: dict[int, Tensor] = {}  # what nobody is to look at
        self._instead: dict[int, Tensor] = {}
        self._aliases: list[Tensor] = []
        self.given: dict[Value, Any] = {replay.roots.get(value, value): tensor for value, tensor in received.items()}
        self.made = {value: one for value, one in received.items() if value in replay.wanted}
        self.looks = dict(looks)

    def ended(self, output: Any) -> Any:
        """The model's output. Raises GraphError where the code has taken another way."""
        if self._error is None and self._position < min(self._replay.end + 1, len(self._calls)):
            self._lost("ends")
        if self._error is not None:  # also where the model's code has caught it
            raise self._error
        if self._aliases:
            output = Pattern(output).build(self._instead.get(id(one), one) for one in tensors_in(output))
        return output

    # ---- what the containers' code does --------------------------------------------------------------------------

    def __enter__(self) -> "_Run":
        """A part of the code between layers begins."""
        if "" in self._replay.capture.outside:
            self._code.enter_context(self._random.outside("", self._code_parts))
            self._code_parts += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if "" in self._replay.capture.outside:
            self._code.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        kwargs = kwargs or {}
        call = self._calls[self._position] if self._position < len(self._calls) else None
        if (call is None or call.function != name) and (name in self._quiet or name == _DEVICE):
            return self._ask(name, func, args, kwargs)  # also where no_grad ends
        if self._next() is None or call is None or call.function != name:
            raise self._lost(f"calls {name}")
        if call.index not in self._runs:
            return self._left_out(call, args, kwargs)
        if call.random:
            self._random.enter(self._random.key, "", 0, self._replay.draws[call.index])
        args, kwargs = self._own((args, kwargs), call)
        return self._ran(call, func(*args, **kwargs), args, kwargs)

    def _next(self) -> Call | None:
        """The call that is due. Only now is the one before surely over, with whatever code is around it."""
        if self._position > self._replay.end:
            raise _Done
        return self._calls[self._position] if self._position < len(self._calls) else None

    def _ask(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == _DEVICE and args[0].is_meta:
            return self._replay.device
        if any(id(tensor) in self._blank for tensor in tensors_in((args, kwargs))):
            raise self._lost(f"asks for {name}")  # nobody asked with the sample
        return func(*args, **kwargs)

    def layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The code calls a layer; what happens in it is not the code's."""
        self._replay.running = None
        self.__exit__(None, None, None)
        try:
            return self._call_layer(name, layer, args, kwargs)
        finally:
            self.__enter__()
            self._replay.running = self

    def _call_layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._next()
        if call is None or call.layer != name:
            raise self._lost(f"calls layer {name}")
        if call.index not in self._runs:
            result = self._left_out(call, args, kwargs)
            for record in recorders_of(layer):
                record(layer, args, result)
            return result
        args, kwargs = self._own((args, kwargs), call)
        return self._ran(call, self._call(name, call.number, self._replay.called[name], args, kwargs), args, kwargs)

    def _own(self, arguments: tuple[Any, Any], call: Call) -> tuple[Any, Any]:
        """The arguments of a call, with its own leaves of tied weights, and the present version of others."""
        if self._instead:  # first: a buffer that an earlier stage has changed is what was received
            arguments = pytree.tree_map_only(Tensor, lambda tensor: self._instead.get(id(tensor), tensor), arguments)
        given: dict[Any, Tensor] = {**self._present, **self._replay.tied.get(call.place, {})} if call.uses else {}
        taken: tuple[Any, Any] = with_stand_ins(arguments, given) if given else arguments
        return taken

    def _ran(self, call: Call, result: Any, args: Any, kwargs: Any) -> Any:
        self._position += 1
        if call.reads:
            self.made[call.index, 0] = result
            return result
        given = list(tensors_in(result))
        if not isinstance(result, Tensor):
            pattern = Pattern(result)
            if not pattern.is_like(call.pattern):
                raise self._other_form(call)
            if pattern.numbers != call.pattern.numbers:
                self.looks[call.index, _NUMBERS] = pattern.numbers
        if call.changes:
            taken = list(tensors_in((args, kwargs)))
            given += [taken[position] for position, place in call.changes.items() if place >= len(given)]
        for place, tensor in enumerate(given):
            value = call.index, place
            if value in self._replay.wanted:
                self.made[value] = tensor
            if value in self._replay.capture.looked_at:
                self.looks[value] = tensor.dtype, tuple(tensor.shape)
            if tensor.is_meta:
                self._error = GraphError(
                    f"what a call takes was given by another one, or by the model's inputs; {call} takes what none of "
                    f"them gave, so it has no contents here; make it in torch functions (not inside vmap, or in "
                    f"another library), or in a layer"
                )
                raise self._error
        return result

    def _left_out(self, call: Call, args: Any, kwargs: Any) -> Any:
        """What stands for the result of a call of another stage."""
        self._position += 1
        if call.reads:
            return self.given[call.index, 0]
        places = [self._place((call.index, place)) for place in range(call.gives)]
        if call.changes:  # what it changed is the object that it was
            taken = list(tensors_in((args, kwargs)))
            for position, place in call.changes.items():
                if call.arguments[position] is None:  # a buffer, say, of the stage that changes it
                    self._instead[id(taken[position])] = places[place]
                places[place] = taken[position]
        return call.pattern.build(iter(places), self.looks.get((call.index, _NUMBERS)))

    def _place(self, value: Value) -> Any:
        if value in self.given:
            given = self.given[value]
            if self._grad and not torch.is_grad_enabled() and isinstance(given, Tensor) and given.requires_grad:
                # in the forward of an autograd.Function of another stage: torch would make it a result of this one
                self._instead[id(alias := given.detach())] = given
                self._aliases.append(alias)
                return alias
            return given
        if value in self.looks:
            dtype, shape = self.looks[value]
            return torch.empty(shape, dtype=dtype, device="meta")
        blank = torch.empty(0, device="meta")
        self._blank[id(blank)] = blank
        return blank

    def _other_form(self, call: Call) -> GraphError:
        self._error = GraphError(
            f"what a call gives holds as many things, of the same kinds, as with the sample; {call} gives others now; "
            f"{self._remedy()}"
        )
        return self._error

    def _lost(self, now: str) -> GraphError:
        count = len(self._calls)
        due = f"calls {self._calls[self._position]}" if self._position < count else "ends"
        self._error = GraphError(
            f"a forward takes the way that it took with the sample; after {self._position} of {count} calls of layers "
            f"and torch functions it {due} with the sample, and {now} with this batch; the model's code depends on "
            f"the batch here, or on an attribute that has been set since: {self._remedy()}"
        )
        return self._error

    def _remedy(self) -> str:
        container = self._replay.shells.running()
        whole = f"keep it in one piece with whole_layers=[{container!r}], " if container else ""
        return f"{whole}make the pipeline with such a sample and of the model as it is, or move that code into a layer"


def _roots(capture: Capture) -> dict[Value, Value]:
    """For what calls change in place: the value whose object it is."""
    roots: dict[Value, Value] = {}
    for call in capture.calls:
        for position, place in call.changes.items():
            before = call.arguments[position]
            if before is not None:
                roots[call.index, place] = roots.get(before, before)
    return roots
