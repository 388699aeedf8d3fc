"""Replay: runs one stage's part of a forward, by running the model's own code and skipping the calls of other stages.

Every stage runs the containers' code from the beginning, but skips the calls of other stages. The result of a skipped
call is the value received from the other stage if this stage uses that value, else a meta tensor. Replay aborts the
code after the stage's last call, and raises GraphError if the code makes different calls than in the capture.
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
from pipesched.tensors.added_losses import added_loss
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.payload import pytree
from pipesched.tensors.torch_functions import name_of
from pipesched.tensors.tree_structure import Pattern, named_leaves, positional, tensors_in

__all__ = ["Look", "Looks", "Replay", "StandIns"]

#: For each call, the tensors that replace the parameters of this call.
StandIns = Mapping[Place, Mapping[nn.Parameter, Tensor]]
#: The dtype and shape of a tensor that was not sent, or the plain numbers in a call's result.
Look = tuple[Any, ...]

_NUMBERS = "numbers"  # in a key (call index, _NUMBERS) of the plain numbers that a call returned

_DEVICE = "torch.Tensor.device.__get__"


class Looks:
    """The types and shapes of values that a stage does not send, and plain numbers that calls returned.

    A Looks object is immutable, and a single pytree leaf of a message. Comparison distinguishes plain numbers of
    different types, such as 1 and True. ``values`` holds pairs (Value, Look).
    """

    __slots__ = ("_key", "values")

    def __init__(self, *values: tuple[Value, Look]) -> None:
        self.values = values
        self._key = tuple(
            [(value, repr(look) if value[1] == _NUMBERS else look) for value, look in values]
        )  # repr distinguishes 1 from True

    @classmethod
    def of(cls, values: Mapping[Value, Look]) -> "Looks":
        return cls(*values.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Looks) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Done(BaseException):
    """Raised to abort the model's code after the stage's last call. ``except Exception`` does not catch it."""


class Replay:
    """Runs one stage's part of a forward. Used by one thread at a time.

    Args:
        model: the user's module.
        layers: layer name -> layer.
        capture: the record of the forward.
        part: the calls that the stage runs.
        device: the stage's device.
        tied: for each call, the leaf tensors that replace the weights shared by several calls.
        called: layer name -> the module that this stage calls for the layer.
        last: whether this is the last stage, which runs the code to its end and returns the model's output.

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
        #: The run whose container code is executing; None while a layer runs.
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
        """Run the stage's calls for one micro-batch.

        Args:
            args: positional inputs of the model.
            kwargs: keyword inputs of the model.
            received: values from earlier stages.
            looks: types and shapes of values that earlier stages did not send.
            present: replacements for parameters and buffers that belong to no layer.
            call: the function that calls a layer.
            random: the micro-batch's random number generator.

        Returns:
            The values to send to later stages, ``looks`` with the types and shapes that this stage adds, and the
            model's output (None unless this is the last stage).

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
                self.refresh()  # code such as `self.count += 1` has stored the buffer's replacement in the module
        return run.made, run.looks, run.ended(output)

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[Value, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's inputs, with received values in place of inputs that earlier stages changed."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        for place, (name, _) in enumerate(named_leaves(self._positional, args, kwargs)):
            leaves[place] = given.get((INPUT, name), leaves[place])
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, spec)
        return made

    def _layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip the call of a layer. The containers' code calls this method in place of the layer."""
        return layer(*args, **kwargs) if self.running is None else self.running.layer(name, layer, args, kwargs)


class _Run(TorchFunctionMode):
    """The state of a replay for one micro-batch: the index of the next call, and the values known so far."""

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
        self._blank: dict[int, Tensor] = {}  # tensors without a known shape; reading their shape is an error
        self._instead: dict[int, Tensor] = {}
        self._aliases: list[Tensor] = []
        self.given: dict[Value, Any] = {replay.roots.get(value, value): tensor for value, tensor in received.items()}
        self.made = {value: one for value, one in received.items() if value in replay.wanted}
        self.looks = dict(looks)

    def ended(self, output: Any) -> Any:
        """Return the model's output. Raises GraphError if the code took a different path than in the capture."""
        if self._error is None and self._position < min(self._replay.end + 1, len(self._calls)):
            self._lost("ends")
        if self._error is not None:  # the model's code may have caught the error
            raise self._error
        if self._aliases:
            output = Pattern(output).build(self._instead.get(id(one), one) for one in tensors_in(output))
        return output

    # ---- called by the containers' code --------------------------------------------------------------------------

    def __enter__(self) -> "_Run":
        """Enter this TorchFunctionMode for the next part of the code between layers."""
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
            return self._ask(name, func, args, kwargs)  # no_grad queries at its exit, possibly after the last call
        if self._next() is None or call is None or call.function != name:
            raise self._lost(f"calls {name}")
        if call.index not in self._runs:
            return self._left_out(call, args, kwargs)
        if call.random:
            self._random.enter(self._random.key, "", 0, self._replay.draws[call.index])
        args, kwargs = self._own((args, kwargs), call)
        if func is added_loss:
            self._random.enter(self._random.key, "")
            kwargs = {**kwargs, "position": call.index}
            args = args[:3]
        return self._ran(call, func(*args, **kwargs), args, kwargs)

    def _next(self) -> Call | None:
        """Return the next call; None if the capture has no more. Raises _Done after the stage's last call."""
        if self._position > self._replay.end:
            raise _Done
        return self._calls[self._position] if self._position < len(self._calls) else None

    def _ask(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == _DEVICE and args[0].is_meta:
            return self._replay.device
        if any(id(tensor) in self._blank for tensor in tensors_in((args, kwargs))):
            raise self._lost(f"queries {name}")  # the forward of the sample made no such query
        return func(*args, **kwargs)

    def layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer outside this TorchFunctionMode, because functions inside a layer are not recorded."""
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
        """Return a call's arguments, with tied weights and other parameters replaced by this stage's tensors."""
        if self._instead:  # first, so that a buffer changed by an earlier stage is replaced by the received buffer
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
                    f"the arguments of a call must be inputs of the model or tensors that other calls returned; {call} "
                    f"uses a different tensor, which has no values in this stage; create that tensor with torch "
                    f"functions (not inside vmap or another library), or in a layer"
                )
                raise self._error
        return result

    def _left_out(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Return stand-ins for the result of a call that belongs to another stage."""
        self._position += 1
        if call.reads:
            return self.given[call.index, 0]
        places = [self._place((call.index, place)) for place in range(call.gives)]
        if call.changes:  # a tensor changed in place stays the same object
            taken = list(tensors_in((args, kwargs)))
            for position, place in call.changes.items():
                if call.arguments[position] is None:  # for example a buffer of the stage that runs the call
                    self._instead[id(taken[position])] = places[place]
                places[place] = taken[position]
        return call.pattern.build(iter(places), self.looks.get((call.index, _NUMBERS)))

    def _place(self, value: Value) -> Any:
        if value in self.given:
            given = self.given[value]
            if self._grad and not torch.is_grad_enabled() and isinstance(given, Tensor) and given.requires_grad:
                # in another stage's autograd.Function.forward, torch would treat the tensor as the function's result
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
            f"a call must return values in the same structure as for the sample; {call} returned a different "
            f"structure for this batch; {self._remedy()}"
        )
        return self._error

    def _lost(self, now: str) -> GraphError:
        count = len(self._calls)
        due = f"calls {self._calls[self._position]}" if self._position < count else "ends"
        self._error = GraphError(
            f"a forward must make the same calls as for the sample; after {self._position} of {count} calls to "
            f"layers and torch functions, it {due} for the sample but {now} for this batch; at this point the "
            f"model's code depends on the batch, or on an attribute that was set after the pipeline was built; "
            f"{self._remedy()}"
        )
        return self._error

    def _remedy(self) -> str:
        container = self._replay.shells.running()
        whole = f"treat module {container!r} as one layer with whole_layers=[{container!r}], " if container else ""
        return (
            f"{whole}build the pipeline with a sample like this batch and the model in its current state, or move "
            f"the code that makes these calls into a layer"
        )


def _roots(capture: Capture) -> dict[Value, Value]:
    """Map each value that results from an in-place change to the earliest value that is the same tensor object."""
    roots: dict[Value, Value] = {}
    for call in capture.calls:
        for position, place in call.changes.items():
            before = call.arguments[position]
            if before is not None:
                roots[call.index, place] = roots.get(before, before)
    return roots
