"""Blocks: rows of block characters, for text timelines whose bars are too narrow for labels."""

import math
from collections import defaultdict
from collections.abc import Iterable

from pipesched.program.actions import Kind
from pipesched.viz.bars import Bar

__all__ = ["block_row", "encodable", "legend"]

_IDLE = " "
_LEAST = 1e-6  # a smaller fraction of a column is rounding


def block_row(bars: Iterable[Bar], columns: int, per_s: float) -> str:
    """Return a row in which each column is the block of a kind of action (`KindRow.block`), or blank for idle time.

    A column shows the kind, among those in the column, with the most time that no column has shown so far. So the
    shares of the kinds and of idle time in a row are right, even if bars are narrower than a column.

    Args:
        bars: the bars of one rank.
        columns: the number of columns.
        per_s: the number of columns per second.

    """
    parts: list[dict[Kind | None, float]] = [defaultdict(float) for _ in range(columns)]
    for bar in bars:
        start = bar.start_s * per_s
        end = bar.end_s * per_s
        for column in range(math.floor(start), min(columns, math.ceil(end))):
            share = min(end, column + 1) - max(start, column)
            parts[column][bar.kind] += share / 2 if bar.half else share
    owed: dict[Kind | None, float] = defaultdict(float)
    row = []
    for part in parts:
        part[None] = 1 - sum(part.values())
        for kind, share in part.items():
            owed[kind] += share
        shown = max((kind for kind, share in part.items() if share > _LEAST), key=lambda kind: owed[kind])
        owed[shown] -= 1
        row.append(_IDLE if shown is None else shown.row.block)
    return "".join(row)


def legend(kinds: Iterable[Kind]) -> str:
    """Return the meaning of the blocks of these kinds as text."""
    entries = [f"{kind.row.block} {kind.row.label or kind}" for kind in kinds]
    return ", ".join([*entries, "blank: idle"])


def encodable(text: str, encoding: str) -> str:
    """Return text that an encoding can hold: unchanged, or with a letter of its kind instead of each block."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        letters: dict[str, str | int | None] = {kind.row.block: str(kind)[0] for kind in reversed(Kind)}
        return text.translate(str.maketrans({**letters, "→": "->"})).encode(encoding, "replace").decode(encoding)
    return text
