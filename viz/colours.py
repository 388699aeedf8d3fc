"""Colours: shades of the colour of a kind of action (`KindRow.colour`), and one colour for each stage.

The colours are from the colour-blind-safe palette of Okabe and Ito (2008). Those of compute actions are light, so that
dark numbers on them are readable. The later chunks of a rank have
lighter shades.
"""

from pipesched.program.actions import Kind

__all__ = ["BUBBLE", "GREY", "HATCH", "INK", "colour", "lighter", "stage_colour", "towards_white"]

INK = "#1a1a1a"  # numbers in bars
GREY = "#808080"  # shades of chunks in the legend
BUBBLE = "#e6e6e6"
HATCH = "#c2c2c2"

_LIGHTEST = 0.55  # fraction of white in the last chunk's colour


def colour(kind: Kind, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return the colour of a kind as ``#rrggbb``, lighter for later chunks; grey for kinds without a colour."""
    return lighter(kind.row.colour or GREY, chunk, num_chunks)


def lighter(base: str, chunk: int, num_chunks: int) -> str:
    """Return the colour ``base``, mixed with more white for later chunks and unchanged for chunk 0."""
    return towards_white(base, _LIGHTEST * chunk / max(1, num_chunks - 1))


def towards_white(base: str, share: float) -> str:
    """Return the colour ``base`` mixed with white. ``share`` is the fraction of white, from 0 (unchanged) to 1."""
    parts = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


_STAGES = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#0072b2")


def stage_colour(stage: int) -> str:
    """Return the colour of a stage as ``#rrggbb``; the colours repeat after six stages."""
    return _STAGES[stage % len(_STAGES)]
