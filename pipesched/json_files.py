"""JSON files: the one reader of all that pipesched keeps as JSON, and dataclasses from the plain values in them."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from numbers import Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pipesched.checks import LARGEST, as_path, check_known, check_number, is_whole, shown
from pipesched.errors import PipeschedError, ScheduleError

__all__ = ["load_json", "maybe", "parse_json", "read_fields"]

_Made = TypeVar("_Made")
_DEEPEST = 32  # lists within lists; the files that pipesched writes have seven


def load_json(path: str | PathLike[str], make: Callable[[Any], _Made]) -> _Made:
    """What ``make`` makes of the values in a JSON file.

    Raises ScheduleError, which names the file, for what `parse_json` or ``make`` refuses; OSError where the file cannot
    be read.
    """
    path = as_path(path)
    try:
        return make(parse_json(path.read_bytes()))
    except PipeschedError as error:
        raise ScheduleError(f"{path}: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """The values in a JSON text.

    Raises ScheduleError where it is no JSON, where a key stands twice, where lists lie more than 32 deep, for whole
    numbers of more than 64 bits, and for text that is not Unicode. NaN is a number here: who reads it knows its place.
    """
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise _too_deep() from None
    except ScheduleError:
        raise
    except ValueError as error:  # what is wrong, with line and column; or, of bytes, at which one
        raise ScheduleError(f"the file is JSON; {error}; save it again, or correct it there") from None
    level = [values]
    depth = 0
    while level:
        if depth > _DEEPEST:
            raise _too_deep()
        level = _parts(level)
        depth = depth + 1
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ScheduleError(f"a key stands once; {shown(twice)} stands {names.count(twice)} times; remove the others")
    return found


def _too_deep() -> ScheduleError:
    return ScheduleError(
        f"lists and mappings of a file lie at most {_DEEPEST} deep in each other; here they lie deeper; save it again"
    )


def _parts(level: Iterable[Any]) -> list[Any]:
    """What lies directly in these values."""
    parts: list[Any] = []
    for value in level:
        if isinstance(value, list):
            parts += value
        elif isinstance(value, dict):
            parts += [*value, *value.values()]
        elif isinstance(value, str):
            if not value.isascii():
                _check_text(value)
        elif isinstance(value, int) and not -LARGEST < value < LARGEST:
            raise ScheduleError(f"whole numbers in a file are below 2**63; got {shown(value)}; correct it")
    return parts


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ScheduleError(
            f"text in a file is Unicode; {shown(text)} has half of a pair of surrogates; correct it"
        ) from None


def read_fields(
    kind: type[_Made], values: Any, has: str, *, partly: bool = True, **makes: Callable[[Any], Any]
) -> _Made:
    """A dataclass from plain values by the names of its fields, the inverse of ``asdict``.

    has: "a link has", for messages. partly: fields with defaults may be missing. makes: by name, what makes a field of
    its plain value, where that is not of the field's type. Raises ScheduleError for what is no mapping, for names that
    are unknown or missing, and values of another type.
    """
    own: Any = kind
    names = [field.name for field in fields(own)]
    what = has.rpartition(" ")[0]
    if not isinstance(values, Mapping):
        raise ScheduleError(f"{has} {', '.join(names)}; got {shown(values)}; save it again")
    check_known(has, values, names)
    hints = get_type_hints(kind)
    given = {}
    for field in fields(own):
        name = field.name
        if name in values:
            value = values[name]
            given[name] = makes[name](value) if name in makes else _of_type(value, hints[name], f"{name} of {what}")
        elif not partly or (field.default is MISSING and field.default_factory is MISSING):
            raise ScheduleError(f"{has} {', '.join(names)}; {name} is missing; save it again")
    made = kind(**given)  # whose own checks know more
    for name, value in given.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if type(number) in (int, float):
                check_number(number, f"{name} of {what}")
    return made


def maybe(make: Callable[[Any], _Made]) -> Callable[[Any], _Made | None]:
    """The same for what may be None."""
    return lambda value: None if value is None else make(value)


def _of_type(value: Any, hint: Any, what: str) -> Any:
    """The value, a list as a tuple where that is due. Raises ScheduleError where it is of another type."""
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
        _check(isinstance(value, hint), value, {str: "a text", bool: "true or false"}.get(hint, hint.__name__), what)
    return value


def _check(good: bool, value: Any, due: str, what: str) -> None:
    if not good:
        raise ScheduleError(f"{what} is {due}; got {shown(value)}; save it again, or correct it")
