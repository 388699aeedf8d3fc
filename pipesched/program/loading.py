"""Loading: programs that were written down, as our text form or as the CSV of torch.distributed.pipelining."""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike

from pipesched.checks import as_path, shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Orders
from pipesched.program.actions import KINDS, Action, Kind, Lane
from pipesched.program.program import Program

__all__ = ["load_program"]

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
#: The long names of PyTorch's kinds; the short ones are ours.
_NAMES = {
    "FORWARD": Kind.F,
    "FULL_BACKWARD": Kind.B,
    "BACKWARD_INPUT": Kind.I,
    "BACKWARD_WEIGHT": Kind.W,
} | {str(kind): kind for kind, row in KINDS.items() if row.lane is Lane.COMPUTE}
_NOT_OURS = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"}
_Place = tuple[int, int, Action]  # row and column, both from 1


def load_program(path: str | PathLike[str]) -> Program:
    """Read a program from a file: what ``str(program)`` writes or, where its name ends in .csv, a table.

    In a table each row is a rank and each cell an action, ``2F0``; empty cells are idle time, empty lines do not count.
    A stage lies on the rank whose row names it; there are as many micro-batches as the cells count; cells that are
    all F make a program that is forward only. ``torch.distributed.pipelining`` writes such tables (its
    ``format="compute_only"``). Cells for communication or sharding are refused, not skipped: what runs is what is
    written, and communication is added by ``lower``. An overlapped pair, ``(0F1;1B0)OVERLAP_F_B``, is refused too.

    A program without a name of its own is named as the file without its suffix. Raises ScheduleError with file, row
    and column, or line; OSError where the file cannot be read. Whether the program is valid, ``validate`` says.
    """
    path = as_path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark at the start
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
        what = "communicate or shard"
        remedy = 'leave them out, as _dump_csv(file, format="compute_only") does'
    elif cell.startswith("("):
        what = "run two actions at once"
        remedy = "write the two into cells of their own, one after the other"
    elif match and match[3] and kind in _NAMES:
        return Action(int(match[1]), _NAMES[kind], int(match[3]))
    else:
        raise ScheduleError(
            f"row {row}, column {column}: a cell is empty or <stage><kind><micro-batch>, such as 2F0; "
            f"got {shown(cell)}; kinds: {', '.join(_NAMES)}"
        )
    raise ScheduleError(f"row {row}, column {column}: cells do not {what}; got {shown(cell)}; {remedy}")


def _placement(rows: Iterable[list[_Place]]) -> tuple[int, ...]:
    """Stage -> rank: the row that names the stage."""
    first: dict[int, tuple[int, int, int]] = {}  # stage -> rank, row, column
    for rank, cells in enumerate(rows):
        for row, column, action in cells:
            holder, other_row, other_column = first.setdefault(action.stage, (rank, row, column))
            if holder != rank:
                raise ScheduleError(
                    f"row {row}, column {column}: a stage lies on one rank, and each row is a rank; {action} is of "
                    f"stage {action.stage}, which row {other_row}, column {other_column} names too; move one of them"
                )
    if not first:
        raise ScheduleError("a table has at least one action; all cells are empty; write a row for each rank: 0F0,0B0")
    missing = next((stage for stage in range(max(first)) if stage not in first), None)
    if missing is not None:
        rank, row, column = first[max(first)]
        raise ScheduleError(
            f"row {row}, column {column}: stages are numbered from 0 without a gap; stage {max(first)} is here, but no "
            f"row names stage {missing}; add its actions or renumber"
        )
    return tuple(first[stage][0] for stage in range(len(first)))
