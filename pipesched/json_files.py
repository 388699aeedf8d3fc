"""JSON files: reads the JSON files that pipesched writes, and builds the dataclass instances stored in them."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from numbers import Real
from os import PathLike
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipesched.checks import LARGEST, as_path, check_known, check_number, is_text, is_whole, shown
from pipesched.errors import PipeschedError, ScheduleError

__all__ = ["load_json", "maybe", "parse_json", "read_fields"]

_Made = TypeVar("_Made")
_DEEPEST = 32  # the maximum depth of nesting; the files that pipesched writes have a depth of seven


def load_json(path: str | PathLike[str], make: Callable[[Any], _Made]) -> _Made:
    """Read a JSON file, convert its content with the function ``make``, and return the result.

    Raises:
        ScheduleError: `parse_json` or ``make`` raised an error; the message names the file.
        OSError: the file cannot be read.

    """
    path = as_path(path)
    try:
        return make(parse_json(path.read_bytes()))
    except PipeschedError as error:
        raise ScheduleError(f"{path}: {error}") from error


def parse_json(text: str | bytes, deepest: int = _DEEPEST) -> Any:
    """Parse JSON text. NaN is accepted; callers must check the numbers.

    Args:
        text: the text.
        deepest: the maximum depth of nesting. Default: 32.

    Raises:
        ScheduleError: the text is not JSON, repeats a key, is nested more than ``deepest`` levels deep, or contains an
            integer of more than 64 bits or a string that is not valid Unicode.

    """
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise _too_deep(deepest) from None
    except ScheduleError:
        raise
    except ValueError as error:  # str(error) has the line and column, or the offset of bytes that are not UTF-8
        raise ScheduleError(
            f"the file must be JSON; {error}; save the file again, or correct it at that position"
        ) from None
    level = [values]
    depth = 0
    while level:
        if depth > deepest:
            raise _too_deep(deepest)
        level = _parts(level)
        depth = depth + 1
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the (key, value) pairs of a JSON object to a dict. Raises ScheduleError for a repeated key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ScheduleError(
            f"a key may appear only once in an object; {shown(twice)} appears {names.count(twice)} times; remove the "
            f"duplicates"
        )
    return values


def _too_deep(deepest: int) -> ScheduleError:
    return ScheduleError(
        f"lists and mappings in a file may be nested at most {deepest} levels deep; this file has more levels; save "
        f"the file again"
    )


def _parts(level: Iterable[Any]) -> list[Any]:
    """Return the items, keys and values of all lists and dicts in ``level``.

    Raises ScheduleError if ``level`` has an oversized integer or a string that is not valid Unicode.
    """
    parts: list[Any] = []
    for value in level:
        if isinstance(value, list):
            parts += value
        elif isinstance(value, dict):
            parts += [*value, *value.values()]
        elif isinstance(value, str):
            if not is_text(value):
                raise ScheduleError(
                    f"text in a file must be valid Unicode; {shown(value)} has an unpaired surrogate; correct the text"
                )
        elif isinstance(value, int) and not -LARGEST < value < LARGEST:
            raise ScheduleError(
                f"whole numbers in a file must be between -2**63 and 2**63; got {shown(value)}; correct the number"
            )
    return parts


def read_fields(
    kind: type[_Made], values: Any, has: str, *, partly: bool = True, **makes: Callable[[Any], Any]
) -> _Made:
    """Build an instance of a dataclass from a mapping of field names to plain values: the inverse of ``asdict``.

    Args:
        kind: the dataclass.
        values: the mapping.
        has: the first words of an error, such as "a link must have".
        partly: whether fields with defaults may be missing.
        makes: for each field whose type is not plain, keyed by field name, a function that converts the plain value.

    Raises:
        ScheduleError: ``values`` is not a mapping, a name is unknown or missing, or a value has the wrong type.

    """
    dataclass_fields = fields(cast("Any", kind))
    names = [field.name for field in dataclass_fields]
    what = has.removesuffix(" must have")
    if not isinstance(values, Mapping):
        raise ScheduleError(f"{has} the fields {', '.join(names)}; got {shown(values)}; save the file again")
    check_known(has, values, names)
    hints = _hints(cast("Any", kind))
    arguments = {}
    for field in dataclass_fields:
        name = field.name
        if name in values:
            value = values[name]
            arguments[name] = makes[name](value) if name in makes else _of_type(value, hints[name], f"{name} of {what}")
        elif not partly or (field.default is MISSING and field.default_factory is MISSING):
            raise ScheduleError(f"{has} the fields {', '.join(names)}; {name} is missing; save the file again")
    made = kind(**arguments)  # the dataclass's own checks run first: their errors are more specific
    for name, value in arguments.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if type(number) in (int, float):
                check_number(number, f"{name} of {what}")
    return made


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields. They are looked up once, because files have many of some kinds."""
    return MappingProxyType(get_type_hints(kind))


def maybe(make: Callable[[Any], _Made]) -> Callable[[Any], _Made | None]:
    """Return a function that maps None to None, and any other value to ``make(value)``."""
    return lambda value: None if value is None else make(value)


def _of_type(value: Any, hint: Any, what: str) -> Any:
    """Check that a value has the type ``hint``, and return the value.

    If ``hint`` is a tuple type, a list is converted to a tuple. Raises ScheduleError if the value has a different type.
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        hint = next(arg for arg in args if arg is not NoneType)
        return _of_type(value, hint, what)
    if origin in (list, tuple):
        _check(isinstance(value, list | tuple), value, "a list", what)
        return origin(_of_type(part, args[0], f"{what} {at}") for at, part in enumerate(value))
    if hint is Any:
        return value
    if origin is dict:
        _check(isinstance(value, Mapping), value, "a mapping", what)
        return dict(value)
    if hint in (int, float):
        number = is_whole(value) if hint is int else isinstance(value, Real) and not isinstance(value, bool)
        _check(number, value, "a whole number" if hint is int else "a number", what)
    elif isinstance(hint, type):
        _check(isinstance(value, hint), value, {str: "a string", bool: "true or false"}.get(hint, hint.__name__), what)
    return value


def _check(good: bool, value: Any, expected: str, what: str) -> None:
    if not good:
        raise ScheduleError(f"{what} must be {expected}; got {shown(value)}; save the file again, or correct the value")
