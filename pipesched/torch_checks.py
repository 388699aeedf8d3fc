"""Argument checks that need torch, for `Pipeline` and `tune`. Each error message says what to pass instead."""

import inspect
import math
import operator
from collections import UserDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.checks import is_count, shown
from pipesched.errors import InputError, ModelTypeError
from pipesched.tensors.payload import opened, pytree
from pipesched.tensors.structures import object_tensors
from pipesched.tensors.tensor_attributes import is_plain

__all__ = [
    "as_call",
    "as_function",
    "as_optimizer",
    "as_seed",
    "as_threads",
    "as_timeout",
]

_MOST_THREADS = 4096  # no machine has more cores; with far more threads, torch's libraries abort the process


def as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a sample to (args, kwargs).

    A dict or a UserDict holds keyword arguments, a tuple holds positional arguments, and any other value is a single
    argument. Raises InputError if the sample has no tensor with elements, or is a dict with keys that are not strings.
    """
    sample = dict(sample) if isinstance(sample, UserDict) else sample
    leaves = pytree.tree_leaves(opened(sample))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors += [tensor for leaf in leaves for tensor in object_tensors(leaf)]
    if not any(tensor.numel() for tensor in tensors):
        raise InputError(
            f"a sample must be one example micro-batch, with at least one tensor of at least one row; got "
            f"{'empty tensors' if tensors else shown(sample)}; pass a tensor, a tuple of arguments or a dict of "
            f"keyword arguments; convert a numpy array with torch.from_numpy"
        )
    named = [name for tensor in tensors if is_plain(tensor) for name in vars(tensor) if not name.startswith("_")]
    if named:
        raise InputError(
            f"tensors of a batch must not carry attributes, because micro-batches are new tensors without them; a "
            f"tensor of the sample has the attribute {named[0]!r}; pass the value as an argument of the model"
        )
    if isinstance(sample, dict) and not all(isinstance(name, str) for name in sample):
        raise InputError(
            f"a sample that is a dict must hold keyword arguments; got the keys {shown(list(sample))}; pass ({{...}},) "
            f"if the model takes a dict as its argument"
        )
    if isinstance(sample, dict):
        return (), sample
    return (sample, {}) if isinstance(sample, tuple) else ((sample,), {})


def as_function(function: Any, name: str, takes: Sequence[str] = ()) -> Any:
    """Check that the argument is None or a function, and return it. ``takes`` names the function's arguments.

    Raises ModelTypeError if the function is not callable, is a Module class, or does not accept these arguments.
    """
    if function is None:
        return None
    if not callable(function):
        raise ModelTypeError(f"{name} must be a function or a Module; got {shown(function)}; pass a function")
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise ModelTypeError(
            f"{name} must be a function or a Module; got the class {function.__name__}; pass an instance, "
            f"{function.__name__}()"
        )
    if takes:
        _check_takes(function, name, takes)
    return function


def _check_takes(function: Any, name: str, takes: Sequence[str]) -> None:
    """Raise ModelTypeError if a function's signature does not accept these positional arguments."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise ModelTypeError(
            f"{name} must be callable as {name}({', '.join(takes)}); got {shown(function)}, which takes {signature} "
            f"({error}); pass a function that takes these arguments, even if it does not use all of them"
        ) from None


def as_optimizer(make: Any) -> Any:
    """Check that the argument is None or a function ``params -> Optimizer``, and return it.

    Raises ModelTypeError otherwise.
    """
    if make is not None and (isinstance(make, Optimizer) or not callable(make)):
        raise ModelTypeError(
            f"optimizer must be a function params -> Optimizer, called once for each stage; got {type(make).__name__}; "
            f"pass a function, such as lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    return as_function(make, "optimizer", ["params"])


def as_threads(count: Any) -> int:
    """Check a number of intra-op threads and return it. Raises InputError if ``count`` is not an int from 1 to 4096."""
    number: int = count
    if not is_count(count) or number > _MOST_THREADS:
        raise InputError(
            f"intra_op_threads= must be a whole number from 1 to {_MOST_THREADS}; got intra_op_threads={shown(count)}; "
            f"pass a number from 1 to the number of cores"
        )
    return number


def as_seed(seed: Any) -> int:
    """Return a seed as an int. Raises InputError if ``seed`` is not an integer."""
    try:
        return operator.index(seed)
    except TypeError:
        raise InputError(
            f"a seed must be a whole number; got {shown(seed)}; pass an int, or None for torch's seed"
        ) from None


def as_timeout(timeout: Any) -> float:
    """Return a timeout in seconds as a float. Raises InputError if ``timeout`` is not a positive finite number."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise InputError(
            f"timeout= must be the number of seconds that a rank waits for another rank; got {shown(timeout)}; pass a "
            f"positive number, such as 60.0"
        )
    return float(timeout)
