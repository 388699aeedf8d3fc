"""Tables: rows of numbers and words, shown as plain text or, if rich is installed, in colour."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import rich.console

__all__ = ["Cell", "KeyFigure", "Table", "rich_table", "text_table"]

_Tone = Literal["", "good", "bad", "quiet", "strong"]

_STYLES: dict[_Tone, str] = {"": "", "good": "green", "bad": "red", "quiet": "dim", "strong": "bold"}


class Cell(NamedTuple):
    """One cell of a table."""

    text: str
    #: The number by which the HTML page sorts the rows; None if the cell holds words.
    value: float | None = None
    #: The style of the text: a colour or a font weight; "" for plain text.
    tone: _Tone = ""


class KeyFigure(NamedTuple):
    """A key figure on the HTML page: a value such as 14.4%, its label, such as "bubble", and a note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a title and a note."""

    title: str
    #: The header of each column.
    columns: tuple[str, ...]
    #: The rows, each with one cell for each column.
    rows: tuple[tuple[Cell, ...], ...]
    #: The columns that are aligned to the left; the others are aligned to the right.
    words: frozenset[str] = frozenset()
    #: The explanation below the table.
    note: str = ""
    #: The columns that have bars behind their numbers on the HTML page.
    bars: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        title: str,
        rows: "Sequence[dict[str, Cell]]",
        words: Sequence[str] = (),
        note: str = "",
        bars: Sequence[str] = (),
    ) -> "Table":
        """Make a table from rows of {column: cell}. Columns that are empty in every row are left out."""
        every = dict.fromkeys(name for row in rows for name in row)
        names = [name for name in every if any(name in row and row[name].text for row in rows)]
        cells = tuple(tuple(row.get(name, Cell("")) for name in names) for row in rows)
        return cls(
            title=title,
            columns=tuple(names),
            rows=cells,
            words=frozenset(words),
            note=note,
            bars=frozenset(bars),
        )


def text_table(table: Table) -> str:
    """Return the table as plain text: the title, one line for each row, and the note."""
    lines = [table.columns, *(tuple(cell.text for cell in row) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides: list[Callable[[str, int], str]] = [str.ljust if name in table.words else str.rjust for name in table.columns]
    rows = ("  ".join(side(text, wide) for side, text, wide in zip(sides, row, widths, strict=True)) for row in lines)
    return "\n".join([table.title, *(row.rstrip() for row in rows), *filter(None, [table.note])])


def rich_table(table: Table) -> "rich.console.Group":
    """Return the table as an object that rich prints in colour. Raises ImportError if rich is not installed."""
    import rich.box
    import rich.console
    import rich.table
    from rich.text import Text

    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name in table.columns:
        words = name in table.words
        made.add_column(Text(name), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell.text, style=_STYLES[cell.tone]) for cell in row))
    return rich.console.Group(Text(table.title, style="bold"), made, Text(table.note, style="dim"))
