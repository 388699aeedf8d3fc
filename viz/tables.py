"""Tables: figures in rows, as plain values, and how they look as text and, where rich is there, in colour."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import rich.console

__all__ = ["Cell", "Table", "rich_table", "text_table"]

_Tone = Literal["", "good", "bad", "quiet", "strong"]

_STYLES: dict[_Tone, str] = {"": "", "good": "green", "bad": "red", "quiet": "dim", "strong": "bold"}


class Cell(NamedTuple):
    """What is written, the number that it stands for (by which a page sorts; None for words), and how it is meant."""

    text: str
    value: float | None = None
    tone: _Tone = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table. columns: their heads. rows: as many cells each. words: the columns that are written to the left,
    all others to the right. bars: those that a page draws as bars, too. note: what is to be known below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: frozenset[str] = frozenset()
    note: str = ""
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
        """The table of rows that name their cells; columns that are empty in all of them are left out."""
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
    """The table in plain text: its title, a line a row, its note."""
    lines = [table.columns, *(tuple(cell.text for cell in row) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides: list[Callable[[str, int], str]] = [str.ljust if name in table.words else str.rjust for name in table.columns]
    rows = ("  ".join(side(text, wide) for side, text, wide in zip(sides, row, widths, strict=True)) for row in lines)
    return "\n".join([table.title, *(row.rstrip() for row in rows), *filter(None, [table.note])])


def rich_table(table: Table) -> "rich.console.Group":
    """The table for a terminal that shows colours; needs rich."""
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
