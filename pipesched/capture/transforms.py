"""Transforms: records each function transform between layers, such as ``torch.vmap``, as one call.

No hook sees the results of a transform, so they get their Values when a later call takes them. Until then, a result is
recognised by its memory: operations inside the transform allocated it, or it is a view of an argument.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pipesched.capture.capture import Call, Capture, FunctionCall, Value
from pipesched.errors import GraphError
from pipesched.tensors.added_losses import added_loss
from pipesched.tensors.function_transforms import RETURNS_A_FUNCTION, arguments_of, call_of, tensors_of, title
from pipesched.tensors.keyed_random import draws
from pipesched.tensors.meta_tensors import apart
from pipesched.tensors.torch_functions import READS, changed_in_place, name_of, version_of
from pipesched.tensors.torch_insides import DispatchMode
from pipesched.tensors.tree_structure import Taken, tensors_in

__all__ = ["Transforms"]

#: (layer, function, tensors among the arguments, positions of the tensors that the call changed, result)
NewCall = Callable[..., tuple[Any, Call]]


class Transforms:
    """The function transforms of one recorded forward.

    Args:
        capture: the record of the forward.
        value: id of a tensor -> its Value. This object adds the Values of results.
        names: id of a parameter or buffer -> its name.

    """

    def __init__(self, capture: Capture, value: dict[int, Value], names: dict[int, str]) -> None:
        self._capture = capture
        self._value = value
        self._names = names
        self._frame: FrameType | None = None
        self._call: Call | None = None
        self._given: list[Tensor] = []  # the arguments of the last transform
        self._allocated = _Allocated()
        self._made: dict[int, tuple[weakref.ref[Any], Call]] = {}  # id of a storage -> storage, transform that made it
        self._alive: list[Tensor] = []
        self._new_values: set[Value] = set()  # Values of results that no recorded call has taken yet
        self._unseen: dict[int, Call] = {}  # transforms whose results code has taken from an object or a closure
        self._links: list[tuple[Call, Call]] = []  # (transform, later call that must be in the same stage)

    def run(self, frame: FrameType, func: Any, args: Any, kwargs: Any, new: NewCall) -> Any:
        """Run a function inside the transform with this frame. ``new`` records the transform as a call."""
        if frame is not self._frame or self._call is None:
            self._frame = frame
            self._call = self._begun(frame, new)
        call = self._call
        name = name_of(func)
        taken = list(tensors_in((args, kwargs)))
        self._take(call, taken)
        if draws(func, args, kwargs) or func is added_loss:
            raise _refused(call.function, f"calls {name}, which draws random numbers or adds a loss")
        if name in READS:
            raise _refused(call.function, f"reads the values of a tensor with {name}")
        own = [tensor for tensor in taken if id(tensor) in self._value or id(tensor) in self._names] + self._given
        versions = [version_of(tensor) for tensor in own]
        with self._allocated:
            result = func(*args, **kwargs)
        self._note(call, self._allocated.storages)
        self._allocated.storages.clear()
        if changed_in_place(own, versions):
            raise _refused(call.function, f"changes a tensor from outside with {name}")
        return result

    def _begun(self, frame: FrameType, new: NewCall) -> Call:
        function = title(frame)
        if function in RETURNS_A_FUNCTION:
            raise _refused(function, "can be called again later")
        taken = self._given = list(tensors_of(frame))
        _, call = new("", function, Taken(taken), [], None, transform=True)
        call.sealed = not torch.is_grad_enabled()
        self._take(call, taken)
        values = tuple(self._value.get(id(tensor)) for tensor in taken)
        self._capture.functions[call.index] = FunctionCall(call_of(frame), arguments_of(frame), values)
        self._note(call, [storage for tensor in taken if (storage := _storage(tensor)) is not None])
        return call

    def _note(self, call: Call, storages: Iterable[Any]) -> None:
        self._made.update((id(storage), (weakref.ref(storage), call)) for storage in storages)

    def _take(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Record that a transform uses these tensors. Its code may look at their shapes."""
        values = [self._value[id(tensor)] for tensor in tensors if id(tensor) in self._value]
        names = [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]
        call.takes = tuple(dict.fromkeys([*call.takes, *values]))
        call.uses = call.loose = tuple(dict.fromkeys([*call.uses, *names]))
        self._capture.looked_at.update(values)
        for tensor in tensors:
            self.see(tensor)
        self._unseen.pop(call.index, None)
        self.link(call)

    def name(self, tensors: Sequence[Tensor]) -> None:
        """Give Values to the results of transforms among these tensors."""
        for tensor in tensors:
            if (maker := self._maker(tensor)) is not None:
                self._value[id(tensor)] = value = maker.index, maker.gives
                maker.gives += 1
                self._alive.append(tensor)
                self._new_values.add(value)
                self._capture.values[value] = apart(tensor)
                self._capture.nbytes[value] = tensor.nbytes

    def adopted(self, tensors: Sequence[Tensor]) -> dict[int, Value]:
        """Return the position and the Value of each result of a transform that no earlier call has taken."""
        self.name(tensors)
        values = {self._value.get(id(tensor)): position for position, tensor in reversed(list(enumerate(tensors)))}
        found = {position: value for value, position in values.items() if value in self._new_values}
        self._new_values.difference_update(found.values())
        return found

    def refused_layer(self, frame: FrameType, layer: str) -> GraphError:
        """Return the error for a layer that the model's own code calls inside a transform."""
        return _refused(title(frame), f"calls layer {layer!r}")

    def _maker(self, tensor: Tensor) -> Call | None:
        """Return the transform that returned this tensor; None if the tensor has a Value or a name."""
        if not self._made or id(tensor) in self._value or id(tensor) in self._names:
            return None
        storage = _storage(tensor)
        made, call = self._made.get(id(storage), (None, None))
        return call if made is not None and made() is storage else None

    def see(self, tensor: Tensor) -> None:
        """If a transform returned this tensor, keep the next linked call in the stage of the transform."""
        if (maker := self._maker(tensor)) is not None:
            self._unseen[maker.index] = maker

    def link(self, call: Call) -> None:
        """Keep a call in the stages of the transforms that ``see`` has found."""
        self._links += [(maker, call) for maker in self._unseen.values()]
        self._unseen.clear()

    def join(self) -> None:
        """At the end of the forward, keep each transform in one stage with calls that cannot receive its results.

        A call can receive a result as an argument. A stage that ends with the transform sends a result only if the
        next call takes it.
        """
        self._frame = None
        self._given.clear()
        for call in self._capture.calls:
            makers = [self._capture.calls[index] for index, _ in call.adopts.values()]
            self._links += [(one, call) for one in makers if call.transform or call.index > one.index + 1]
        for maker, call in self._links:
            if maker.index not in self._capture.free:
                call.join(maker.index)


class _Allocated(DispatchMode):
    """Collects the storages in which operations return their results."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages += [storage for one in tensors_in(result) if (storage := _storage(one)) is not None]
        return result


def _storage(tensor: Tensor) -> Any:
    """Return a tensor's storage, which is the same object while it is alive; None for wrappers without memory."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _refused(function: str, what: str) -> GraphError:
    return GraphError(
        f"code between layers may use {function} only on functions of their arguments; the function under {function} "
        f"{what}; put this code, and the layers that it calls, into one submodule that has no other layers, and name "
        f"the submodule in whole_layers="
    )
