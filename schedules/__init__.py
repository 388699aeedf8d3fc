"""The schedules, one per file. All schedules in this folder are registered automatically.

The schedules' docstrings use p for the number of ranks, m for the number of micro-batches and v for the number of
chunks per rank. F, B, I and W are the times of a forward, a full backward, the input gradients and the weight gradients
on a rank; f, b, i and w are these times for one chunk. F&B is the time of an overlapping forward and backward. The
bubble is the idle time of a rank in a step; the span bubble is the part of the bubble between the start of the rank's
first action and the end of its last action.

Installed packages can add schedules through entry points in the group ``pipesched.schedules``. Each entry point names a
Schedule or a module that contains Schedules. For example, in the package's pyproject.toml:

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
def _registered() -> dict[str, Schedule]:
    """Return all schedules, keyed and sorted by lower-case name. Raises ScheduleError if two names are equal."""
    registered: dict[str, Schedule] = {}
    for schedule in (*_built_in(), *_installed()):
        taken = registered.setdefault(schedule.name.lower(), schedule)
        if taken is not schedule:
            raise ScheduleError(
                f"schedule names must be unique (case is ignored); {schedule.name!r} of "
                f"{schedule.module} is already used by {taken.module}; rename one of them"
            )
    return dict(sorted(_with_starts(registered).items()))


def _with_starts(registered: dict[str, Schedule]) -> dict[str, Schedule]:
    """Return the schedules, with the option ``starts`` set to all schedules that do not have this option."""
    starts = _Starts(schedule for _, schedule in sorted(registered.items()) if "starts" not in schedule.options)
    return {
        name: schedule if schedule in starts else schedule.with_options(starts=starts)
        for name, schedule in registered.items()
    }


class _Starts(tuple[Schedule, ...]):
    """The value of the option ``starts`` of a schedule: the schedules from which its search starts.

    The repr is short, because lists of a schedule's options show the repr.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "<all other schedules>"


def _built_in() -> Iterator[Schedule]:
    for info in pkgutil.iter_modules(__path__):
        yield from _held_by(importlib.import_module(f"{__name__}.{info.name}"))


def _installed() -> Iterator[Schedule]:
    for entry in entry_points(group=_GROUP):
        value = _loaded(entry)
        schedules = [value] if isinstance(value, Schedule) else _held_by(value)
        if not schedules:
            raise ScheduleError(
                f"an entry point of {_GROUP!r} must name a Schedule or a module with Schedules; {_place(entry)} is "
                f"{value!r}; decorate the schedule's function with @pipesched.schedule, or correct the package"
            )
        yield from schedules


def _held_by(value: object) -> list[Schedule]:
    held = vars(value).values() if isinstance(value, ModuleType) else ()
    return [schedule for schedule in held if isinstance(schedule, Schedule)]


def _loaded(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:  # a third-party package can raise any exception
        raise ScheduleError(
            f"an entry point of {_GROUP!r} must be importable; {_place(entry)} raises {type(error).__name__}: {error}; "
            f"repair or uninstall the package"
        ) from error


def _place(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    return f"'{entry.name} = {entry.value}' of {package}"


def names(*, sliced: bool = False) -> list[str]:
    """List the names of all schedules, sorted.

    Args:
        sliced: whether to include schedules that cut micro-batches into token slices. The programs of such schedules
            can be drawn and simulated, but not run. Default: False.

    Raises:
        ScheduleError: if two schedules have the same name, or an installed package's entry point is broken.

    """
    schedules = _registered().values()
    return [schedule.name for schedule in schedules if sliced or "slices_per_microbatch" not in schedule.options]


def get(name: str) -> Schedule:
    """Return the schedule with this name, ignoring case: "1f1b" and "1F1B" are the same schedule.

    Raises:
        ScheduleError: if no schedule has this name. The message lists the known names.

    """
    registered = _registered()
    key = name.lower() if isinstance(name, str) else ""
    if key not in registered:
        near = difflib.get_close_matches(key, registered, 1, 0.5)
        hint = f"; the nearest is {registered[near[0]].name!r}" if near else ""
        raise ScheduleError(f"unknown schedule; got {shown(name)}; choose one of: {', '.join(names())}{hint}")
    return registered[key]
