"""Fingerprint: a digest of a model and of the device that it is measured on. Identical digests imply the same costs."""

import hashlib
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.tensors.payload import pytree

__all__ = ["code_of", "device_name", "fingerprint", "form_of"]


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


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU, or of the processor for a CPU device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()
