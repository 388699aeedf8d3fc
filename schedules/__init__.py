"""The schedules of the field, one file each. A module that lies here is found by itself.

So are those of installed packages: the entry points of the group ``pipesched.schedules``, each the name of a Schedule
or of a module that holds some. In the package's pyproject.toml:

    [project.entry-points."pipesched.schedules"]
    mine = "my_package.schedules"
"""

import difflib
import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from pipesched.checks import shown
from pipesched.errors import ScheduleError
from pipesched.order import Schedule

__all__ = ["get", "names"]

_GROUP = "pipesched.schedules"


@cache
def _found() -> dict[str, Schedule]:
    found: dict[str, Schedule] = {}
    for value in (*_own(), *_installed()):
        taken = found.setdefault(value.name, value)
        if taken is not value:
            raise ScheduleError(
                f"a schedule's name is its own; {value.name!r} of {value.module} is taken by {taken.module}; rename one"
            )
    return dict(sorted(found.items()))


def _own() -> Iterator[Schedule]:
    for info in pkgutil.iter_modules(__path__):
        yield from _held_by(importlib.import_module(f"{__name__}.{info.name}"))


def _installed() -> Iterator[Schedule]:
    for entry in entry_points(group=_GROUP):
        value = _loaded(entry)
        schedules = [value] if isinstance(value, Schedule) else _held_by(value)
        if not schedules:
            raise ScheduleError(
                f"an entry point of {_GROUP!r} names a Schedule or a module that holds some; {_place(entry)} is "
                f"{value!r}; decorate its function with @pipesched.schedule, or correct the package"
            )
        yield from schedules


def _held_by(value: object) -> list[Schedule]:
    held = vars(value).values() if isinstance(value, ModuleType) else ()
    return [each for each in held if isinstance(each, Schedule)]


def _loaded(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:  # whatever a package of others raises
        raise ScheduleError(
            f"an entry point of {_GROUP!r} can be imported; {_place(entry)} raises {type(error).__name__}: {error}; "
            f"repair or uninstall the package"
        ) from error


def _place(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    return f"'{entry.name} = {entry.value}' of {package}"


def names(*, sliced: bool = False) -> list[str]:
    """The names of all schedules, sorted; those that run token slices, which not every model can, only if ``sliced``.

    Raises ScheduleError where two have one name or a package's are broken.
    """
    return [name for name, each in _found().items() if sliced or "slices_per_microbatch" not in each.options]


def get(name: str) -> Schedule:
    """The schedule of this name. Raises ScheduleError listing the known ones."""
    found = _found()
    if not isinstance(name, str) or name not in found:
        near = difflib.get_close_matches(name, found, 1, 0.5) if isinstance(name, str) else []
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ScheduleError(f"unknown schedule; got {shown(name)}; choose one of: {', '.join(names())}{hint}")
    return found[name]
