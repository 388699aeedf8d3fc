"""Containers: which modules of a model are its layers, and copies of the rest that hand each layer's call over.

A container is a module whose forward we look into: the model itself, and what holds lists of blocks. Everything else
is a layer and is called as one. The model's own code runs in shells: shallow copies of the containers, in which every
layer is replaced by one that hands its call over. So the model stays as it is, and several threads may run it at once.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from pipesched.graph import hooks_of

__all__ = ["Shells", "Twin", "find_layers"]

_LARGEST = 4  # a layer holds at most a quarter of the parameters, where its module can be opened

#: (the layer's name, the layer, args, kwargs) -> what its call returns
LayerCall = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def find_layers(model: nn.Module, closed: Collection[str] = ()) -> dict[str, nn.Module]:
    """The layers by qualified name, in the order of registration; a module that is used twice, under its first name.

    closed: modules that are not to be opened. It depends on the model alone: not on devices, stages or batches.
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
    if _is_list(module):
        return True
    if hooks_of(module):
        return False  # they see the module's call as one
    if any(_is_list(inner) and _parametrised(inner) > 1 for inner in module.modules()):
        return not _is_parametrised_by_torch(module)
    return not _is_of_torch(module) and _size(module) * _LARGEST > total and _parametrised(module) > 1


def _is_list(module: nn.Module) -> bool:
    kinds = nn.ModuleList, nn.ModuleDict
    return isinstance(module, kinds) or (type(module).forward is nn.Sequential.forward and not hooks_of(module))


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_parametrised_by_torch(module: nn.Module) -> bool:
    return nn.utils.parametrize.is_parametrized(module)


def _parametrised(module: nn.Module) -> int:
    return sum(any(True for _ in child.parameters()) for child in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Shells:
    """Copies of a model's containers around its own layers, whose calls go to ``call``."""

    def __init__(self, model: nn.Module, layers: Collection[tuple[str, nn.Module]], call: LayerCall) -> None:
        self._call = call
        self._names = {id(layer): name for name, layer in layers}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._copies: dict[int, nn.Module] = {}
        self.model = self._copy(model)

    def refresh(self) -> None:
        """Take over what has changed in the containers: modes, flags, and other plain attributes."""
        for own, copy in self._pairs:
            _follow(own, copy, ("_modules",))

    def _copy(self, module: nn.Module) -> nn.Module:
        known = self._copies.get(id(module))
        if known is not None:
            return known
        copy = self._copies[id(module)] = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        name = self._names.get(id(module))
        if name is None:
            self._pairs.append((module, copy))
            copy.__dict__["_modules"] = dict(self._children(module))
        else:
            copy.__class__ = _handing_over(name, module, self._call)
        return copy

    def _children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module | None]]:
        for name, child in module._modules.items():
            yield name, None if child is None else self._copy(child)


class Twin:
    """A copy of a layer around its own tensors, so that two threads may call the layer with tensors in their place."""

    def __init__(self, layer: nn.Module) -> None:
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self.layer = self._copy(layer, {})

    def refresh(self) -> None:
        """Take over what has changed in the layer: tensors, modes, flags."""
        for own, copy in self._pairs:
            _follow(own, copy, ("_modules", "_parameters", "_buffers"))
            copy._parameters.update(own._parameters)
            copy._buffers.update(own._buffers)

    def _copy(self, module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
        if id(module) not in known:
            copy = known[id(module)] = object.__new__(type(module))
            copy.__dict__.update(module.__dict__)
            copy.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers))
            children = module._modules.items()
            copy.__dict__["_modules"] = {
                name: None if child is None else self._copy(child, known) for name, child in children
            }
            self._pairs.append((module, copy))
        return known[id(module)]


def _follow(own: nn.Module, copy: nn.Module, kept: tuple[str, ...]) -> None:
    """Make a copy's attributes those of its own, but for some."""
    copy.__dict__.update({name: value for name, value in own.__dict__.items() if name not in kept})


def _handing_over(name: str, layer: nn.Module, call: LayerCall) -> type[nn.Module]:
    """The layer's own class, but for its call: code that asks for attributes or the type finds what it expects."""

    def hand_over(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(name, layer, args, kwargs)

    kind = type(layer)
    return type(kind.__name__, (kind,), {"__call__": hand_over, "__module__": kind.__module__})
