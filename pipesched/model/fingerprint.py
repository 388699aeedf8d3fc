"""Fingerprint: digests of models and devices. Models with the same form have the same costs on the same device."""

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.devices.selection import accelerator_name
from pipesched.devices.streams import is_accelerator
from pipesched.tensors.payload import pytree

__all__ = ["Behaviours", "code_of", "device_name", "fingerprint", "form_of"]

_HOOKS = "_hooks"  # in the names of dicts of hooks, whose keys are arbitrary numbers
_PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device | torch.Size | type


def fingerprint(*parts: Any) -> str:
    """Return a digest of ``parts``, as text. Values with the same repr have the same digest."""
    return hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=12).hexdigest()


def form_of(value: Any) -> list[Any]:
    """Return the properties of a module or a sample on which the measured costs depend.

    For modules these are classes, code and settings; for tensors they are shapes and types, but not values.
    """
    if isinstance(value, nn.Module):
        return list(_of_module(value))
    leaves, spec = pytree.tree_flatten(value)
    return [str(spec), *(_of_tensor(leaf) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves)]


def code_of(function: Any) -> Any:
    """Return the code and constants of a Python function, the name of any other function, or None for None."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
    return (
        code.co_code,
        code.co_names,
        [constant for constant in code.co_consts if isinstance(constant, int | float | str)],
    )


def _of_module(model: nn.Module) -> Iterator[Any]:
    for name, module in model.named_modules():
        code = getattr(type(module).forward, "__code__", None)
        settings = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        yield name, kind, module.extra_repr(), sorted(settings.items())
        if code is not None:
            yield code.co_code, code.co_names, code.co_varnames
    tensors: Iterable[tuple[str, Tensor]] = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    first: dict[int, str] = {}
    for name, tensor in tensors:
        yield name, first.setdefault(id(tensor), name), _of_tensor(tensor)


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, tensor.is_meta


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


class Behaviours:
    """Describes all that a module's forward may depend on, except for the values of tensors.

    Unlike `form_of`, a description includes hooks, functions, containers and objects in attributes. Modules with the
    same description behave alike. The description of an unknown object contains its address.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # keeps the described objects, so that addresses stay theirs

    def of(self, module: nn.Module) -> str:
        """Return a digest of the description of a module."""
        return fingerprint(self._of(module), form_of(module))

    def _of(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = value, f"within {type(value).__qualname__}"  # what an object in a cycle holds
            known = self._known[id(value)] = value, fingerprint(type(value), self._parts(value))
        return known[1]

    def _parts(self, value: Any) -> Any:
        """Return the descriptions of the parts of a value that is not plain."""
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, Set):
            return sorted(map(self._of, value))
        parts = _parts_of(value)
        return repr(value) if parts is None else [self._of(own) for own in parts]


def _parts_of(value: Any) -> Sequence[Any] | None:
    """Return the parts of a container, a function or an object; None if they are not known."""
    if isinstance(value, Sequence):
        return value
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, FunctionType):
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        return repr(_code_of(value.__code__)), value.__defaults__, value.__kwdefaults__, *cells
    return [] if isinstance(value, torch.Generator) else _attributes_of(value)


def _attributes_of(value: Any) -> Sequence[Any] | None:
    """Return the names and values of an object's attributes; None if it has none."""
    if not hasattr(value, "__dict__"):
        return None
    table = sorted(vars(value).items())
    hooks = [isinstance(own, Mapping) and _HOOKS in key for key, own in table]
    return [(key, [*own.values()] if is_hooks else own) for (key, own), is_hooks in zip(table, hooks, strict=True)]


def _code_of(code: CodeType) -> Any:
    inner = [_code_of(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_names, inner


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def device_name(device: torch.device) -> str:
    """Return the model name of an accelerator, or of the processor for a CPU device."""
    if is_accelerator(device):
        return accelerator_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()
