"""Quick searches: makes searches for plans simulate fewer actions, because few tests need the best plan."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipesched.pipeline import tune
from pipesched.planning import axes_search, profile_search, search_request

EFFORT = 30_000

_DEFAULTS = search_request.SearchRequest.__init__.__defaults__ or ()
_QUICK: list[tuple[Any, str, Any]] = [
    (
        search_request.SearchRequest.__init__,
        "__defaults__",
        tuple(EFFORT if value is search_request.EFFORT else value for value in _DEFAULTS),
    ),
    (profile_search, "EFFORT", EFFORT),
    (axes_search, "_EFFORT", 3 * EFFORT),
    (tune, "_EFFORT_WITH_TRIALS", EFFORT),
]
_WHOLE = [(place, name, getattr(place, name)) for place, name, _ in _QUICK]


def search_quickly() -> None:
    """Shorten all searches of this process whose effort is not given."""
    _set(_QUICK)


@pytest.fixture
def whole_searches() -> Iterator[None]:
    """Restore the usual effort, for tests of how good a plan is."""
    _set(_WHOLE)
    yield
    _set(_QUICK)


def _set(values: list[tuple[Any, str, Any]]) -> None:
    for place, name, value in values:
        setattr(place, name, value)
