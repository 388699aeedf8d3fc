"""Machine code of the search: made only if it pays, kept on the disk if there is room, and never needed."""

import functools
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipesched import Costs, schedules
from pipesched.program.search import annealing, compiled, search
from pipesched.program.search.compiled import MACHINE_CODE

TIMES = (1.0, 1.5, 0.7, 1.2)
COSTS = replace(Costs.uniform(4), forward_s=TIMES, input_grad_s=TIMES)


class Numba:
    """Stands for numba: "compiles" functions into the same functions, and counts them."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.place: str | None = None
        self.caches, self.error = True, None

    def njit(self, **options: Any) -> Any:
        if options.get("cache") and not self.caches:
            raise RuntimeError("cannot cache function '_anneal': no locator available")

        def make(function: Any) -> Any:
            @functools.wraps(function)
            def machine(*args: Any) -> Any:
                if self.error is not None:
                    raise self.error
                return function(*args)

            self.made.append(options)
            machine.stats = SimpleNamespace(cache_path=self.place)
            return machine

        return make


@pytest.fixture
def numba(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Numba, as if it were installed, and nothing compiled yet."""
    found = Numba()
    monkeypatch.setattr(compiled.importlib, "import_module", lambda _: found)
    for name, value in (("_may_be_used", True), ("_spent_s", 0.0), ("_machine", {}), ("is_used", False)):
        monkeypatch.setattr(MACHINE_CODE, name, value)
    yield found
    if MACHINE_CODE.is_used:
        MACHINE_CODE._use(False)


def orders(effort: float = 0.02) -> Any:
    return schedules.get("searched").with_options(costs=COSTS, effort=effort).program(4, 4).orders


def test_a_short_search_compiles_nothing(numba: Numba) -> None:
    assert orders()
    assert not MACHINE_CODE.is_used


def test_searches_that_took_long_together_are_compiled_with_the_same_result(numba: Numba) -> None:
    plain, function = orders(), annealing._anneal
    MACHINE_CODE._spent_s = compiled._REPAID_S
    assert orders() == plain
    assert MACHINE_CODE.is_used
    assert annealing._anneal is not function
    assert search.evaluate.__wrapped__ in MACHINE_CODE._functions
    assert all(options["cache"] for options in numba.made)


def test_one_long_search_is_compiled(numba: Numba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_REPAID_S", 0.3)
    assert orders(0.02)
    assert MACHINE_CODE.is_used  # the search is expected to take up to 0.4 s


def test_machine_code_on_the_disk_is_used_at_once_unless_it_is_old(numba: Numba, tmp_path: Any) -> None:
    numba.place = str(tmp_path)
    for name in compiled._LONG:
        (tmp_path / f"{name}-104.py311.nbi").touch()
    orders()
    assert MACHINE_CODE.is_used
    MACHINE_CODE._use(False)
    os.utime(tmp_path / f"{compiled._LONG[0]}-104.py311.nbi", (0, 0))
    orders()
    assert not MACHINE_CODE.is_used


def test_without_a_place_for_its_cache_the_machine_code_is_used_all_the_same(numba: Numba) -> None:
    plain = orders()
    numba.caches = False
    MACHINE_CODE._machine.clear()
    MACHINE_CODE._spent_s = compiled._REPAID_S
    assert orders() == plain
    assert MACHINE_CODE.is_used
    assert not any("cache" in options for options in numba.made[-len(MACHINE_CODE._functions) :])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("of the compiler")])
def test_a_compiler_that_fails_is_not_needed(numba: Numba, error: Exception) -> None:
    plain, function = orders(), annealing._anneal
    MACHINE_CODE._spent_s = compiled._REPAID_S
    numba.error = error
    assert orders() == plain
    assert not MACHINE_CODE.is_used
    assert annealing._anneal is function
    numba.error = None
    assert orders() == plain
    assert not MACHINE_CODE.is_used  # it is not tried again
