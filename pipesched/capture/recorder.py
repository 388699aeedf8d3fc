"""Recorder: runs a model's forward once on a sample, and records the calls of layers and functions in a Capture."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os.path import commonprefix
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.capture.capture import INPUT, Call, Capture, FunctionCall, Value
from pipesched.capture.scouting import Scout
from pipesched.capture.transforms import Transforms
from pipesched.errors import GraphError
from pipesched.model.collected_outputs import Collecting, described
from pipesched.model.containers import Shells
from pipesched.model.state_guard import same_bits, unchanged
from pipesched.model.tensor_places import TensorPlaces, makes_weights
from pipesched.progress import advance
from pipesched.tensors.added_losses import added_loss
from pipesched.tensors.backward_regions import Region, RegionFinder
from pipesched.tensors.caller_context import CodeModes
from pipesched.tensors.function_transforms import running_transform
from pipesched.tensors.keyed_random import draws, outside_state
from pipesched.tensors.meta_tensors import Beside, apart, call_beside, lacks_contents
from pipesched.tensors.payload import form_of, pytree
from pipesched.tensors.structures import object_tensors
from pipesched.tensors.tensor_attributes import is_plain
from pipesched.tensors.torch_functions import (
    ASKS,
    DIFFERENTIATES,
    MAKE_DUAL,
    READS,
    changed_in_place,
    is_dispatched,
    is_shaped_by_contents,
    memory_at,
    name_of,
    version_of,
)
from pipesched.tensors.tree_structure import (
    Pattern,
    Taken,
    map_tensors,
    named_leaves,
    objects_in,
    positional,
    tensors_in,
    tensors_in_objects,
)
from pipesched.units import counted

__all__ = ["record"]


def record(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    made: Collection[str] = (),
    scout: Scout | None = None,
) -> Capture:
    """Run the model's forward once, in the caller's grad mode, and record its calls.

    ``made`` holds names of buffers that an earlier forward has made. Calls that use such a buffer do not name it.
    With ``scout``, the code between layers runs without the layers, and draws the random numbers of a step.
    """
    with Beside(torch.device("cpu")) if lacks_contents(model) else nullcontext():
        return _Recorder(model, layers, made, scout).run(tuple(args), dict(kwargs))


#: Values of a tensor's attributes that stand-ins carry, too.
_PLAIN = (bool, int, float, str, type(None))


class _Recorder(TorchFunctionMode):
    def __init__(
        self, model: nn.Module, layers: Mapping[str, nn.Module], made: Collection[str], scout: Scout | None
    ) -> None:
        super().__init__()
        self._scout = scout
        self._capture = Capture()
        self._places = TensorPlaces(model, made)
        self._names = self._places.names
        self._layers = layers
        self._positional = positional(model.forward)
        self._shells = Shells(model, layers, self._layer, layers, reads=self._capture.attributes_read)
        self._value: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # keeps tensors alive so that no id is reused
        self._memory: dict[int, dict[Value, int]] = {}  # address -> (value there -> its tensor's id)
        self._shared: list[tuple[Call, Value]] = []  # (in-place call, another value in the changed memory)
        self._names_at: dict[int, list[str]] = {}  # address -> names of the parameters and buffers there
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._names_at.setdefault(memory_at(tensor), []).append(name)
        #: (in-place call, the parameter or buffer that the call writes to, the values in the same memory)
        self._named_writes: list[tuple[Call, str, Mapping[Value, int]]] = []
        self._counts: dict[str, int] = {}
        self._inside = False
        self._running = ""  # the layer that is running
        self._drawn = outside_state()
        self._around = CodeModes.here()
        #: id of a tensor that a function inside a layer created -> the tensor, and the number of calls recorded before
        self._within: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._by_the_way: set[Value] = set()  # values used inside the running layer
        self._reached: set[str] = set()  # parameters and buffers used inside the running layer
        self._own: set[int] = set()  # ids of the running layer's own tensors
        self._hidden_from: int | None = None
        self._attributes = {name: dict(layer.__dict__) for name, layer in layers.items()}
        self._first_use: dict[str, int] = {}  # parameter or buffer -> index of the first call that uses it
        self._elsewhere: set[int] = set()  # addresses of memory that no call of this forward allocated
        self._finder = RegionFinder()
        self._regions: dict[Region, tuple[Call, Call]] = {}  # code with a single backward -> first and last call
        self._readers: dict[str, int] = {}  # container -> index of the first call after its code read tensor values
        self._arguments: set[int] | None = None  # ids of the running layer's arguments
        self._transforms = Transforms(self._capture, self._value, self._names)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        args, kwargs = self._inputs(args, kwargs)
        with self, nullcontext() if self._scout is None else self._scout.code:
            output = self._shells.model(*args, **kwargs)
        self._note_outside("")
        for name, layer in self._layers.items():
            self._places.before(name, layer, self._is_of_layer)
        results: list[Tensor] = []
        Pattern(output, tensors=results)
        for tensor in [*tensors_in(output), *object_tensors(output)]:  # not in objects inside, such as caches of layers
            if id(tensor) not in self._value:
                self._look_for(tensor)
        if self._capture.calls:
            self._end_of_hidden(self._capture.calls[-1])
        capture = self._capture
        capture.output = tuple(self._value.get(id(tensor), (INPUT, INPUT)) for tensor in results)
        self._join()
        for call in capture.calls:
            call.uses = tuple(name for name in call.uses if name not in self._places.made)
        self._capture = Capture()
        self._regions.clear()
        self._alive.clear()  # frees the memory now, despite the reference cycles of the shells
        capture.deciding.update(
            name
            for name, begin in self._readers.items()
            if any(call.layer.startswith(f"{name}.") for call in capture.calls[begin:])
        )
        # a stage makes one stand-in for a tensor, however often other stages change the tensor in place
        capture.looked_at |= {capture.roots[value] for value in capture.looked_at & capture.roots.keys()}
        capture.changed = self._shells.changed()
        capture.results = list(tensors_in(output))
        capture.output_form = form_of(output)
        return capture

    def _note_outside(self, layer: str) -> None:
        """Record whether this layer, or the code between layers (""), drew random numbers from Python or numpy."""
        if self._scout is not None:
            return
        drawn = outside_state()
        if drawn != self._drawn:
            self._capture.outside.add(layer)
        self._drawn = drawn

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy the inputs and record the copies as values. An input passed twice becomes two different tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, (name, leaf) in enumerate(named_leaves(self._positional, args, kwargs)):
            if isinstance(leaf, Tensor):
                leaves[place] = leaf.detach().clone()  # the model's code may change an input in place
                self._value[id(leaves[place])] = INPUT, name
                self._alive.append(leaves[place])
                self._elsewhere.add(memory_at(leaves[place]))
                self._memory.setdefault(memory_at(leaves[place]), {})[INPUT, name] = id(leaves[place])
        told_apart: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, spec)
        return told_apart

    def _join(self) -> None:
        """Set ``joined`` on calls that must share a stage with earlier calls.

        Code whose backward is a single unit (such as a ``torch.autograd.Function``) must stay in
        one stage. If a call modifies memory in place, and a later call reads this memory through another tensor, all
        calls that use the memory must stay in one stage.
        """
        self._transforms.join()
        for region, (first, call) in self._regions.items():
            call.join(first.index)
            layers = [own.layer for own in self._capture.calls[first.index : call.index + 1] if own.layer]
            names = [layer.split(".")[:-1] for layer in layers]
            if not region.of_function:
                self._capture.recomputed.update(layers)
            if names and region.of_function:
                self._capture.indivisible.add(".".join(commonprefix(names)))  # noqa: RUF071  # commonprefix of lists
        calls = self._capture.calls
        self._join_attributes()
        last = {value: call.index for call in calls for value in call.takes}
        last.update(dict.fromkeys(self._capture.output, len(calls)))
        for call, value in self._shared:
            if last.get(value, INPUT) > call.index:
                targets = [call.arguments[position] or (call.index, 0) for position in call.changes]
                call.join(min(value[0], *(index for index, _ in targets)))
                if value[0] == INPUT:  # a later stage would get the unchanged input
                    calls[min(last[value], len(calls) - 1)].join(call.index)
        for call, name, there in self._named_writes:
            call.join(self._first_use.get(name, call.index))
            sent = {value for value, tensor in there.items() if self._names.get(tensor) == name}
            for later in calls[call.index + 1 :]:
                if name in later.uses and sent.isdisjoint(later.takes):
                    later.join(call.index)

    def _join_attributes(self) -> None:
        """Keep a tensor with attributes in one stage with the calls that take it: stages send no attributes.

        Code between layers runs in every stage, and reads the attributes of stand-ins.
        """
        for tensor in self._alive:
            value = self._value.get(id(tensor))
            if value is not None and is_plain(tensor) and vars(tensor):
                plain = {name: one for name, one in vars(tensor).items() if isinstance(one, _PLAIN)}
                self._capture.attributes[value] = plain
        for call in self._capture.calls:
            for index, _ in self._capture.attributes.keys() & set(call.takes):
                if index != INPUT:
                    call.join(index)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_dispatched(func):
            return func(*args, **kwargs)
        name = name_of(func)
        if name == MAKE_DUAL:
            self._capture.forward_mode.add(self._running)
        if self._inside:
            return self._inner(func, args, kwargs)
        if (frame := running_transform()) is not None:
            return self._transforms.run(frame, func, args, kwargs, self._new)
        if func in DIFFERENTIATES or name == MAKE_DUAL:
            self._differentiate(func)
        taken = list(tensors_in((args, kwargs)))
        versions = [version_of(tensor) for tensor in taken]
        name = name_of(func)
        if self._scout is None:
            result = func(*args, **kwargs)
        elif (name in READS or name in ASKS) and any(tensor.is_meta for tensor in taken):
            result = self._scout.assumed(name, self._capture.calls)
        else:
            result = self._scout.code.call(func, *args, **kwargs)
        changed = changed_in_place(taken, versions)
        if name in READS or is_shaped_by_contents(name, args):
            self._readers.setdefault(self._shells.running(), len(self._capture.calls))
        is_empty = type(result) in (list, tuple) and not result and name not in READS | ASKS  # such as that of unbind
        if changed or (taken and is_empty) or any(True for _ in tensors_in(result)):
            result, call = self._function(func, name, args, kwargs, taken, changed, result)
            call.random = draws(func, args, kwargs)
            call.outward |= func is added_loss
            call.sealed = not torch.is_grad_enabled()
        elif taken and (name in READS or (name in ASKS and self._given(taken))):
            _, call = self._function(func, name, args, kwargs, taken, changed, None)
            call.reads = True
            call.outcome = result
            self._capture.values[call.index, 0] = result
        else:
            self._capture.quiet.add(name)
            self._capture.looked_at |= {self._value[id(tensor)] for tensor in taken if id(tensor) in self._value}
        return result

    def _function(
        self, func: Any, name: str, args: Any, kwargs: Any, taken: list[Tensor], changed: list[int], result: Any
    ) -> tuple[Any, Call]:
        """Record a call of a function between layers. Return the result and the Call."""
        values = tuple(self._value.get(id(tensor)) for tensor in taken)
        objects = objects_in((args, kwargs))
        given = Taken(taken, objects, tensors_in_objects(objects))
        result, call = self._new("", name, given, changed, result)
        arguments = map_tensors(Tensor.detach, (args, kwargs))
        self._capture.functions[call.index] = FunctionCall(func, arguments, values)
        return result, call

    def _differentiate(self, func: Any) -> None:
        """Mark the running container as indivisible, because its code computes gradients.

        A stage can differentiate only through layers that it runs. Raises GraphError if the container is the model.
        """
        container = self._shells.running()
        if not container:
            layers = list(dict.fromkeys(call.layer for call in self._capture.calls if call.layer))
            raise GraphError(
                f"a stage may only differentiate through layers that it runs itself; the model's own code calls "
                f"{func.__name__} after {counted(len(layers), 'layer')} ({', '.join(layers[:2])}"
                f"{', ...' * (len(layers) > 2)}); put that code, and the layers that it differentiates "
                f"through, into one submodule, so that they stay in one stage"
            )
        self._capture.indivisible.add(container)

    def _where(self) -> str:
        container = self._shells.running()
        return f"the code between layers of {container!r}" if container else "the code between layers"

    def _given(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether one of the tensors was returned by a call."""
        return any(self._value.get(id(tensor), (INPUT,))[0] != INPUT for tensor in tensors)

    def _inner(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function inside a layer, and record tensors that the layer uses but did not get as arguments."""
        if self._arguments is None:
            return func(*args, **kwargs)
        taken = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        for tensor in taken.values():
            if value := self._value.get(id(tensor)):
                self._by_the_way.add(value)
                by_layer = value[0] != INPUT and self._capture.calls[value[0]].layer
                if by_layer and id(tensor) not in self._arguments:  # the layer got the tensor through a shared object
                    self._hidden_from = value[0] if self._hidden_from is None else min(self._hidden_from, value[0])
            elif id(tensor) not in self._own:
                self._look_for(tensor)
        result = func(*args, **kwargs)
        if any(True for _ in tensors_in(result)):
            self._reached.update(self._names[key] for key in taken.keys() & self._names.keys())
        for tensor in tensors_in(result):
            if id(tensor) not in taken:  # a tensor in ``taken`` was only passed through
                self._within[id(tensor)] = weakref.ref(tensor), len(self._capture.calls)
        return result

    def _look_for(self, tensor: Tensor) -> None:
        """If an earlier layer call created this tensor but did not return it, keep this call in the same stage."""
        made, call = self._within.get(id(tensor), (None, 0))
        if made is not None and made() is tensor and call < len(self._capture.calls):
            self._hidden_from = call if self._hidden_from is None else min(self._hidden_from, call)
        elif made is None:
            self._transforms.see(tensor)

    def _is_of_layer(self, tensor: Tensor) -> bool:
        """Return whether a function inside an earlier layer call created this tensor."""
        made, _ = self._within.get(id(tensor), (None, 0))
        return made is not None and made() is tensor

    def _end_of_hidden(self, call: Call) -> None:
        self._transforms.link(call)
        if self._hidden_from is not None:
            call.join(self._hidden_from)
            self._capture.hidden.append((self._capture.calls[self._hidden_from], call))
        self._hidden_from = None

    def _layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return layer(*args, **kwargs)
        if (frame := running_transform()) is not None:
            return self._transformed(frame, name, partial(layer, *args, **kwargs))
        self._note_outside("")
        self._transforms.name(list(tensors_in((args, kwargs))))
        self._running = name
        own = self._places.before(name, layer, self._is_of_layer)
        self._inside = True
        try:
            taken = list(tensors_in((args, kwargs)))
            in_objects = tensors_in_objects(objects := objects_in((args, kwargs)))
            versions = [version_of(tensor) for tensor in taken]
            held = [(key, one) for key, one in own.items() if not isinstance(one, nn.Parameter)]
            before = [(key, one, one._version) for key, one in held if not one.is_inference()]
            called = name in self._counts
            buffers = [(one, version_of(one), one.clone()) for _, one in held if called]
            values = tuple(self._value.get(id(tensor)) for tensor in taken)
            example = pytree.tree_map_only(Tensor, Tensor.detach, apart(unchanged((args, kwargs))))
            self._forget_layer()
            self._own = set(map(id, own.values()))
            told = {key: value for key, value in layer.__dict__.items() if self._attributes[name].get(key) is not value}
            if self._scout is None or not self._scout.is_plain(name):
                self._arguments = {id(one) for one in (*taken, *in_objects, *tensors_in(list(told.values())))}
            result, entries = self._called(name, layer, args, kwargs, example)
            self._arguments = None
            replaced = self._places.after(name, layer)
            rewritten = (version_of(one) != version or not same_bits(one, copy) for one, version, copy in buffers)
            counted = any(rewritten) or (called and bool(replaced))
            by_the_way = sorted(self._by_the_way, key=str)
            given = Taken(taken, objects, in_objects)
            result, call = self._new(name, "", given, changed_in_place(taken, versions), result, entries=entries)
        except Exception as error:
            error.add_note(f"while layer {name!r} was running with the given sample")
            raise
        finally:
            self._running = ""
            self._inside = False
            self._arguments = None
        if counted:
            # calls that update the same buffers must keep their order
            call.join(next(other.index for other in reversed(self._capture.calls[:-1]) if other.layer == name))
        written = [key for key, one, version in before if one._version != version]
        self._named_writes += [(call, key, {}) for key in dict.fromkeys([*written, *replaced])]
        self._capture.replaced += replaced
        self._note_uses(call, own)
        self._note_outside(name)
        call.takes = tuple(dict.fromkeys([*call.takes, *by_the_way]))
        self._capture.examples[call.index] = example
        self._capture.taken[call.index] = values
        if told:
            self._capture.told[call.index] = told
        return result

    def _called(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], example: Any
    ) -> tuple[Any, list[tuple[str, Any]]]:
        """Call a layer. Return its result, and the entries that it appends to the lists of the transformers library."""
        collecting = Collecting(layer)

        def again() -> Any:
            collecting.forget()
            return unchanged(example)

        call_it = call_beside if self._scout is None else partial(self._scout.layer, name)
        result = call_it(layer, args, kwargs, again)
        advance()
        return result, collecting.entries()

    def _forget_layer(self) -> None:
        self._by_the_way.clear()
        self._reached.clear()

    def _note_uses(self, call: Call, own: Collection[str]) -> None:
        """Record the weights and buffers that a layer's call uses. ``own`` holds the names of the layer's tensors."""
        for used in own:
            self._first_use.setdefault(used, call.index)
        call.loose = tuple(name for name in call.uses if name not in own)
        call.uses = tuple(dict.fromkeys([*call.uses, *own]))
        call.reached = tuple(sorted(self._reached.difference(call.uses)))

    def _transformed(self, frame: FrameType, name: str, layer: Callable[[], Any]) -> Any:
        """Call a layer inside a function transform, and mark the running container as indivisible.

        Raises GraphError if the container is the model.
        """
        container = self._shells.running()
        if not container:
            raise self._transforms.refused_layer(frame, name)
        self._capture.indivisible.add(container)
        self._inside = True
        try:
            return layer()
        finally:
            self._inside = False

    def _note_modes(self, call: Call) -> None:
        """Record the modes in which the code makes a call, such as autocast, unless the run is a scout."""
        if self._scout is None and (modes := CodeModes.here()) != self._around:
            self._capture.modes[call.index] = modes.within(self._around)

    def _new(
        self,
        layer: str,
        function: str,
        given: Taken,
        changed: list[int],
        result: Any,
        *,
        transform: bool = False,
        entries: Sequence[tuple[str, Any]] = (),
    ) -> tuple[Any, Call]:
        """Record a call. Return the result and the Call.

        The call may use all values in the objects among its arguments. If the result contains an argument that the call
        did not change, a view replaces this tensor in the result. The argument and the result then have different ids.
        """
        taken, objects, in_objects = given
        adopts = self._transforms.adopted(taken)
        used = [*taken, *in_objects]
        takes = tuple(dict.fromkeys(self._value[id(tensor)] for tensor in used if id(tensor) in self._value))
        uses = tuple(dict.fromkeys(self._names[id(tensor)] for tensor in taken if id(tensor) in self._names))
        made: list[Tensor] = []
        pattern = Pattern(result, objects, made)
        number = 0
        if layer or uses or transform:
            number = self._counts[layer] = self._counts.get(layer, -1) + 1
        call = Call(
            index=len(self._capture.calls),
            layer=layer,
            number=number,
            function=function,
            takes=takes,
            uses=uses,
            gives=0,
            pattern=pattern,
            loose=uses,
            transform=transform,
            adopts=adopts,
        )
        for tensor in taken:
            if id(tensor) not in self._value:
                self._look_for(tensor)
                self._elsewhere.add(memory_at(tensor))
                self._alive.append(tensor)
        call.outward = any(memory_at(taken[position]) in self._elsewhere for position in changed)
        self._check_changed(call, [taken[position] for position in changed])
        self._end_of_hidden(call)
        for name in uses:
            self._first_use.setdefault(name, call.index)
        self._capture.calls.append(call)
        self._note_modes(call)
        if (region := self._finder.outermost()) is not None:
            self._regions[region] = self._regions.get(region, (call, call))[0], call
        call.arguments = tuple(self._value.get(id(tensor)) for tensor in taken) if changed else ()
        through = {id(tensor) for tensor in used} - {id(taken[position]) for position in changed}
        if any(id(tensor) in through for tensor in made):
            made = [tensor.view_as(tensor) if id(tensor) in through else tensor for tensor in made]
            result = pattern.build(iter(made), objects=objects)
        call.collected, more = described(entries, taken, made)
        call.num_collected = len(more)
        self._note_values(call, taken, changed, [*made, *more])
        return result, call

    def _check_changed(self, call: Call, targets: Iterable[Tensor]) -> None:
        """Raise GraphError if a call changes a tensor that is no input, buffer or result of another call."""
        for target in targets:
            if id(target) in self._value or id(target) in self._names:
                continue
            if isinstance(target, nn.Parameter):
                raise makes_weights(self._where(), f"a weight of shape {tuple(target.shape)}")
            raise GraphError(
                f"in-place operations of a forward may only change inputs, buffers and tensors that it created; "
                f"{call} changes a tensor of shape {tuple(target.shape)} that is none of these; register the tensor "
                f"as a buffer in __init__"
            )

    def _note_values(self, call: Call, taken: Sequence[Tensor], changed: Iterable[int], given: list[Tensor]) -> None:
        """Record the values that a call gives: its results, and the tensors that it changed."""
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(given)))}
        changes = {}
        for position in changed:
            target = taken[position]
            if id(target) not in places:
                places[id(target)] = len(given)
                given.append(target)
            changes[position] = places[id(target)]
            there = self._memory.setdefault(memory_at(target), {})
            self._shared += [(call, value) for value, other in there.items() if other != id(target)]
            call.writes += tuple(there)
            self._named_writes += [(call, name, there) for name in self._names_at.get(memory_at(target), ())]
        call.changes = changes
        call.gives = len(given)
        call.repeats = {place: places[id(one)] for place, one in enumerate(given) if places[id(one)] != place}
        for place, tensor in enumerate(given):
            value = call.index, places[id(tensor)]
            self._value[id(tensor)] = value
            self._memory.setdefault(memory_at(tensor), {})[value] = id(tensor)
            self._capture.values[call.index, place] = apart(tensor)
            self._capture.nbytes[call.index, place] = tensor.nbytes
        self._alive += given
