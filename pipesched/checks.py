"""Checks: whether an argument is of the type that a function takes, before anything else is done with it."""

from collections.abc import Iterable
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from pipesched.errors import ArgumentError

__all__ = ["as_list", "as_path", "check_fields", "check_type", "is_count", "is_whole", "shown"]

_LONGEST = 80  # letters of a value that an error shows


def shown(value: Any) -> str:
    """A value as an error shows it: what it is where that is short, else its type."""
    text = f"{value!r}"
    return text if len(text) <= _LONGEST and "\n" not in text else f"one of type {type(value).__name__}"


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number, at least so large; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of any type, but for True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_type(value: Any, kind: type | tuple[type, ...], rule: str, remedy: str) -> None:
    """Raise ArgumentError unless it is of a type. rule: what the argument is; remedy: what to pass."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{rule}; got {shown(value)}; {remedy}")


def as_list(value: Any, rule: str, remedy: str) -> list[Any]:
    """The items of what can be gone through, but for a text. Raises ArgumentError for what cannot."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ArgumentError(f"{rule}; got {shown(value)}; {remedy}")
    return list(value)


def as_path(path: Any) -> Path:
    """A path of a file. Raises ArgumentError for what is none."""
    check_type(path, (str, PathLike), "path is that of a file", "pass a text or a pathlib.Path")
    return Path(path)


def check_fields(made: Any) -> None:
    """Raise TypeError where a field of a dataclass is not what its annotation says, as far as that is plain types.

    For values that were read from a file: a dataclass itself takes anything.
    """
    for name, hint in get_type_hints(type(made)).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if all(isinstance(kind, type) and kind is not Any for kind in kinds):
            value = getattr(made, name)
            if not isinstance(value, (*kinds, Real) if float in kinds else kinds):
                raise TypeError(f"{name} {shown(value)}")
