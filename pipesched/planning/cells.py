"""Cells: numbers with units as cells of tables."""

from pipesched.units import quote_bytes, quote_time
from pipesched.viz.tables import Cell

__all__ = ["bytes_cell", "count_cell", "known_cell", "margin_cell", "share_cell", "time_cell"]


def count_cell(number: int) -> Cell:
    """Return a whole number as a cell."""
    return Cell(str(number), number)


def known_cell(number: int | None) -> Cell:
    """Return a whole number as a cell; an empty cell for None."""
    return Cell("") if number is None else count_cell(number)


def time_cell(seconds: float) -> Cell:
    """Return a time as a cell."""
    return Cell(quote_time(seconds), float(seconds))


def bytes_cell(size: float) -> Cell:
    """Return a size as a cell."""
    return Cell(quote_bytes(size, 4), float(size))


def margin_cell(size: int) -> Cell:
    """Return what is left below a limit as a cell, marked if it is negative."""
    return Cell(("-" if size < 0 else "") + quote_bytes(abs(size), 4), size, "bad" if size < 0 else "")


def share_cell(share: float) -> Cell:
    """Return a share, from 0 to 1, as a percentage."""
    return Cell(f"{share:.1%}", share)
