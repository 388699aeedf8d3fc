"""Case selection: chooses some cases of a parametrized test, so that their parameters take many values."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def spread(cases: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Choose ``count`` cases, the first of them always, and return their indices. A case is a dict of its parameters.

    Each choice adds as many new parameter values as possible. Once all values have occurred, the remaining choices are
    spread evenly over the cases.
    """
    values = [{(name, value if _hashable(value) else repr(value)) for name, value in case.items()} for case in cases]
    rest = sorted(range(len(cases)), key=lambda place: place * 0.618034 % 1)
    chosen: list[int] = []
    seen: set[tuple[str, Hashable]] = set()
    while rest and len(chosen) < count:
        best = max(rest, key=lambda place: len(values[place] - seen))  # of several best cases, the first
        if values[best] <= seen:
            return chosen + rest[: count - len(chosen)]
        rest.remove(best)
        chosen.append(best)
        seen |= values[best]
    return chosen


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
