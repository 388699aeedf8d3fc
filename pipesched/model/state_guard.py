"""State guard: context managers that restore a model's tensors, gradients, attributes and random state after a run."""

import copy
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

# As in tensors/memory_tracker.py: no public mode sees operations on ``.data`` or inside torch's functions.
from pipesched.devices.generators import generators_kept
from pipesched.tensors.keyed_random import outside_kept
from pipesched.tensors.meta_tensors import is_expanded
from pipesched.tensors.payload import memory_of, pytree
from pipesched.tensors.tensor_attributes import is_plain
from pipesched.tensors.torch_insides import DispatchMode, hooks_on, schema_of

__all__ = [
    "GROWING",
    "attributes_kept",
    "attributes_of",
    "buffers_kept",
    "has_attributes",
    "is_of_user",
    "names_of",
    "no_graph",
    "reachable_generators",
    "reachable_parameters",
    "same_bits",
    "set_aside",
    "unchanged",
    "untouched",
]

GROWING = (list, dict, set, deque)  # these types and subclasses, such as a module's table of buffers


def _held_by(roots: Iterable[Any], *, functions: bool = True) -> list[Any]:
    """Return all modules, containers, tensors, generators and classes reachable from the roots, without duplicates.

    The search follows attributes of modules, tensors and classes, items of containers, and the closures, defaults and
    named globals of functions, methods and partials. The search does not look into other objects.
    """
    kinds = (*_HOLDERS, type, *(_FUNCTIONS if functions else ()))
    found: dict[int, Any] = {}
    left = list(roots)
    while left:
        one = left.pop()
        if type(one) not in _PLAIN and id(one) not in found and isinstance(one, kinds):
            found[id(one)] = one
            left += _parts(one)
    return list(found.values())


def reachable_parameters(value: Any) -> list[nn.Parameter]:
    """Return the parameters that a module or container holds or refers to through attributes and containers."""
    return [one for one in _held_by([value], functions=False) if isinstance(one, nn.Parameter)]


def reachable_generators(roots: Iterable[Any]) -> list[torch.Generator]:
    """Return the random generators that modules, containers or functions hold."""
    return [one for one in _held_by(roots) if isinstance(one, torch.Generator)]


def is_of_user(kind: type) -> bool:
    """Return whether a class is defined by the user or a library, not by torch or Python."""
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing")


def attributes_of(kind: type) -> dict[str, Any]:
    """Return a class's own attributes, except attributes whose names start with two underscores."""
    return {key: value for key, value in vars(kind).items() if not key.startswith("__")}


#: The most frequent types that hold no other objects. A lookup is faster than isinstance, which torch overrides.
_PLAIN = frozenset([bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size])
_FUNCTIONS = types.FunctionType, types.MethodType, partial
_HOLDERS = (nn.Module, tuple, *GROWING, Tensor, torch.Generator)


def _parts(one: Any) -> Iterable[Any]:
    if isinstance(one, nn.Module):  # scripted modules store their attributes in separate tables
        scripted = [*one.parameters(False), *one.buffers(False), *one.children()]
        return [*one.__dict__.values(), *scripted, *filter(is_of_user, type(one).__mro__)]
    if isinstance(one, dict) or is_plain(one):
        return one.values() if isinstance(one, dict) else one.__dict__.values()
    if isinstance(one, type):
        return _holders(attributes_of(one).values())
    if isinstance(one, list | tuple | set | deque):
        return _holders(one, *_FUNCTIONS)
    if isinstance(one, types.MethodType | partial):
        return [one.__self__] if isinstance(one, types.MethodType) else [one.func, one.args, one.keywords]
    return _parts_of_function(one) if isinstance(one, types.FunctionType) else ()


def _holders(values: Iterable[Any], *also: type) -> list[Any]:
    return [value for value in values if isinstance(value, (*_HOLDERS, *also))]


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    if (function.__module__ or "").partition(".")[0] == "torch":
        return []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    parts: list[Any] = [part for part in named if isinstance(part, nn.Module | Tensor)]
    parts += [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return parts


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules and the contents of these attributes after the ``with`` block.

    Attributes of modules, tensors and classes are then the same objects as before. Lists, dicts and sets have the same
    items, objects such as configurations have the same attributes, and random generators have the same state.
    """
    with _attributes_kept(_held_by(modules)):
        yield


@contextmanager
def _attributes_kept(held: list[Any]) -> Iterator[None]:
    tables: list[Any] = [one.__dict__ for one in held if isinstance(one, nn.Module) or is_plain(one)]
    classes = [(one, attributes_of(one)) for one in held if isinstance(one, type) and is_of_user(one)]
    known = [*tables, *(own for _, own in classes)]
    parts = {id(part): part for table in known for part in table.values() if has_attributes(part)}
    tables += [*map(vars, parts.values()), *(one for one in held if isinstance(one, GROWING))]
    contents = [_content(table) for table in tables]
    states = [(generator, generator.get_state()) for generator in held if isinstance(generator, torch.Generator)]
    try:
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            _restore(table, content)
        for kind, own in classes:
            _restore_class(kind, own)
        for generator, state in states:
            generator.set_state(state)


def has_attributes(value: Any) -> bool:
    """Return whether an object, such as a configuration, stores its attributes in a ``__dict__``.

    False for modules, tensors, containers, functions, classes, and instances of torch's classes.
    """
    if type(value) in _PLAIN:
        return False
    inner = isinstance(value, (*_HOLDERS, *_FUNCTIONS, type, types.ModuleType))
    return not inner and _has_table(value) and type(value).__module__.partition(".")[0] != "torch"


def _has_table(value: Any) -> bool:
    try:
        return type(vars(value)) is dict
    except Exception:  # no __dict__, or the class's own __getattr__ raises
        return False


def _content(table: Any) -> Any:
    return dict(table) if isinstance(table, dict) else set(table) if isinstance(table, set) else list(table)


def _restore(table: Any, content: Any) -> None:
    if not table and not content:  # such as most tables of hooks
        return
    now = _content(table)
    parts = [(*one.keys(), *one.values()) if isinstance(one, dict) else tuple(one) for one in (now, content)]
    alike = now == content if isinstance(now, set) else len(now) == len(content) and all(map(is_, *parts))
    if not alike:
        table.clear()
        (table.extend if isinstance(content, list) else table.update)(content)


def _restore_class(kind: type, content: dict[str, Any]) -> None:
    now = attributes_of(kind)
    for name in now.keys() - content.keys():
        delattr(kind, name)
    for name, value in content.items():
        if name not in now or now[name] is not value:
            setattr(kind, name, value)


# ---- tensors -------------------------------------------------------------------------------------------------------


def _memory(tensor: Tensor) -> int:
    """Return ``memory_of(tensor)``, or 0 for wrappers and uninitialised tensors, which have no memory."""
    try:
        return memory_of(tensor)
    except (RuntimeError, ValueError):
        return 0


class _TensorCopies:
    """Copies each tensor before an operation of this thread writes to it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.taken: dict[int, Tensor] = {}
        self._at: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._at.setdefault(_memory(tensor), []).append(tensor)
        self._at.pop(0, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, name in _written(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor):
                    own = self._at.pop(_memory(tensor), ())
                    self.taken |= {id(other): other.detach().clone() for other in own}
        return func(*args, **kwargs)


class _CopiesOfWritten(_TensorCopies, DispatchMode):
    """The dispatch mode of `_TensorCopies`. tensors/memory_tracker.py explains why it is a separate class."""

    supports_higher_order_operators = True


@lru_cache(maxsize=4096)
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operator writes to, as (position, name)."""
    schema = schema_of(operator)
    arguments = schema.arguments if schema is not None and schema.is_mutable else ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@contextmanager
def _bits_kept(*, copied: Collection[Tensor], watched: Collection[Tensor] = ()) -> Iterator[list[Tensor]]:
    """Restore the bits of tensors after the ``with`` block.

    Yields a list that, after the block, holds the tensors that were written to.

    Args:
        copied: tensors that are copied beforehand, so that writes by any thread are undone.
        watched: tensors that are copied just before an operation of this thread writes to them. Watching slows down
            every operation of this thread. Default: none.

    """
    before = {id(tensor): copy.deepcopy(tensor.data) for tensor in copied if not is_expanded(tensor)}
    tensors = {id(tensor): tensor for tensor in (*copied, *watched)}.values()
    own = [(tensor, tensor.data) for tensor in tensors if not (is_lazy(tensor) or is_expanded(tensor))]
    written: list[Tensor] = []
    watch = _CopiesOfWritten([tensor for tensor, _ in own])
    try:
        with watch if watched else nullcontext():
            yield written
    finally:
        for tensor, data in own:
            replaced = tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape
            if replaced:
                tensor.data = data  # the code has replaced the tensor's memory
            known = before.get(id(tensor), watch.taken.get(id(tensor)))
            differs = known is not None and not same_bits(data, known)
            if known is not None and differs:
                with torch.no_grad():
                    data.copy_(known)
            if replaced or differs or id(tensor) in watch.taken:
                written.append(tensor)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape hold the same bits; False if this cannot be determined."""
    if one.is_meta:
        return True
    if type(one) is not Tensor or one.layout is not torch.strided or one.is_quantized or one.is_conj():
        return False  # cannot be determined
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


@contextmanager
def _gradients_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove gradients and hooks of leaf tensors during the ``with`` block."""
    leaves = [tensor for tensor in tensors if tensor.is_leaf]
    grads = [leaf.grad for leaf in leaves]
    hooks = [own for leaf in leaves for own in hooks_on(leaf)]
    contents = [dict(own) for own in hooks]
    for leaf in leaves:
        leaf.grad = None
    for own in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, content in zip(hooks, contents, strict=True):
            _restore(own, content)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad


@contextmanager
def _leaves_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the flag ``requires_grad`` and the gradient of leaf tensors after the ``with`` block."""
    leaves = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors if tensor.is_leaf]
    try:
        yield
    finally:
        for leaf, required, grad in leaves:
            if leaf.is_leaf and leaf.requires_grad != required:
                leaf.requires_grad = required
            if leaf.grad is not grad:
                leaf.grad = grad


@contextmanager
def _modes_kept(held: Iterable[Any]) -> Iterator[None]:
    modes = [(one, one.training) for one in held if isinstance(one, nn.Module)]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# ---- runs that leave a model unchanged -----------------------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module, mode: bool, copied: Collection[Tensor] = ()) -> Iterator[list[Tensor]]:
    """Set the model's mode. After the ``with`` block, restore its attributes, modes, tensors and random state.

    Yields a list that, after the block, holds the weights and buffers that were written to or replaced. Buffers are
    copied beforehand, and so are the tensors in ``copied``, to which other threads may write. Any other weight is
    copied only when this thread writes to it.
    """
    held = _held_by([model])
    tensors = [one for one in held if isinstance(one, Tensor)]
    places = [
        (module, key, buffer)
        for module in held
        if isinstance(module, nn.Module)
        for key, buffer in module.named_buffers(recurse=False)
    ]
    before = {id(tensor): tensor for tensor in (*(buffer for *_, buffer in places), *copied)}
    with (
        torch.autograd.set_multithreading_enabled(False),  # the watch and the locks are of this thread
        _modes_kept(held),
        _leaves_kept(tensors),
        generators_kept(tensor.device for tensor in tensors),
        outside_kept(),
        _bits_kept(copied=before.values(), watched=tensors) as written,
        _attributes_kept(held),
    ):
        if mode != model.training:
            model.train(mode)
        yield written
        written += [buffer for module, key, buffer in places if module._buffers.get(key) is not buffer]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the bits of the model's buffers and the random state after the ``with`` block."""
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    with generators_kept(devices), outside_kept(), _bits_kept(copied=list(model.buffers())):
        yield


def names_of(model: nn.Module, tensors: Iterable[Tensor]) -> list[str]:
    """Return the names of the model's parameters and buffers that are in ``tensors``."""
    known = set(map(id, tensors))
    return [name for name, own in (*model.named_parameters(), *model.named_buffers()) if id(own) in known]


@contextmanager
def set_aside(*roots: Any) -> Iterator[None]:
    """Suspend gradients and hooks in all threads for a measurement, then restore the state reachable from ``roots``.

    The enclosed code must not write to weights, so layers are measured on copies of their weights. Gradients and hooks
    of all weights are suspended, because a layer may reach any weight of its model through an argument or a reference.
    """
    held = _held_by(roots)
    tensors = [one for one in held if isinstance(one, Tensor)]
    weights = {_memory(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)} - {0}
    own = [one for one in _held_by(roots, functions=False) if isinstance(one, Tensor)]
    others = [one for one in own if not isinstance(one, nn.Parameter) and _memory(one) not in weights]
    modules = [one for one in held if isinstance(one, nn.Module)]
    with _modes_kept(held), _bits_kept(copied=others), _gradients_aside(tensors), attributes_kept(modules):
        yield


@contextmanager
def no_graph(model: nn.Module) -> Iterator[None]:
    """Enable grad mode in the ``with`` block, but set ``requires_grad`` of all parameters to False.

    Grad mode is enabled as in training, but forwards save nothing for a backward pass.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad = False
        with torch.enable_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


class _SharedTensors(TorchFunctionMode):
    """Makes ``copy.deepcopy`` share tensors instead of copying them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def unchanged(value: Any) -> Any:
    """Return ``value`` with copies of all objects that a layer may change, such as key-value caches.

    Tensors are shared, not copied.
    """
    leaves, spec = pytree.tree_flatten(value)
    plain = Tensor, int, float, str, bytes, type(None), nn.Module
    with _SharedTensors():
        copies = [leaf if isinstance(leaf, plain) else _copied(leaf) for leaf in leaves]
    return pytree.tree_unflatten(copies, spec)


def _copied(value: Any) -> Any:
    """Return a deep copy of an object. An object that cannot be copied, such as a lock, is returned itself."""
    try:
        return copy.deepcopy(value)
    except Exception:  # also an error of the class's own __getattr__
        return value
