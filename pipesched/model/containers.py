"""Containers: splits a model into layers and containers, and copies the containers to intercept the layer calls.

A container is a module whose child modules become layers: the model itself, or a module with lists of blocks. Any other
module is a layer, called as a whole. The containers' code runs in shells: shallow copies of the containers in which
stand-ins replace the layers and intercept their calls. The model itself stays unchanged, so several threads can run it.
"""

import functools
import operator
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy as shallow
from functools import partial
from inspect import currentframe
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import GraphError
from pipesched.model.attributes import Attributes, attribute, set_attributes
from pipesched.model.module_tree import hooks_of, is_recorder
from pipesched.model.padded_encoder import container_class
from pipesched.model.state_guard import same_bits
from pipesched.tensors.tensor_attributes import with_copied_attributes_of
from pipesched.tensors.torch_insides import is_compiled

__all__ = ["MetaTwin", "Shells", "Twin", "as_whole", "find_layers", "is_small"]

_LARGEST = 4  # a module with more than 1/4 of the parameters is split into smaller layers if possible

#: (the layer's name, the layer, args, kwargs) -> the layer's output
LayerCall = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def as_whole(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model whose forward calls no submodule: the model itself is the only layer."""
    return {"(model)": model}


def find_layers(model: nn.Module, closed: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return a model's layers in order of registration, keyed by qualified name.

    A module registered twice gets the name under which it was registered first.

    The result depends only on the model, not on devices, stages or batches. Modules in ``closed`` are kept whole.
    """
    total = _size(model)
    layers: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            if id(child) in seen:
                continue
            seen.add(id(child))
            if name not in closed and _opens(child, total):
                walk(child, f"{name}.")
            else:
                layers[name] = child

    walk(model, "")
    return layers


def _opens(module: nn.Module, total: int) -> bool:
    if is_compiled(module):
        return False
    if _is_list(module):
        return True
    if hooks_of(module) or isinstance(module, torch.jit.ScriptModule):
        return False  # hooks and scripted code require that the module is called as a whole
    if any(_is_list(inner) and _parametrised(inner) > 1 for inner in module.modules()):
        return not _is_parametrised_by_torch(module)
    return not _is_of_torch(module) and _size(module) * _LARGEST > total and _parametrised(module) > 1


def is_small(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is small enough to be one layer: at most a quarter of the model's parameters."""
    return _size(module) * _LARGEST <= _size(model)


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward and not hooks_of(module)
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_parametrised_by_torch(module: nn.Module) -> bool:
    return nn.utils.parametrize.is_parametrized(module)


def _parametrised(module: nn.Module) -> int:
    return sum(any(True for _ in child.parameters()) for child in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _ModuleCopies(ABC):
    """Copies of a model's modules. The copies refer to each other as the original modules do."""

    _shares = True  # lists and similar values that refer to no module are shared with the originals

    def __init__(self, model: nn.Module) -> None:
        self._translated: dict[int, tuple[Any, Any]] = {}
        self._own = {id(module): name for name, module in model.named_modules()}

    @abstractmethod
    def _copy(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module of the model."""

    def _in_copies(self, value: Any) -> Any:
        """Return a list, function or similar value, rebuilt with copies of the modules that the value refers to."""
        if id(value) in self._own:
            return self._copy(value)
        if not isinstance(value, _REFERRING):
            return value
        if type(value) in (list, dict, set, deque):
            if type(value) in (list, dict):
                return self._rebuilt(value)
            return value if self._shares else shallow(value)
        if id(value) not in self._translated:
            self._translated[id(value)] = value, value  # ends the recursion for values that refer to themselves
            self._translated[id(value)] = value, self._rebuilt(value)
        return self._translated[id(value)][1]

    def _rebuilt(self, value: Any) -> Any:
        parts, build = _parts_of(value)
        others = [self._in_copies(part) for part in parts]
        same = (self._shares or type(value) not in _GROWING) and all(map(operator.is_, parts, others))
        return value if same else build(others)


class Shells(_ModuleCopies):
    """Copies of a model's containers. The code of the copies calls the function ``call`` in place of each layer.

    Args:
        model: the user's module.
        layers: layer name -> layer.
        call: the function to call in place of each layer.
        called: layer name -> the module that is called for the layer. An attribute set on this module is also set
            on the layer's stand-in in the copied containers, and vice versa.
        reads: a set to which to add (layer name, attribute) if the containers' code reads a plain value from a layer.
            Default: reads are not recorded.

    """

    _shares = False

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        call: LayerCall,
        called: Mapping[str, nn.Module],
        reads: set[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(model)
        self._reads = reads
        self._call = call
        self._called = called
        self._names = {id(layer): name for name, layer in layers.items()}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._copies: dict[int, nn.Module] = {}
        #: id of a stand-in -> the layer's name, the layer, and the attributes that both had after the last call
        self._layers: dict[int, tuple[str, nn.Module, dict[str, Any]]] = {}
        #: layer name -> the layer's stand-in
        self._stand_ins: dict[str, nn.Module] = {}
        self._classes: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}
        self._before: dict[int, dict[str, Any]] = {}
        self._contents: dict[int, dict[str, list[Any]]] = {}
        self.model = self._copy(model)
        self.refresh()

    def refresh(self) -> None:
        """Copy the current modes, flags and other plain attributes of the original containers to the shells.

        Lists and other mutable values are copied, so that each stage's code changes its own copy.
        """
        for own, copy in self._pairs:
            _follow(own, copy, ("_modules", "_buffers"))
            copy.__dict__["_buffers"] = dict(own._buffers)
            for name, value in own.__dict__.items():
                if type(value) in _GROWING or isinstance(value, _REFERRING):
                    copy.__dict__[name] = self._in_copies(value)
            self._before[id(copy)] = {**copy.__dict__, **copy._buffers}
            self._contents[id(copy)] = {
                name: list(value) for name, value in copy.__dict__.items() if type(value) in _GROWING
            }

    def follow(self, reads: Collection[tuple[str, str]]) -> None:
        """Copy attributes of layers, given as (layer name, attribute), to the layers' stand-ins."""
        for name, key in reads:
            stand_in = self._stand_ins[name]
            _, layer, seen = self._layers[id(stand_in)]
            if key in layer.__dict__ and layer.__dict__[key] is not seen.get(key, seen):
                stand_in.__dict__[key] = seen[key] = layer.__dict__[key]

    def reset(self) -> None:
        """Give all copies the current attributes of the originals, and forget all other attributes."""
        for own, copy in self._pairs:
            children = copy._modules
            copy.__dict__.clear()
            copy.__dict__.update({**own.__dict__, "_modules": children})
        for _, own, seen in self._layers.values():
            for attributes in (self._copies[id(own)].__dict__, seen):
                attributes.clear()
                attributes.update(own.__dict__)
        self.refresh()

    def lend(self, stand_ins: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace weights and buffers in the copied containers until the next ``refresh``."""
        for own, copy in self._pairs if stand_ins else ():
            for table in ("_parameters", "_buffers"):
                found = {name: stand_ins[one] for name, one in own.__dict__[table].items() if one in stand_ins}
                if found:
                    copy.__dict__[table] = {**copy.__dict__[table], **found}

    def changed(self) -> Attributes:
        """Return the new values of the container attributes, including buffers, that the forward changed."""
        changed: dict[tuple[nn.Module, str], Any] = {}
        for own, copy in self._pairs:
            before = self._before[id(copy)]
            contents = self._contents[id(copy)]
            for name, value in (*copy.__dict__.items(), *copy._buffers.items()):
                filled = name in contents and not _alike(contents[name], list(value))
                if name not in _OF_BUFFERS and (value is not before.get(name, self) or filled):
                    changed[own, name] = attribute(copy, name)
        return changed

    def running(self, frame: types.FrameType | None = None) -> str:
        """Return the name of the innermost container whose code is running; an empty string for the model.

        Args:
            frame: the frame of the running code. Default: the caller's frame.

        """
        names: dict[int, str] = {id(copy): self._own[id(own)] for own, copy in self._pairs}
        frame = frame or currentframe()
        while frame is not None:
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back
        return ""

    def _copy(self, module: nn.Module) -> nn.Module:
        known = self._copies.get(id(module))
        if known is not None:
            return known
        name = self._names.get(id(module))
        kind: Any = type(module)
        copy: nn.Module = object.__new__(container_class(kind) if name is None else kind)
        self._copies[id(module)] = copy
        copy.__dict__.update(module.__dict__)
        if name is None:
            self._pairs.append((module, copy))
            copy.__dict__["_modules"] = dict(self._children(module))
        else:
            self._layers[id(copy)] = name, module, dict(module.__dict__)
            self._stand_ins[name] = copy
            copy.__class__ = self._stand_in_class(module)
        return copy

    def _stand_in_class(self, layer: nn.Module) -> type[nn.Module]:
        """Return a subclass of the layer's class. Layers of the same class get stand-ins of the same class."""
        kind = type(layer)
        has_forward = not (hooks_of(layer) or isinstance(layer, torch.jit.ScriptModule))
        if (kind, has_forward) not in self._classes:

            def hand_over(stand_in: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._hand_over(stand_in, args, kwargs)

            names: dict[str, Any] = {"__call__": hand_over, "__module__": kind.__module__}
            if self._reads is not None and not isinstance(layer, torch.jit.ScriptModule):
                names["__getattribute__"] = self._noting(kind)
            if has_forward:
                names["forward"] = functools.wraps(kind.forward)(hand_over)
            self._classes[kind, has_forward] = type(kind.__name__, (kind,), names)
        return self._classes[kind, has_forward]

    def _noting(self, kind: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
        """Return a ``__getattribute__`` that records the plain attributes of stand-ins that code reads."""
        reads = self._reads
        assert reads is not None
        layers = self._layers

        def read(stand_in: nn.Module, key: str) -> Any:
            value = kind.__getattribute__(stand_in, key)
            if type(value) in _PLAIN and id(stand_in) in layers and key in kind.__getattribute__(stand_in, "__dict__"):
                reads.add((layers[id(stand_in)][0], key))
            return value

        return read

    def _hand_over(self, stand_in: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the call of a stand-in to ``call``."""
        name, layer, seen = self._layers[id(stand_in)]
        called = self._called.get(name)
        if called is None:
            return self._call(name, layer, args, kwargs)
        for key, value in stand_in.__dict__.items():
            if value is not seen.get(key):
                setattr(called, key, value)
        try:
            return self._call(name, layer, args, kwargs)
        finally:
            stand_in.__dict__.update(called.__dict__)
            seen.update(called.__dict__)

    def _children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module | None]]:
        for name, child in module._modules.items():
            yield name, None if child is None else self._copy(child)


class Twin(_ModuleCopies):
    """A copy of a layer with the same tensors, so that two threads can replace the tensors independently."""

    _kept: tuple[str, ...] = ("_modules", "_parameters", "_buffers")

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._copies: dict[int, nn.Module] = {}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._before: dict[int, dict[str, Tensor | None]] = {}
        self.layer = self._copy(layer)
        self.refresh()

    def hand_back(self) -> None:
        """Put the buffers that the twin has replaced or made into the original layer.

        Raises GraphError if another twin has put a buffer with other values there.
        """
        for own, copy in self._pairs:
            before = self._before[id(copy)]
            for name, tensor in copy._buffers.items():
                if tensor is before.get(name):
                    continue
                there = own._buffers.get(name)
                if there is not before.get(name) and not _agree(there, tensor):
                    raise GraphError(
                        f"a layer that several stages call must not keep state from one call to the next; two stages "
                        f"have replaced the buffer {name!r} of {type(own).__name__} by different values; build the "
                        f"pipeline with a sample for which the forward replaces the buffer, or give each call a layer "
                        f"of its own"
                    )
                set_attributes({(own, name): attribute(copy, name)})
                before[name] = tensor

    def refresh(self) -> None:
        """Copy the current tensors, modes and flags of the original layer to the twin."""
        self._translated.clear()
        for own, copy in self._pairs:
            self._before[id(copy)] = dict(own._buffers)
            _follow(own, copy, self._kept)
            for name, value in own.__dict__.items():
                if isinstance(value, _REFERRING) and name not in self._kept:
                    copy.__dict__[name] = self._in_copies(value)
            self._take_tensors(own, copy)

    def _take_tensors(self, own: nn.Module, copy: nn.Module) -> None:
        copy._parameters.update(own._parameters)
        copy._buffers.update(own._buffers)

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._copies:
            copy = self._copies[id(module)] = object.__new__(type(module))
            copy.__dict__.update(module.__dict__)
            copy.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers))
            children = module._modules.items()
            copy.__dict__["_modules"] = {name: None if child is None else self._copy(child) for name, child in children}
            self._pairs.append((module, copy))
        return self._copies[id(module)]


class MetaTwin(Twin):
    """A copy of a model whose weights and buffers are on the meta device. The user's hooks do not run on it.

    Args:
        model: the model.
        shapes: the shapes of whole weights. Between runs, a weight may hold only some of its rows. Other tensors keep
            the shapes that they have.

    """

    _shares = False
    _kept = (*Twin._kept, "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

    def __init__(self, model: nn.Module, shapes: Mapping[Tensor, torch.Size]) -> None:
        self._shapes = shapes
        self._on_meta: dict[int, tuple[Any, Any]] = {}  # keeps the originals alive, so that no id is reused
        super().__init__(model)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module of the model."""
        return self._copies[id(module)]

    def original(self, module: nn.Module) -> nn.Module:
        """Return the module of the model whose copy this is; a module that the copy's code has made is returned."""
        return next((own for own, copy in self._pairs if copy is module), module)

    def _take_tensors(self, own: nn.Module, copy: nn.Module) -> None:
        for name, parameter in own._parameters.items():
            copy._parameters[name] = self._meta(parameter)
        copy._buffers = {name: self._meta(buffer) for name, buffer in own._buffers.items()}

    def _meta(self, tensor: Any) -> Any:
        if id(tensor) not in self._on_meta:
            shape = None if tensor is None else self._shapes.get(tensor, tensor.shape)
            self._on_meta[id(tensor)] = tensor, None if shape is None else _without_contents(tensor, shape)
        return self._on_meta[id(tensor)][1]

    def _copy(self, module: nn.Module) -> nn.Module:
        copy = super()._copy(module)
        for name in self._kept[len(Twin._kept) :]:
            hooks = getattr(module, name)
            copy.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if _is_needed(hook))
        return copy


def _without_contents(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    made = torch.empty(shape, dtype=tensor.dtype, device="meta")
    made = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    return with_copied_attributes_of(tensor, made)


def _is_needed(hook: Any) -> bool:
    """Return whether the model's code needs a hook: torch's normalisation of weights, or a recorder of outputs."""
    return type(hook).__module__.startswith("torch.nn.utils.") or is_recorder(hook)


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two buffers hold the same bits, or differ in size, as tables that grow with the batch do."""
    return one is None or other is None or one.shape != other.shape or same_bits(one, other)


def _follow(own: nn.Module, copy: nn.Module, kept: tuple[str, ...]) -> None:
    """Copy the attributes of the module ``own`` to the module ``copy``, except the attributes in ``kept``."""
    copy.__dict__.update({name: value for name, value in own.__dict__.items() if name not in kept})


_PLAIN = frozenset([bool, int, float, str, type(None)])
_GROWING = list, dict, set, deque
_OF_BUFFERS = "_buffers", "_non_persistent_buffers_set"  # the tables of a module's buffers
_REFERRING = list, tuple, dict, types.FunctionType, types.MethodType, functools.partial


def _parts_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the objects that a value refers to (none for an unknown type), and a function that rebuilds the value."""
    if type(value) in (list, tuple):
        return list(value), type(value)
    if type(value) is dict:
        return list(value.values()), lambda parts: dict(zip(value, parts, strict=True))
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda parts: types.MethodType(value.__func__, *parts)
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return parts, lambda parts: functools.partial(parts[0], *parts[1], **parts[2])
    if isinstance(value, types.FunctionType) and value.__module__ != "torch" and _may_refer(value):
        cells = [cell for cell in value.__closure__ or () if _filled(cell)]
        return [*(cell.cell_contents for cell in cells), value.__defaults__], partial(_function, value, cells)
    return [], type


def _alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _may_refer(function: types.FunctionType) -> bool:
    return bool(function.__closure__ or function.__defaults__)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _function(function: types.FunctionType, cells: Sequence[types.CellType], parts: Sequence[Any]) -> Any:
    """Return a copy of a function with different closure contents and defaults."""
    *contents, defaults = parts
    new = {id(cell): types.CellType(content) for cell, content in zip(cells, contents, strict=True)}
    closure = tuple(new.get(id(cell), cell) for cell in function.__closure__ or ())
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
