"""Programs: reads the schedules and programs that are given to commands as names, files or Python objects."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import click

from pipesched import schedules
from pipesched.checks import shown
from pipesched.cli.options import MICROBATCHES, RANKS
from pipesched.cli.targets import imported, is_target
from pipesched.errors import ScheduleError
from pipesched.order import Schedule
from pipesched.order import schedule as schedule_of
from pipesched.program.loading import load_program
from pipesched.program.program import Program
from pipesched.program.validation import validate

__all__ = ["program_of", "read_source"]

_RULE = "SCHEDULE must be a name from `pipesched list`, a file with a program, or file.py:function"


def read_source(text: str) -> Program | Schedule:
    """Return the schedule or the program that an argument stands for.

    Args:
        text: the name of a schedule; a file with a program, or '-' for standard input; or file.py:name or module:name,
            where the object is a Schedule, a Program, a function (rank, shape) -> Order, or a function without
            arguments that returns a Schedule or a Program.

    Raises:
        ScheduleError: there is no such schedule, or the file contains no program.

    """
    if is_target(text):
        return _imported(text)
    if text == "-":
        return _standard_input()
    if not Path(text).is_file():
        return _named(text)
    try:
        return load_program(text)
    except OSError as error:
        raise click.FileError(text, error.strerror) from error


def program_of(
    text: str,
    source: Program | Schedule,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    steps: int = 1,
    chunks: int | None = None,
    **limits: Any,
) -> Program:
    """Build the program of a schedule, and validate it unless the schedule is one of pipesched's.

    Args:
        text: the argument, for messages.
        source: what the argument stands for. A Program is returned without changes.
        ranks: the number of ranks. Default: 4.
        microbatches: the number of micro-batches. Default: 8.
        steps: the number of steps of an asynchronous schedule. Default: 1.
        chunks: the number of stages on each rank. Default: the schedule's.
        limits: what `validate` must also check.

    Raises:
        ScheduleError: the schedule does not support these numbers, or the program is not valid.

    """
    program = source
    try:
        if isinstance(program, Schedule):
            options = {} if chunks is None else {"chunks_per_rank": chunks}
            program = program.program(ranks or RANKS, microbatches or MICROBATCHES, steps=steps, **options)
        if limits or is_target(text) or isinstance(source, Program):
            validate(program, **limits)
    except ScheduleError as error:
        if isinstance(source, Schedule) and not is_target(text):
            raise
        raise ScheduleError(f"{text}: {error}") from error
    return program


def _named(name: str) -> Schedule:
    try:
        return schedules.get(name)
    except ScheduleError as error:
        raise ScheduleError(f"{error}; for a schedule of your own, pass file.py:function") from None


def _standard_input() -> Program:
    try:
        with click.open_file("-", encoding="utf-8") as file:
            return Program.parse(file.read())
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"-: {error}") from error


def _imported(target: str) -> Program | Schedule:
    made = imported(target, _RULE, "my_schedule", ScheduleError)
    name = target.rpartition(":")[2]
    if callable(made) and not isinstance(made, type):
        made = _called(made, name)
    if not isinstance(made, Program | Schedule):
        raise ScheduleError(
            f"file.py:function must name a Schedule, a Program, or a function (rank, shape) -> Order; {target} is "
            f"{shown(made)}; decorate the function with @pipesched.schedule({name.replace('_', '-')!r})"
        )
    return made


def _called(function: Callable[..., Any], name: str) -> Any:
    """Return what a function without arguments returns, or the Schedule of an undecorated function."""
    try:
        signature(function).bind()
    except TypeError:
        return schedule_of(name.replace("_", "-"))(function)
    return function()
