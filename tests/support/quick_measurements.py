"""Quick measurements: makes pipesched measure in fewer rounds, because few tests check the measured figures."""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from pipesched.pipeline import plan_trials
from pipesched.profiling import layer_profiler, optimizer_costs, overhead_probe, profile_model
from pipesched.runtime.stage import offloading

_EFFORT = replace(profile_model._EFFORT, rounds=2, enough_s=0.2)
_QUICK: list[tuple[ModuleType | Any, str, Any]] = [
    (layer_profiler.QUICK, "rounds", 1),
    (profile_model, "_PASSES", 1),
    (profile_model, "_EFFORT", _EFFORT),
    (profile_model, "_QUICK_EFFORT", _EFFORT),
    (optimizer_costs, "_ROUNDS", 3),
    (optimizer_costs, "_STANDS_IN_BYTES", 1 << 22),
    (overhead_probe, "_TRIES", 2),
    (overhead_probe, "_AGAIN", 1),
    (overhead_probe, "_AGAIN_ASLEEP", 1),
    (offloading, "_MEASURED_BYTES", 1 << 23),
    (plan_trials, "_ROUNDS", 2),
]
_THOROUGH = [(place, name, getattr(place, name)) for place, name, _ in _QUICK]


def measure_quickly() -> None:
    """Shorten all measurements that pipesched makes in this process."""
    _set(_QUICK)


@pytest.fixture
def thorough() -> Iterator[None]:
    """Restore the usual number of rounds, for tests that check measured figures."""
    _set(_THOROUGH)
    yield
    _set(_QUICK)


def _set(values: list[tuple[Any, str, Any]]) -> None:
    for place, name, value in values:
        object.__setattr__(place, name, value)  # also for QUICK, a frozen dataclass that is a default argument
