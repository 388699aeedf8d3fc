"""Saved values: checks the form of the values in a checkpoint, before anything is loaded.

A hash shows only that a file is as it was written. These checks find files that were written by something else, or
changed and signed again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipesched.checks import is_count, shown
from pipesched.errors import CheckpointError
from pipesched.saving.manifest import TensorEntry
from pipesched.saving.state_encoding import decoded
from pipesched.saving.tensor_files import dtype_of

__all__ = ["blank_reader", "check_values"]

_Read = Callable[[str], Tensor]
#: Checks a part of the values: (the part, its place for error messages, a reader of tensors).
_Check = Callable[[Any, str, _Read], None]
#: The errors that decoding raises for values that pipesched did not encode.
_MISTAKES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)


_QUOTED = 200  # how many characters of an error a message quotes


class _WrongError(Exception):
    """A value does not have its form."""


def check_values(values: Any, entries: Mapping[str, TensorEntry], where: str) -> None:
    """Check the values that one process has saved.

    Args:
        values: the values.
        entries: the entries of all saved tensors, keyed as in the checkpoint.
        where: the place of the values, for error messages.

    Raises:
        CheckpointError: a value does not have the form in which pipesched saves it, or refers to a missing tensor.

    """
    try:
        _fields(_VALUES)(values, "values", blank_reader(entries))
        groups = values.get("groups", [])
        for name, own in values.get("parameters", {}).items():
            _must(own["group"] < len(groups), f"the group of parameter {name!r}", own["group"])
    except _WrongError as error:
        raise CheckpointError(
            f"the values of a checkpoint must have the form in which pipesched saves them; in {where}, {error}; load "
            f"another checkpoint"
        ) from error


def blank_reader(entries: Mapping[str, TensorEntry]) -> Callable[[str], Tensor]:
    """Return a function that returns tensors of zeros, of the saved shapes and dtypes, without reading a file."""
    return lambda key: torch.zeros((), dtype=dtype_of(entries[key].dtype), device="cpu").expand(entries[key].shape)


def _must(good: bool, place: str, value: Any) -> None:
    if not good:
        raise _WrongError(f"{place} is {shown(value)}")


def _text(value: Any, place: str, read: _Read) -> None:
    _must(isinstance(value, str), place, value)


def _whole(value: Any, place: str, read: _Read) -> None:
    _must(is_count(value, 0), place, value)


def _any(value: Any, place: str, read: _Read) -> None:
    return


def _path(value: Any, place: str, read: _Read) -> None:
    _must(isinstance(value, list | tuple) and all(type(step) in (str, int) for step in value), place, value)


def _encoded(value: Any, place: str, read: _Read) -> None:
    try:
        decoded(value, read)
    except (*_MISTAKES, CheckpointError) as error:
        raise _WrongError(f"{place} cannot be decoded ({type(error).__name__}: {str(error)[:_QUOTED]})") from error


def _state(value: Any, place: str, read: _Read) -> None:
    """Check an encoded dict."""
    _encoded(value, place, read)
    _must(isinstance(value, Mapping) and bool({"dict", "pairs"} & set(value)), place, value)


def _options(value: Any, place: str, read: _Read) -> None:
    _state(value, place, read)
    _must("dict" in value, place, value)


def _fields(checks: Mapping[str, _Check]) -> _Check:
    """Return a check of a dict with the given keys. A key that ends with "?" may be missing."""

    def check(value: Any, place: str, read: _Read) -> None:
        _must(isinstance(value, Mapping), place, value)
        known = {name.removesuffix("?"): own for name, own in checks.items()}
        for name in value:
            _must(name in known, f"a key of {place}", name)
        for name in checks:
            _must(name.endswith("?") or name in value, f"{place}, which lacks {name!r},", value)
        for name, own in value.items():
            known[name](own, f"{name!r} of {place}", read)

    return check


def _each(own: _Check) -> _Check:
    """Return a check of a dict from names to values with the same form."""

    def check(value: Any, place: str, read: _Read) -> None:
        _must(isinstance(value, Mapping), place, value)
        for name, part in value.items():
            own(part, f"{name!r} of {place}", read)

    return check


def _list(*own: _Check) -> _Check:
    """Return a check of a list: each value has the form ``own[0]`` or, if there are several, the value's own form."""

    def check(value: Any, place: str, read: _Read) -> None:
        _must(isinstance(value, list | tuple) and (len(own) == 1 or len(value) == len(own)), place, value)
        for at, part in enumerate(value):
            own[at % len(own)](part, f"{at} of {place}", read)

    return check


_VALUES: dict[str, _Check] = {
    "modules?": _each(_encoded),
    "scaler?": _each(_any),
    "groups?": _list(_fields({"place": _list(_whole, _whole), "class": _text, "options": _options})),
    "parameters?": _each(_fields({"group": _whole, "state?": _state})),
    "schedulers?": _each(_fields({"class": _text, "state": _state})),
    "extra?": _each(_fields({"kind": _text, "value": _encoded})),
    "extra leaves?": _each(_list(_list(_path, _text, _text, _text))),
}
