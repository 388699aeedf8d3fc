"""The schedules of the field, one file each. A module that lies here is found by itself."""

import importlib
import pkgutil
from functools import cache

from pipesched.errors import ScheduleError
from pipesched.order import Schedule

__all__ = ["get", "names"]


@cache
def _found() -> dict[str, Schedule]:
    found: dict[str, Schedule] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, Schedule):
                taken = found.setdefault(value.name, value)
                if taken is not value:
                    raise ScheduleError(
                        f"a schedule's name is its own; {value.name!r} of {value.module} "
                        f"is taken by {taken.module}; rename one"
                    )
    return dict(sorted(found.items()))


def names() -> list[str]:
    """The names of all schedules, sorted."""
    return list(_found())


def get(name: str) -> Schedule:
    """The schedule of this name. Raises ScheduleError listing the known ones."""
    if name not in _found():
        raise ScheduleError(f"unknown schedule; got {name!r}; choose one of: {', '.join(names())}")
    return _found()[name]
