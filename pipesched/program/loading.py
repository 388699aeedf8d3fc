"""Loading: reads programs from files, in pipesched's text form or in the CSV form of torch.distributed.pipelining."""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike

from pipesched.checks import as_path, shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Orders
from pipesched.program.actions import Action, Kind, Lane
from pipesched.program.program import Program

__all__ = ["load_program"]

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
#: The kind of each name that a table may contain: PyTorch's long names, and the short names.
_NAMES = {
    "FORWARD": Kind.F,
    "FULL_BACKWARD": Kind.B,
    "BACKWARD_INPUT": Kind.I,
    "BACKWARD_WEIGHT": Kind.W,
} | {str(kind): kind for kind in Kind if kind.row.lane is Lane.COMPUTE}
_NOT_OURS = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"}
_Place = tuple[int, int, Action]  # row and column, both counted from 1, and the action


def load_program(path: str | PathLike[str]) -> Program:
    """Read a program from a file that contains ``str(program)``, or from a .csv table of actions.

    A table has one row per rank and one action per cell, such as ``2F0``; empty cells and empty lines are skipped. A
    stage is placed on the rank whose row contains its actions. The largest micro-batch number determines the number of
    micro-batches. A table with only F actions is a forward-only program. ``torch.distributed.pipelining`` writes such
    tables with ``format="compute_only"``. Cells with communication or sharding actions are errors; call `lower` to
    add communication. Overlapped pairs such as ``(0F1;1B0)OVERLAP_F_B`` are also errors.

    The program is not validated; call `validate` for that.

    Args:
        path: the file. If its content does not name the program, the file name without the suffix becomes the name.

    Returns:
        The program.

    Raises:
        ScheduleError: the content cannot be parsed. The error names the file and the line, or the row and the column.
        OSError: the file cannot be read.

    """
    path = as_path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # "-sig": spreadsheets write a byte order mark
        if path.suffix.lower() == ".csv":
            return _table(list(csv.reader(text.splitlines())), path.stem)
        program = Program.parse(text)
    except (ScheduleError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: {error}") from error
    return program if program.name else replace(program, name=path.stem)


def _table(lines: list[list[str]], name: str) -> Program:
    rows = [_row(cells, number) for number, cells in enumerate(lines, 1) if cells]
    placement = _placement(rows)
    orders = Orders.of([action for *_, action in row] for row in rows)
    actions = [action for order in orders for action in order]
    return Program(
        orders,
        placement,
        num_microbatches=1 + max(action.microbatch for action in actions),
        forward_only=all(action.kind is Kind.F for action in actions),
        name=name,
    )


def _row(cells: Iterable[str], row: int) -> list[_Place]:
    words = ((column, cell.strip()) for column, cell in enumerate(cells, 1))
    return [(row, column, _action(word, row, column)) for column, word in words if word]


def _action(cell: str, row: int, column: int) -> Action:
    match = _CELL.fullmatch(cell)
    kind = match[2] if match else ""
    if kind in _NOT_OURS or "SEND" in cell or "RECV" in cell:
        problem = "a communication or sharding action"
        remedy = 'leave out such actions, as _dump_csv(file, format="compute_only") does'
    elif cell.startswith("("):
        problem = "two actions that run at once"
        remedy = "write the two actions into separate cells"
    elif match and match[3] and kind in _NAMES:
        return Action(int(match[1]), _NAMES[kind], int(match[3]))
    else:
        raise ScheduleError(
            f"row {row}, column {column}: a cell must be empty or <stage><kind><micro-batch>, such as 2F0; got "
            f"{shown(cell)}; use one of the kinds {', '.join(_NAMES)}"
        )
    raise ScheduleError(f"row {row}, column {column}: a cell must not contain {problem}; got {shown(cell)}; {remedy}")


def _placement(rows: Iterable[list[_Place]]) -> tuple[int, ...]:
    """Return the rank of each stage: the index of the table row that contains the stage's actions."""
    first: dict[int, tuple[int, int, int]] = {}  # stage -> rank, row, column
    for rank, cells in enumerate(rows):
        for row, column, action in cells:
            holder, other_row, other_column = first.setdefault(action.stage, (rank, row, column))
            if holder != rank:
                raise ScheduleError(
                    f"row {row}, column {column}: a stage must be on one rank, and each row is a rank; {action} "
                    f"belongs to stage {action.stage}, as does the action in row {other_row}, column {other_column}; "
                    f"write all actions of this stage into one row"
                )
    if not first:
        raise ScheduleError(
            "a table must have at least one action; all cells are empty; write a row for each rank, such as 0F0,0B0"
        )
    missing = next((stage for stage in range(max(first)) if stage not in first), None)
    if missing is not None:
        rank, row, column = first[max(first)]
        raise ScheduleError(
            f"row {row}, column {column}: stages must be numbered from 0 without a gap; this action belongs to stage "
            f"{max(first)}, but no action belongs to stage {missing}; add the actions of stage {missing}, or renumber "
            f"the stages"
        )
    return tuple(first[stage][0] for stage in range(len(first)))
