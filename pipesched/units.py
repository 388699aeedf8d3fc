"""Units: formats times, sizes and counts as short text in a suitable unit."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = [
    "Unit",
    "and_more",
    "as_bytes",
    "byte_unit",
    "counted",
    "parse_bytes",
    "quote_bytes",
    "quote_count",
    "quote_speed",
    "quote_time",
    "time_unit",
]


class Unit(NamedTuple):
    """A unit of time or size: the name of the unit, and the number of units in one second or one byte."""

    name: str
    per_one: float


_TIMES = (Unit("s", 1), Unit("ms", 1e3), Unit("us", 1e6))
_SIZES = (Unit("GiB", 2**-30), Unit("MiB", 2**-20), Unit("KiB", 2**-10), Unit("B", 1))


def _largest(units: tuple[Unit, ...], value: float) -> Unit:
    """Return the largest unit in which ``value`` is at least 1, or the unit without a prefix if ``value`` is 0."""
    plain = next(unit for unit in units if unit.per_one == 1)
    return next((unit for unit in units if value * unit.per_one >= 1), units[-1] if value else plain)


def time_unit(seconds: float) -> Unit:
    """Return the unit (s, ms or us) for times whose maximum is ``seconds``."""
    return _largest(_TIMES, seconds)


def byte_unit(size: float) -> Unit:
    """Return the unit (B, KiB, MiB or GiB) for sizes whose maximum is ``size`` bytes."""
    return _largest(_SIZES, size)


def quote_time(seconds: float) -> str:
    """Format a time in a suitable unit, with at most four digits, such as ``1.25 ms``."""
    return _quoted(seconds, time_unit(seconds), 4)


def quote_bytes(size: float, digits: int = 3) -> str:
    """Format a size in bytes in a suitable unit, with at most ``digits`` digits, such as ``1.5 MiB``."""
    return _quoted(size, byte_unit(size), digits)


def _quoted(value: float, unit: Unit, digits: int) -> str:
    number = float(value) * unit.per_one
    return f"{number:.0f} {unit.name}" if number >= 10**digits - 0.5 else f"{number:.{digits}g} {unit.name}"


def counted(count: int, what: str) -> str:
    """Format a count with a noun, in the plural where needed: ``1 rank``, ``2 micro-batches``, ``2 copies``."""
    if count != 1 and what.endswith("y"):
        return f"{count} {what[:-1]}ies"
    many = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{many}"


def and_more(names: Sequence[object]) -> str:
    """Return the first name, quoted, and the number of other names, such as ``'0'`` or ``'0' and 3 more``."""
    return f"{names[0]!r} and {len(names) - 1} more" if len(names) > 1 else f"{names[0]!r}"


def parse_bytes(text: str) -> int | None:
    """Convert a size such as ``16GB``, ``16 GiB`` or ``2e9`` to bytes: GB is 10**9 and GiB 2**30. None: not a size."""
    match = re.fullmatch(
        r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d\d?)?) *(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE | re.ASCII
    )
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(Fraction(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))


def as_bytes(size: Any) -> Any:
    """Convert a size that is given as text to bytes. Other values, and text that is not a size, are returned as is."""
    parsed = parse_bytes(size) if isinstance(size, str) else None
    return size if parsed is None else parsed


def quote_count(count: int) -> str:
    """Format a count in at most three digits, with k, M or B for thousands, millions or billions."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def quote_speed(ratio: float) -> str:
    """Format a speed-up (old time / new time) in words, such as ``1.38x faster`` or ``2.00x slower``."""
    faster = ratio >= 1
    times = ratio if faster else 1 / ratio
    if times < 1.0005:
        return "as fast"
    digits = f"{times:.3f}" if times < 1.01 else f"{times:.2f}" if times < 9.995 else f"{times:.3g}"
    return f"{digits}x {'faster' if faster else 'slower'}"
