"""Untouched: runs that leave modules as they were: attributes, modes, buffers."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.contents import is_expanded
from pipesched.payload import pytree
from pipesched.randomness import outside_kept

__all__ = ["attributes_kept", "no_graph", "unchanged", "untouched"]

_GROWING = (list, dict, set, deque)  # and what is derived from them, such as a module's own table of buffers


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards each attribute is the object that it was, and lists, dicts and sets hold what they held."""
    before = [(module.__dict__, dict(module.__dict__)) for module in modules]
    values = {id(value): value for _, attributes in before for value in attributes.values()}
    contents = [(value, copy.copy(value)) for value in values.values() if isinstance(value, _GROWING)]
    try:
        yield
    finally:
        for own, attributes in before:
            _restore(own, attributes)
        for value, content in contents:
            _restore(value, content)


def _restore(value: Any, content: Any) -> None:
    value.clear()
    (value.extend if hasattr(value, "extend") else value.update)(content)


@contextmanager
def untouched(model: nn.Module, mode: bool, *, attributes: bool = True) -> Iterator[None]:
    """Run the model in a mode, and leave it as it was: attributes, unless they are to change, modes, buffers, random
    numbers.
    """
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    buffers = [(buffer, copy.deepcopy(buffer)) for buffer in model.buffers() if not is_expanded(buffer)]
    try:
        with torch.random.fork_rng(), outside_kept(), attributes_kept(modules if attributes else ()):
            if mode != model.training:
                model.train(mode)
            yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, before in buffers:
            buffer.copy_(before)


@contextmanager
def no_graph(model: nn.Module) -> Iterator[None]:
    """Run the model in grad mode, but keep nothing for a backward: its parameters require no gradient."""
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
    """Copies share tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def unchanged(value: Any) -> Any:
    """The value with copies, around the same tensors, of objects that a layer may change: caches of keys grow."""
    leaves, spec = pytree.tree_flatten(value)
    plain = Tensor, int, float, str, bytes, type(None), nn.Module
    with _SharedTensors():
        copies = [leaf if isinstance(leaf, plain) else copy.deepcopy(leaf) for leaf in leaves]
    return pytree.tree_unflatten(copies, spec)
