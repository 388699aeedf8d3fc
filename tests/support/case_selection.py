"""Case selection: chooses the cases of a parametrized test to run if not all of them run."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def spread(cases: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Return the indices of ``count`` cases, each a dict of its parameters; the first case is always chosen.

    Cases with a value that has not occurred before come first. The remaining ones are spread evenly.
    """
    values = [{(name, value if _hashable(value) else repr(value)) for name, value in case.items()} for case in cases]
    rest = sorted(range(len(cases)), key=lambda place: place * 0.618034 % 1)
    chosen: list[int] = []
    seen: set[tuple[str, Hashable]] = set()
    while rest and len(chosen) < count:
        best = max(rest, key=lambda place: len(values[place] - seen))  # the first of equals
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
