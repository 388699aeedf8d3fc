"""Table cells: reads the rows of a table of layers from a CSV file or from Python, as names, seconds and bytes.

A table has one row for each layer, in execution order. `COLUMNS` lists the columns. A cell becomes the value of an
attribute of a layer: ``forward_ms`` of a table is ``forward_s`` of a layer.
"""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike
from typing import Any

from pipesched.checks import LARGEST, LARGEST_SIZE, as_list, as_path, is_whole, shown
from pipesched.errors import ScheduleError
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.tensor_split import SPLIT_COUNTS, SPLIT_SHARES, SPLIT_SIZES
from pipesched.units import as_bytes

__all__ = [
    "BETWEEN_INPUTS",
    "COLUMNS",
    "NO_INPUTS",
    "REQUIRED",
    "TEXTS",
    "Table",
    "TableRow",
    "attribute_of",
    "read_rows",
]

#: A table: rows that map column names to values, or the path of a CSV file whose first line has the column names.
Table = str | PathLike[str] | Iterable[Mapping[str, Any]]

_PER_SECOND = {"_ms": 1e3, "_us": 1e6, "_s": 1.0}
_PER_BYTE = {"_bytes": 1, "_kb": 10**3, "_mb": 10**6, "_gb": 10**9, "_kib": 2**10, "_mib": 2**20, "_gib": 2**30}
_FIGURES = tuple(name for name in LayerCosts().figures() if name != "offloads")
_TIMES = tuple(name for name in _FIGURES if name.endswith("_s"))
_SIZES = (*(name for name in _FIGURES if name.endswith("_bytes")), *SPLIT_SIZES)
_COUNTS = ("rows", "num_parameters", *SPLIT_COUNTS)
_OTHERS = ("spread", *SPLIT_SHARES)
_WEIGHTS = "product_weight_bytes"
_SYNONYMS = {"layer": "name", "parameters": "num_parameters"}
#: The columns that contain text.
TEXTS = ("name", "inputs", "tied_to")
#: The columns that every table has. Times can also be in ``_s`` or ``_us``, and sizes in ``_kb``, ``_mib`` and so on.
REQUIRED = ("name", "forward_ms", "backward_ms", "parameter_bytes", "output_bytes", "activation_bytes")
#: All columns, in the order in which they are written. A column follows the columns from which its default is computed.
COLUMNS = tuple(
    dict.fromkeys(
        (
            *("rows", *REQUIRED, "inputs", "tied_to", "weight_grad_ms", "input_grad_ms", "num_parameters"),
            *("gradient_bytes", "optimizer_bytes"),
            *(f"{name.removesuffix('_s')}_ms" for name in _TIMES),
            *(name for name in _SIZES if name != _WEIGHTS),
            *_OTHERS,
            *SPLIT_COUNTS,
            _WEIGHTS,
        )
    )
)
#: The text between two entries of a cell ``inputs``.
BETWEEN_INPUTS = "|"
#: The cell ``inputs`` of a layer that takes no output of another layer.
NO_INPUTS = "-"
_COMMENT = "#"
_RULE, _REMEDY = "a table of layers must be a list of rows, or the path of a CSV file", "pass a list of dicts"


@dataclass(frozen=True)
class TableRow:
    """A row of a table: the values of a layer's attributes, and where the row is in the table."""

    #: Such as ``line 3``.
    place: str
    #: The values of the cells that are not empty, keyed by the layer's attribute, in seconds and bytes.
    values: dict[str, Any] = field(default_factory=dict)
    #: The attributes whose cells are not valid.
    invalid: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.place} ({self.values['name']!r})" if "name" in self.values else self.place


def attribute_of(column: str) -> str | None:
    """Return the attribute of a layer that a column contains, such as ``forward_s``; None for an unknown column."""
    if column in (*TEXTS, *_COUNTS, *_OTHERS):
        return column
    for attributes, units, own in ((_TIMES, _PER_SECOND, "_s"), (_SIZES, _PER_BYTE, "_bytes")):
        for unit in units:
            if column.endswith(unit) and column.removesuffix(unit) + own in attributes:
                return column.removesuffix(unit) + own
    return None


def read_rows(table: Table, problems: list[str]) -> list[TableRow]:
    """Return the rows of a table. Adds a sentence to ``problems`` for each cell that cannot be read.

    Raises ScheduleError for a file that cannot be read, and ArgumentError for a value that is no table.
    """
    rows = []
    for place, cells in _lines(table, problems):
        row = TableRow(place)
        known = [(_column(head), cell.strip() if isinstance(cell, str) else cell) for head, cell in cells]
        for column, cell in sorted(known, key=lambda own: own[0] != "name"):  # the name first, for the problems
            if not _is_empty(cell):
                _put(row, column, cell, problems)
        rows.append(row)
    return rows


def _put(row: TableRow, column: str, cell: Any, problems: list[str]) -> None:
    """Add a cell to a row, or a sentence to ``problems``."""
    attribute = attribute_of(column)
    if attribute is None:
        near = get_close_matches(column, COLUMNS, n=1)
        problems.append(f"the unknown column {shown(column)}{f' (did you mean {near[0]}?)' if near else ''}")
    elif attribute in row.values:
        problems.append(f"two columns for {attribute}")
    else:
        value, rule = _text(attribute, cell) if attribute in TEXTS else _number(column, attribute, cell)
        if value is None:
            row.invalid.add(attribute)
            problems.append(f"{row} has the {column} {shown(cell)}, which is not {rule}")
        else:
            row.values[attribute] = value


# ---- from a file to cells -------------------------------------------------------------------------------------------


def _lines(table: Table, problems: list[str]) -> Iterator[tuple[str, Iterable[tuple[Any, Any]]]]:
    """Yield the place of each row, and its cells as (head of the column, cell)."""
    if isinstance(table, str | PathLike):
        yield from _lines_of_file(table, problems)
        return
    for method, arguments in (("to_dicts", ()), ("to_dict", ("records",))):  # a DataFrame of polars or pandas
        if hasattr(table, method) and hasattr(table, "columns"):
            table = getattr(table, method)(*arguments)
            break
    for number, line in enumerate(as_list(table, _RULE, _REMEDY), 1):
        if not isinstance(line, Mapping):
            raise ScheduleError(f"{_RULE}; row {number} is {shown(line)}; {_REMEDY}")
        yield f"row {number}", line.items()


def _lines_of_file(path: str | PathLike[str], problems: list[str]) -> Iterator[tuple[str, Iterable[tuple[Any, Any]]]]:
    """Yield the lines of a CSV file, as `_lines` does. Lines that begin with ``#`` are comments."""
    try:
        text = as_path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ScheduleError(
            f"a table of layers must be a readable CSV file; {str(path)!r} cannot be read ({reason}); check the path"
        ) from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip(" \t,;")]
    lines = [(number, line) for number, line in lines if not line.lstrip().startswith(_COMMENT)]
    separator = max(",;\t", key=lines[0][1].count) if lines else ","
    heads: list[str] = []
    for number, line in lines:
        try:
            (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
        except csv.Error as error:
            problems.append(f"line {number} is not CSV ({error})")
            continue
        if not heads:
            heads = cells
        elif len(cells) != len(heads):
            problems.append(f"line {number} has {len(cells)} cells, and the first line has {len(heads)}")
        else:
            yield f"line {number}", zip(heads, cells, strict=True)


# ---- from cells to values -------------------------------------------------------------------------------------------


def _column(head: Any) -> str:
    """Return the name of a column in lower case, with underscores: ``forward_ms`` for ``Forward (ms)``."""
    column = re.sub(r"[^a-z0-9]+", "_", str(head).lower()).strip("_")
    return _SYNONYMS.get(column, column)


def _is_empty(cell: Any) -> bool:
    """Return whether a cell is empty: None, "", or the NaN of a DataFrame."""
    return cell is None or (isinstance(cell, str) and not cell) or (isinstance(cell, float) and math.isnan(cell))


def _text(attribute: str, cell: Any) -> tuple[str | None, str]:
    """Return a cell as text, None if it is not valid, and the rule for this column."""
    if attribute == "inputs" and isinstance(cell, list | tuple):
        cell = BETWEEN_INPUTS.join(map(str, cell)) or NO_INPUTS
    text = str(cell) if isinstance(cell, str) or is_whole(cell) else ""
    if attribute != "name":
        return text or None, "the name of a row"
    valid = text.isprintable() and text[:1] not in ("", _COMMENT) and BETWEEN_INPUTS not in text and text != NO_INPUTS
    return (
        text if valid else None,
        f"a printable name that does not begin with {_COMMENT} or contain {BETWEEN_INPUTS}",
    )


def _number(column: str, attribute: str, cell: Any) -> tuple[float | int | None, str]:
    """Return a cell as a whole number, seconds or bytes, None if it is not valid, and the rule for this column."""
    number = _finite(as_bytes(cell) if column.endswith("_bytes") else cell)
    if attribute in _COUNTS:
        least = int(attribute == "rows")
        whole = number is not None and number.is_integer() and least <= number < LARGEST
        return int(number) if number is not None and whole else None, f"a whole number of at least {least}"
    if attribute in _SIZES:
        size = None if number is None else number * _unit(column, _PER_BYTE)
        return (
            round(size) if size is not None and size < LARGEST_SIZE else None,
            "a size of at least 0 and less than 2**48 bytes",
        )
    if attribute in SPLIT_SHARES:
        return number if number is not None and number <= 1 else None, "a share, a number from 0 to 1"
    value = number if number is None or attribute in _OTHERS else number / _unit(column, _PER_SECOND)
    return value if value is not None and value < LARGEST else None, "a finite number of at least 0"


def _unit(column: str, units: Mapping[str, float]) -> float:
    return next(per for unit, per in units.items() if column.endswith(unit))


def _finite(cell: Any) -> float | None:
    """Return a cell as a finite number of at least 0; None if it is none."""
    try:
        number = float("" if isinstance(cell, bool | bytes) else cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < math.inf else None
