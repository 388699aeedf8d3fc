"""Torch checks: what the caller of a Pipeline passed, checked. Each raises an error that says what to pass instead."""

import inspect
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.checks import is_count, shown
from pipesched.errors import DeviceCountError, InputError, ModelTypeError
from pipesched.tensors.payload import opened, pytree

__all__ = [
    "as_call",
    "as_device",
    "as_devices",
    "as_function",
    "as_optimizer",
    "as_seed",
    "as_threads",
    "as_timeout",
]

_MOST_THREADS = 4096  # more than any machine has; the libraries behind torch end the process where they get far more


def as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as (args, kwargs): a dict is keywords, a tuple positional, anything else one argument.

    Raises InputError where there is no tensor in it.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(opened(sample)) if isinstance(leaf, Tensor)]
    if not any(tensor.numel() for tensor in tensors):
        raise InputError(
            f"a sample is one micro-batch as an example, with a tensor of at least one row; got "
            f"{'empty tensors' if tensors else shown(sample)}; pass a tensor, a tuple of arguments or a dict of "
            f"keywords"
        )
    if isinstance(sample, dict) and not all(isinstance(name, str) for name in sample):
        raise InputError(
            f"a dict as a sample has keywords; got the keys {shown(list(sample))}; pass ({{...}},) for an argument "
            f"that is a dict"
        )
    if isinstance(sample, dict):
        return (), sample
    return (sample, {}) if isinstance(sample, tuple) else ((sample,), {})


def as_function(function: Any, name: str, takes: Sequence[str] = ()) -> Any:
    """A function or None, as given. takes: the arguments that it is called with, where that is known."""
    if function is None:
        return None
    if not callable(function):
        raise ModelTypeError(f"{name} is a function or a Module; got {shown(function)}; pass one that can be called")
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise ModelTypeError(
            f"{name} is a function or a Module; got the class {function.__name__}; pass one of it, "
            f"{function.__name__}()"
        )
    if takes:
        _check_takes(function, name, takes)
    return function


def _check_takes(function: Any, name: str, takes: Sequence[str]) -> None:
    """Raise ModelTypeError where it is known that a function does not take so many arguments."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # one that is not written in Python
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise ModelTypeError(
            f"{name} is called as {name}({', '.join(takes)}); got {shown(function)}, which takes {signature} "
            f"({error}); pass one that takes these"
        ) from None


def as_optimizer(make: Any) -> Any:
    """A function params -> Optimizer or None, as given. Raises ModelTypeError for what is none."""
    if make is not None and (isinstance(make, Optimizer) or not callable(make)):
        raise ModelTypeError(
            f"optimizer is a function params -> Optimizer, called once for each stage; got {type(make).__name__}; "
            f"pass one, such as lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    return as_function(make, "optimizer", ["params"])


def as_devices(devices: Any) -> list[torch.device]:
    """The devices, one a rank."""
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
        raise DeviceCountError(
            f"devices is a list with one device for each rank; got {devices!r}; pass a list, such as ['cpu', 'cpu']"
        )
    return [as_device(device) for device in devices]


def as_device(device: Any) -> torch.device:
    """A device of a rank. Raises InputError and DeviceCountError."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            f"a device is 'cpu', 'cuda:0' or a torch.device; got {shown(device)} ({why}); pass one of these"
        ) from None
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count()):
        raise DeviceCountError(
            f"a rank runs on a CPU or on a CUDA device that is there; got {device!r}, "
            f"with {torch.cuda.device_count()} CUDA devices; choose another"
        )
    return torch.device("cuda", torch.cuda.current_device()) if str(place) == "cuda" else place


def as_threads(count: Any) -> int:
    """A number of intra-op threads."""
    number: int = count
    if not is_count(count) or number > _MOST_THREADS:
        raise InputError(
            f"every rank computes with at least one thread; got intra_op_threads={shown(count)}; pass 1 or more, no "
            f"more than there are cores"
        )
    return number


def as_seed(seed: Any) -> int:
    """A seed as an int."""
    try:
        return operator.index(seed)
    except TypeError:
        raise InputError(f"a seed is a whole number; got {shown(seed)}; pass an int, or none for torch's own") from None


def as_timeout(timeout: Any) -> float:
    """Seconds that a rank waits for another one."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise InputError(
            f"timeout= is how many seconds a rank waits for another one; got {shown(timeout)}; pass such as 60.0"
        )
    return float(timeout)
