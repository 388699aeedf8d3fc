"""Checks: whether an argument is of the type that a function takes, before anything else is done with it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from pipesched.errors import ArgumentError, ScheduleError

__all__ = [
    "LARGEST",
    "LARGEST_SIZE",
    "as_list",
    "as_path",
    "check_known",
    "check_number",
    "check_size",
    "check_type",
    "is_count",
    "is_whole",
    "shown",
]

#: No number that pipesched is given is as large: sums of what is below it fit into floats and, of sizes, into 64 bits.
LARGEST = 2**63
LARGEST_SIZE = 2**48  # bytes, 256 TiB
_LONGEST = 80  # letters of a value that an error shows


def shown(value: Any) -> str:
    """A value as an error shows it: all of a short one, the beginning of a long text, and the type of anything else."""
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[: _LONGEST // 2]!r}... ({len(value):,} letters)"
    try:
        text = f"{value!r}"
    except (ValueError, RecursionError):  # a whole number of thousands of digits; lists within lists
        text = "\n"
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


def check_number(value: Any, what: str) -> None:
    """Raise ScheduleError for what is not a finite number, or negative, or beyond all that can be measured."""
    number: Any = -1 if isinstance(value, bool) or not isinstance(value, Real) else value
    if not 0 <= number < math.inf:
        raise ScheduleError(f"costs are finite numbers, not negative; {what} is {shown(value)}; measure it again")
    if number >= LARGEST:
        raise ScheduleError(f"costs are numbers below {LARGEST:.1e}; {what} is {shown(value)}; measure it again")


def check_size(value: Any, what: str) -> None:
    """Raise ScheduleError for what is not a whole number of bytes that one stage can hold."""
    if not is_whole(value) or not 0 <= value < LARGEST_SIZE:
        raise ScheduleError(f"sizes are whole numbers of bytes below 2**48; {what} is {shown(value)}; measure it again")


def check_known(has: str, values: Any, known: Sequence[str]) -> None:
    """Raise ArgumentError for what is no mapping, ScheduleError for an entry that nobody reads. has: "a plan has"."""
    rule = f"{has} {', '.join(known)}"
    check_type(values, Mapping, rule, "save it again")
    for name in values:
        if name not in known:
            near = get_close_matches(str(name), known, 1) if len(str(name)) <= _LONGEST else []
            meant = f", nearest to {near[0]!r}" if near else ""
            raise ScheduleError(f"{rule}; got {shown(name)}{meant}; correct it or leave it out")
