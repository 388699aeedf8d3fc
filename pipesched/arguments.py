"""Arguments: what the caller of a Pipeline passed, checked. Each raises an error that says what to pass instead."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from pipesched.errors import DeviceCountError, InputError, ModelTypeError

__all__ = ["as_call", "as_devices", "as_function", "as_seed", "as_threads"]


def as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as (args, kwargs): a dict is keywords, a tuple positional, anything else one argument."""
    if isinstance(sample, dict):
        return (), sample
    return (sample, {}) if isinstance(sample, tuple) else ((sample,), {})


def as_function(function: Any, name: str) -> Any:
    """A function or None, as given."""
    if function is not None and not callable(function):
        raise ModelTypeError(f"{name} is a function or a Module; got {function!r}; pass one that can be called")
    return function


def as_devices(devices: Any) -> list[torch.device]:
    """The devices, one a rank."""
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
        raise DeviceCountError(
            f"devices is a list with one device for each rank; got {devices!r}; pass a list, such as ['cpu', 'cpu']"
        )
    return [_as_device(device) for device in devices]


def _as_device(device: Any) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"a device is 'cpu', 'cuda:0' or a torch.device; got {device!r}; {error}") from None
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count()):
        raise DeviceCountError(
            f"a rank runs on a CPU or on a CUDA device that is there; got {device!r}, "
            f"with {torch.cuda.device_count()} CUDA devices; choose another"
        )
    return torch.device("cuda", torch.cuda.current_device()) if str(place) == "cuda" else place


def as_threads(count: Any) -> int:
    """A number of intra-op threads."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(
            f"every rank computes with at least one thread; got intra_op_threads={count!r}; pass 1 or more"
        )
    return count


def as_seed(seed: Any) -> int:
    """A seed as an int."""
    try:
        return operator.index(seed)
    except TypeError:
        raise InputError(f"a seed is a whole number; got {seed!r}; pass an int, or none for torch's own") from None
