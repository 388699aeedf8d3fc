"""Replay: runs one stage's part of a forward, by running the model's own code and skipping the calls of other stages.

Every stage runs the containers' code from the beginning, but skips the calls of other stages. The result of a skipped
call is the value received from the other stage if this stage uses that value, else a meta tensor. Replay aborts the
code after the stage's last call, and raises GraphError if the code makes different calls than in the capture.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.capture import replay_errors
from pipesched.capture.capture import INPUT, Call, Capture, Value
from pipesched.capture.stage_body import CallLayer
from pipesched.capture.stage_parts import StagePart
from pipesched.errors import GraphError
from pipesched.model.collected_outputs import Collecting, collect, more_given
from pipesched.model.containers import Shells
from pipesched.model.tied_weights import Place, with_stand_ins
from pipesched.tensors.added_losses import added_loss
from pipesched.tensors.backward_regions import RegionFinder
from pipesched.tensors.function_transforms import running_transform, tensors_of, title
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.meta_tensors import look_of, without_values
from pipesched.tensors.payload import pytree
from pipesched.tensors.torch_functions import name_of
from pipesched.tensors.tree_structure import (
    Pattern,
    key_of,
    map_tensors,
    named_leaves,
    objects_in,
    positional,
    tensors_in,
)

__all__ = ["Look", "Looks", "Replay", "ReplayRun", "StandIns"]

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
            [(value, tuple(map(key_of, look)) if value[1] == _NUMBERS else look) for value, look in values]
        )

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
        parts: the calls that each stage runs.
        stage: the number of this stage. The last stage runs the code to its end, and returns the model's output.
        device: the stage's device.
        tied: for each call, the leaf tensors that replace the weights shared by several calls.
        called: layer name -> the module that this stage calls for the layer.

    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        capture: Capture,
        parts: Sequence[StagePart],
        stage: int,
        device: torch.device,
        tied: StandIns,
        called: Mapping[str, nn.Module],
    ) -> None:
        self.is_last = last = stage == len(parts) - 1
        part = parts[stage]
        self.capture = capture
        self.parts = parts
        self.stage = stage
        self.part = part
        self.device = device
        self.called = called
        self.tied = {place: stand_ins for place, stand_ins in tied.items() if stand_ins}
        self.end = len(capture.calls) if last else part.end
        #: Whether the stage's calls use weights or buffers of no layer, or of another layer.
        self.uses_loose = any(capture.calls[index].loose for index in part.own)
        self.roots = capture.roots
        self.transforms = [call for call in capture.calls if call.transform]
        self.draws = capture.draws
        self.regions = RegionFinder()
        self.wanted = {value for values in part.gives.values() for value in values}
        self.shells = Shells(model, layers, self._layer, called)
        #: layer -> the attributes of the layer that the code between layers reads
        self.read_of: dict[str, list[str]] = {}
        for name, attribute in sorted(capture.attributes_read):
            self.read_of.setdefault(name, []).append(attribute)
        #: The run whose container code is executing; None while a layer runs.
        self.running: ReplayRun | None = None
        self._positional = positional(model.forward)

    def refresh(self) -> None:
        """Copy the current attributes of the containers, and the attributes of layers that their code reads."""
        self.shells.refresh()
        self.shells.follow(self.capture.attributes_read)

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
        run = ReplayRun(self, received, looks, present, call, random)
        output = self.run_code(run, args, kwargs)
        return run.made, run.looks, run.ended(output)

    def run_code(self, run: "ReplayRun", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the code of the containers. Return the model's output; None if the stage is not the last."""
        args, kwargs = self._inputs(args, kwargs, run)
        if self.capture.changed:
            self.refresh()
        self.running = run
        try:
            with run:
                return self.shells.model(*args, **kwargs)
        except _Done:
            return None
        except GraphError:
            raise
        except Exception as error:
            if self.running is not None:  # not an error of a layer
                replay_errors.note(self, run.stand_ins, error)
            raise
        finally:
            self.running = None
            if run.present or run.lent:
                self.refresh()  # code such as `self.count += 1` has stored the buffer's replacement in the module

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], run: "ReplayRun"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's inputs, with received values in place of inputs that earlier stages changed."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        for place, (name, _) in enumerate(named_leaves(self._positional, args, kwargs)):
            leaf = leaves[place] = run.given.get((INPUT, name), leaves[place])
            if isinstance(leaf, Tensor) and leaf.is_meta:
                run.stand_ins[id(leaf)] = leaf, (INPUT, name)
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, spec)
        return made

    def _layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip the call of a layer. The containers' code calls this method in place of the layer."""
        if self.running is None:  # a backward, in which the model's own code recomputes layers
            return self.called.get(name, layer)(*args, **kwargs)
        return self.running.layer(name, layer, args, kwargs)


class ReplayRun(TorchFunctionMode):
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
        self.present = present
        self._call = call
        self._random = random
        self._position = 0
        self._transform: FrameType | None = None  # the last function transform
        self.lent: dict[Tensor, Tensor] = {}  # stand-in -> the weight that it replaces in the containers
        self._grad = torch.is_grad_enabled()
        self._code = ExitStack()
        self._code_parts = 0
        self._error: GraphError | None = None
        #: id of a stand-in -> the stand-in, and the value of another stage for which it stands
        self.stand_ins: dict[int, tuple[Tensor, Value]] = {}
        self._blank: set[int] = set()  # ids of stand-ins without a known shape; reading their shape is an error
        self._instead: dict[int, Tensor] = {}
        self._aliases: list[Tensor] = []
        self.given: dict[Value, Any] = {replay.roots.get(value, value): tensor for value, tensor in received.items()}
        self.made = {value: one for value, one in received.items() if value in replay.wanted}
        self.looks = dict(looks)
        self._lend()

    def ended(self, output: Any) -> Any:
        """Return the model's output. Raises GraphError if the code took a different path than in the capture."""
        if self._error is None and self._position < min(self._replay.end + 1, len(self._calls)):
            self.lost("ends")
        if self._error is not None:  # the model's code may have caught the error
            raise self._error
        if self._aliases:
            output = map_tensors(self._replaced, output)
        if self.stand_ins:
            self.check_real(tensors_in(output), "the model returns")
        return output

    # ---- called by the containers' code --------------------------------------------------------------------------

    def __enter__(self) -> "ReplayRun":
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
        if self._replay.transforms and (frame := running_transform()) is not None:
            return self._transformed(frame, func, args, kwargs)
        call = self._calls[self._position] if self._position < len(self._calls) else None
        if (call is None or call.function != name) and (name in self._quiet or name == _DEVICE):
            return self._ask(name, func, args, kwargs)  # no_grad queries at its exit, possibly after the last call
        if call is not None and call.adopts and call.function == name:
            self._adopt(call, tensors_in((args, kwargs)))
        if self._next() is None or call is None or call.function != name:
            raise self.lost(f"calls {name}")
        if call.index not in self._runs:
            return self._left_out(call, args, kwargs)
        if call.random:
            self._random.enter(self._random.key, "", 0, self._replay.draws[call.index])
        args, kwargs = self._own((args, kwargs), call)
        if func is added_loss:
            self._random.enter(self._random.key, "")
            kwargs = {**kwargs, "position": call.index}
            args = args[:3]
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.check_real(tensors_in((args, kwargs)), f"{call} takes", error)
            raise
        return self._ran(call, result, args, kwargs)

    def _next(self) -> Call | None:
        """Return the next call; None if the capture has no more. Raises _Done after the stage's last call."""
        if self._position > self._replay.end:
            raise _Done
        return self._calls[self._position] if self._position < len(self._calls) else None

    def _ask(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == _DEVICE and args[0].is_meta:
            return self.device_of(args[0])
        if any(id(tensor) in self._blank for tensor in tensors_in((args, kwargs))):
            raise self.lost(f"queries {name}")  # the forward of the sample made no such query
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.check_real(tensors_in((args, kwargs)), f"{name} takes", error)
            raise

    def device_of(self, stand_in: Tensor) -> torch.device:
        return self._replay.device

    def layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer outside this TorchFunctionMode, because functions inside a layer are not recorded."""
        self._replay.running = None
        self.__exit__(None, None, None)
        try:
            return self._call_layer(name, layer, args, kwargs)
        finally:
            self.__enter__()
            self._replay.running = self

    def _transformed(self, frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function inside a function transform. In a stage that skips the transform, it runs without values."""
        if frame is not self._transform:
            self._begin_transform(frame)
        call = self._calls[self._position - 1]
        if call.index in self._runs:
            args, kwargs = self._own((args, kwargs), call)
        else:
            args, kwargs = map_tensors(_without_values, (args, kwargs))
        return func(*args, **kwargs)

    def _begin_transform(self, frame: FrameType) -> None:
        call = self._calls[self._position] if self._position < len(self._calls) else None
        fits = call is not None and call.transform and call.function == title(frame)
        if call is not None and fits and call.adopts:
            self._adopt(call, tensors_of(frame))
        if self._next() is None or call is None or not fits:
            raise self.lost(f"calls {title(frame)}")
        given = self._stand_ins(call) if call.index in self._runs else {}
        if not given.keys().isdisjoint(tensors_of(frame)):
            self._error = replay_errors.other_weight(call)
            raise self._error
        self._transform = frame
        self._position += 1
        self._lend()

    def _lend(self) -> None:
        """Set the stand-ins for the weights of the next transform as attributes of the containers.

        A transform hands its arguments to the inner function in wrappers, in which they cannot be replaced.
        """
        for call in self._replay.transforms:
            if call.index >= self._position and call.index in self._runs:
                lent = self._stand_ins(call)
                self.lent.update((tensor, own) for own, tensor in lent.items() if own not in self.lent)
                self._replay.shells.lend({own: tensor for own, tensor in lent.items() if own not in self.lent})
                return

    def _adopt(self, call: Call, tensors: Iterable[Tensor]) -> None:
        """Take the results of a transform from a call's arguments, or replace them by the values received."""
        taken = list(tensors)
        for position, value in call.adopts.items():
            if value[0] in self._runs:
                if value in self._replay.wanted:
                    self.made[value] = taken[position]
            elif value in self.given:
                self._instead[id(taken[position])] = self.given[value]
                self._aliases.append(taken[position])

    def _call_layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._replay.transforms and self._position < len(self._calls):
            due = self._calls[self._position]
            if due.adopts and due.layer == name:
                self._adopt(due, tensors_in((args, kwargs)))
        call = self._next()
        if call is None or call.layer != name:
            raise self.lost(f"calls layer {name}")
        if call.index not in self._runs:
            return self._left_out(call, args, kwargs)
        args, kwargs = self._own((args, kwargs), call)
        if self.stand_ins:
            self.check_real((*args, *kwargs.values()), f"{call} takes")
        collecting = Collecting(layer) if call.collected else None
        called = self._replay.called[name]
        read = {key: vars(called).get(key) for key in self._replay.read_of.get(name, ())}
        result = self._call(name, call.number, called, args, kwargs)
        if len(self._replay.parts) > 1 and (changed := [key for key in read if vars(called).get(key) != read[key]]):
            self._error = replay_errors.changed_attribute(name, changed[0])
            raise self._error
        return self._ran(call, result, args, kwargs, collecting)

    def _own(self, arguments: tuple[Any, Any], call: Call) -> tuple[Any, Any]:
        """Return a call's arguments, with tied weights and other parameters replaced by this stage's tensors."""
        if self._instead:  # first, so that a buffer changed by an earlier stage is replaced by the received buffer
            arguments = map_tensors(self._replaced, arguments)
        given = self._stand_ins(call)
        taken: tuple[Any, Any] = with_stand_ins(arguments, given) if given else arguments
        return taken

    def _replaced(self, tensor: Tensor) -> Tensor:
        found = self._instead.get(id(tensor), tensor)
        hides_graph = self._grad and found.requires_grad and not tensor.requires_grad
        if hides_graph and self._replay.regions.outermost() is not None:  # the region got an input without a gradient
            self._error = replay_errors.loses_graph(self._calls[self._position :])
            raise self._error
        return found

    def _stand_ins(self, call: Call) -> dict[Tensor, Tensor]:
        """Return the tensors that replace the weights that a call uses."""
        if not call.uses:
            return {}
        given: dict[Any, Tensor] = {**self.present, **self._replay.tied.get(call.place, {})}
        if self.lent:
            given |= {lent: given[own] for lent, own in self.lent.items() if given.get(own, lent) is not lent}
        return given

    def _ran(self, call: Call, result: Any, args: Any, kwargs: Any, collecting: Collecting | None = None) -> Any:
        self._position += 1
        if call.reads:
            self.made[call.index, 0] = result
            return result
        given = [result] if isinstance(result, Tensor) else self._taken_apart(call, result, args, kwargs)
        if collecting is not None:
            more = more_given(call.collected, collecting.entries(), len(given))
            if more is None:
                self._error = replay_errors.other_form(self._replay, call)
                raise self._error
            given += [more[place] for place in sorted(more)]
        if call.changes:
            taken = list(tensors_in((args, kwargs)))
            given += [taken[position] for position, place in call.changes.items() if place >= len(given)]
        for place, tensor in enumerate(given):
            value = call.index, place
            if value in self._replay.wanted:
                self.made[value] = tensor
            if value in self._replay.capture.looked_at:
                self.looks[value] = look_of(tensor)
            if tensor.is_meta:
                self.check_real(tensors_in((args, kwargs)), f"{call} takes")
                self._error = replay_errors.without_values(call)
                raise self._error
        return result

    def _taken_apart(self, call: Call, result: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors of a call's result, which must have the form of the sample's."""
        given: list[Tensor] = []
        pattern = Pattern(result, objects_in((args, kwargs)), given)
        if not pattern.is_like(call.pattern):
            self._error = replay_errors.other_form(self._replay, call)
            raise self._error
        if not pattern.has_numbers_of(call.pattern):
            self.looks[call.index, _NUMBERS] = pattern.numbers
        strange = None if self._replay.is_last else pattern.strange(call.pattern)
        if strange is not None:
            self._error = replay_errors.other_object(self._replay, call, strange)
            raise self._error
        return given

    def _left_out(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Return stand-ins for the result of a call that belongs to another stage."""
        self._position += 1
        if call.reads:
            return self.given[call.index, 0]
        places: list[Any] = []
        for place in range(call.gives):
            first = call.repeats.get(place, place)
            places.append(self._place((call.index, place)) if first == place else places[first])
        if call.collected:
            collect(call.collected, list(tensors_in((args, kwargs))), places)
        if call.changes:  # a tensor changed in place stays the same object
            taken = list(tensors_in((args, kwargs)))
            for position, place in call.changes.items():
                if call.arguments[position] is None:  # for example a buffer of the stage that runs the call
                    self._instead[id(taken[position])] = places[place]
                places[place] = taken[position]
        if call.pattern.is_tensor:  # the usual case
            return places[0]
        try:
            numbers = self.looks.get((call.index, _NUMBERS))
            return call.pattern.build(iter(places), numbers, objects_in((args, kwargs)))
        except Exception as error:
            self._error = replay_errors.cannot_be_made(self._replay, call, error)
            raise self._error from error

    def _place(self, value: Value) -> Any:
        if value in self.given:
            given = self.given[value]
            if self._grad and not torch.is_grad_enabled() and isinstance(given, Tensor) and given.requires_grad:
                # in another stage's autograd.Function.forward, torch would treat the tensor as the function's result
                self._instead[id(alias := given.detach())] = given
                self._aliases.append(alias)
                return alias
            return given
        look = self.looks.get(value)
        if look is None:
            # torch functions take a tensor without dimensions in place of a number
            known = self._replay.capture.values.get(value)
            made = torch.empty(() if isinstance(known, Tensor) and known.dim() == 0 else 0, device="meta")
            self._blank.add(id(made))
        else:
            made = without_values(*look)
        vars(made).update(self._replay.capture.attributes.get(value, {}))
        self.stand_ins[id(made)] = made, value
        return made

    def check_real(self, values: Iterable[Any], user: str, cause: Exception | None = None) -> None:
        """Raise GraphError if one of the values is a stand-in for a value of another stage."""
        for value in values:
            if isinstance(value, Tensor) and id(value) in self.stand_ins:
                _, of = self.stand_ins[id(value)]
                self._error = replay_errors.other_value(self._replay, user, of)
                raise self._error from cause

    def lost(self, now: str) -> GraphError:
        """Return the error of code that makes other calls than for the sample, and keep it."""
        self._error = replay_errors.other_calls(self._replay, self._position, now)
        return self._error


def _without_values(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")
