"""Argument checks that do not import torch: types, numbers, sizes and keys. Every error states the remedy."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike, fsencode, fspath
from pathlib import Path
from typing import Any, TypeVar

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
    "is_cost",
    "is_count",
    "is_size",
    "is_text",
    "is_whole",
    "short_signature",
    "shown",
]

#: Upper bound for costs and for integers in files. Sums of values up to this bound do not overflow a float.
LARGEST = 2**63
#: Upper bound for sizes: 256 TiB, so that sums of sizes fit into 64 bits.
LARGEST_SIZE = 2**48
_Function = TypeVar("_Function", bound=Callable[..., Any])
_LONGEST = 80  # the maximum number of characters of a value in an error message


def short_signature(function: _Function) -> _Function:
    """Decorate a function so that ``help`` and ``inspect.signature`` show names and defaults, but no annotations.

    The annotations stay in ``__annotations__`` and in the source, where type checkers and editors read them.
    """
    signature = inspect.signature(function)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    vars(function)["__signature__"] = inspect.Signature(bare)
    return function


def shown(value: Any) -> str:
    """Return a value as text for an error message.

    The text is the repr of a short value, the start of a long string, or the type of any other value.
    """
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[: _LONGEST // 2]!r}... ({len(value):,} characters)"
    try:
        text = f"{value!r}"
    except (ValueError, RecursionError):  # raised for integers of thousands of digits and for deeply nested lists
        text = "\n"
    return text if len(text) <= _LONGEST and "\n" not in text else f"a value of type {type(value).__name__}"


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether ``value`` is an int that is at least ``least``. Booleans do not count as ints."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_text(value: str) -> bool:
    """Return whether a string is valid Unicode, so that a file can hold it. It may not have an unpaired surrogate."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is an integer of any type, including numpy's. Booleans do not count as integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_type(value: Any, kind: type | tuple[type, ...], rule: str, remedy: str) -> None:
    """Raise ArgumentError unless ``value`` is an instance of ``kind``.

    Args:
        value: the argument.
        kind: the accepted type or types.
        rule: the first part of the error, which states the rule.
        remedy: the last part of the error, which states the remedy.

    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{rule}; got {shown(value)}; {remedy}")


def as_list(value: Any, rule: str, remedy: str) -> list[Any]:
    """Return the items of an iterable as a list. Raises ArgumentError for a string or a value that is not iterable."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ArgumentError(f"{rule}; got {shown(value)}; {remedy}")
    return list(value)


def as_path(path: Any) -> Path:
    """Convert a str or PathLike to a Path. Raises ArgumentError for any other type, and for text that is no path."""
    check_type(path, (str, PathLike), "a path must be a str or a pathlib.Path", "pass one of these")
    text = fspath(path)
    try:
        is_path = isinstance(text, str) and b"\0" not in fsencode(text)
    except UnicodeEncodeError:  # an unpaired surrogate
        is_path = False
    if not is_path:
        raise ArgumentError(
            f"a path must be text without NUL characters that the file system can encode; got {shown(text)}; pass "
            f"another path"
        )
    return Path(path)


def is_cost(value: Any) -> bool:
    """Return whether ``value`` is a number, 0 <= ``value`` < `LARGEST`. Booleans do not count as numbers."""
    number: Any = -1 if isinstance(value, bool) or not isinstance(value, Real) else value
    return bool(0 <= number < LARGEST)


def is_size(value: Any) -> bool:
    """Return whether ``value`` is a whole number of bytes, 0 <= ``value`` < `LARGEST_SIZE`."""
    return is_whole(value) and 0 <= value < LARGEST_SIZE


def check_number(value: Any, what: str) -> None:
    """Raise ScheduleError unless `is_cost`. ``what`` names the value in the error."""
    if is_cost(value):
        return
    number: Any = -1 if isinstance(value, bool) or not isinstance(value, Real) else value
    if not 0 <= number < math.inf:
        raise ScheduleError(f"costs must be finite and not negative; {what} is {shown(value)}; measure it again")
    raise ScheduleError(f"costs must be below {LARGEST:.1e}; {what} is {shown(value)}; measure it again")


def check_size(value: Any, what: str) -> None:
    """Raise ScheduleError unless `is_size`. ``what`` names the value in the error."""
    if not is_size(value):
        raise ScheduleError(
            f"sizes must be whole numbers of bytes below 2**48; {what} is {shown(value)}; measure it again"
        )


def check_known(has: str, values: Any, known: Sequence[str]) -> None:
    """Check that a mapping has no unknown keys.

    Args:
        has: the first words of the error, such as "a plan must have".
        values: the mapping.
        known: the keys that the mapping may have.

    Raises:
        ArgumentError: ``values`` is not a mapping.
        ScheduleError: a key is unknown; the error names the nearest known key.

    """
    rule = f"{has} the fields {', '.join(known)}"
    check_type(values, Mapping, rule, "save the file again")
    for name in values:
        if name not in known:
            near = get_close_matches(str(name), known, 1) if len(str(name)) <= _LONGEST else []
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise ScheduleError(f"{rule}; got the unknown key {shown(name)}{meant}; correct the key, or leave it out")
