"""Compared plans: a table of the plans that a search compared, and why each was not chosen."""

from collections.abc import Sequence
from typing import Any

from pipesched.planning.alternatives import Alternative
from pipesched.planning.cells import bytes_cell, count_cell, known_cell, margin_cell, share_cell, time_cell
from pipesched.viz.tables import Cell, Table

__all__ = ["compared_plans"]

_SHAPE = (
    "replicas",
    "zero",
    "tp",
    "layout",
    "ranks",
    "chunks",
    "m",
    "checkpoint",
)  # columns that are left out if all rows have the same value
_WEIGHED = {
    "m": "m: micro-batches.",
    "predicted": "predicted: step time predicted by the search.",
    "measured": "measured: step time in trial runs.",
    "memory": "memory: highest peak of any rank.",
    "margin": "margin: memory limit minus peak.",
}

_Row = dict[str, Cell]


def compared_plans(alternatives: Sequence[Alternative]) -> Table | None:
    """Return a table of the plans that a search compared, with the reason why each was not chosen; None if empty."""
    if not alternatives:
        return None
    rows = [_alternative(other) for other in alternatives]
    if any(other.tensor_layout for other in alternatives):
        for row, other in zip(rows, alternatives, strict=True):
            row["layout"] = Cell(other.tensor_layout or ("1d" if other.tensor_size else ""))
    alike = {name: rows[0][name].text for name in _SHAPE if len({row[name].text for row in rows}) == 1}
    rows = [{name: cell for name, cell in row.items() if name not in alike} for row in rows]
    alike = {name: text for name, text in alike.items() if text}
    note = f"All plans have {', '.join(map(' '.join, alike.items()))}. " if alike else ""
    note += " ".join(said for name, said in _WEIGHED.items() if name == "m" or any(name in row for row in rows))
    return Table.of(
        "Compared plans, predicted", rows, ("plan", "schedule", "checkpoint", "why not chosen"), note, ("predicted",)
    )


def _alternative(other: Alternative) -> _Row:
    tone: Any = "bad" if not other.fits else "strong" if not other.note else ""
    row = {
        "plan": Cell(other.label, tone=tone),
        "schedule": Cell(other.schedule if other.schedule != other.label else ""),
        "replicas": known_cell(other.num_replicas),
        "zero": known_cell(other.zero),
        "tp": known_cell(other.tensor_size),
        "layout": Cell(other.tensor_layout),
        "ranks": count_cell(other.num_ranks),
        "chunks": count_cell(other.chunks_per_rank),
        "m": count_cell(other.num_microbatches),
        "checkpoint": Cell(other.checkpoint),
        "predicted": time_cell(other.step_s),
    }
    if other.measured_s is not None:
        row["measured"] = time_cell(other.measured_s)
    row["bubble"] = share_cell(other.bubble_ratio)
    if other.peak_bytes is not None:
        row["memory"] = bytes_cell(other.peak_bytes)
    if other.peak_bytes is not None and other.limit_bytes is not None:
        row["margin"] = margin_cell(other.limit_bytes - other.peak_bytes)
    row["why not chosen"] = Cell(other.note)
    return row
