"""Warnings point at the user's line, however deep in pipesched they are made."""

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pipesched
from pipesched import Pipeline

X = torch.randn(4, 8)
ONE = {"batch_size": 4, "num_microbatches": 1}


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Decides whether measured times are plausible ("") or why not, however busy the machine is."""

    def judge(why: str) -> None:
        monkeypatch.setattr("pipesched.profiling.layer_profiler.doubt", lambda *_: why)
        monkeypatch.setattr("pipesched.profiling.profile_model.doubt_of_sum", lambda *_: "")

    return judge


def makes() -> None:
    Pipeline(normed(), X, devices=["cpu"] * 2, boundaries=[2], schedule="1f1b").close()


def tunes() -> None:
    """One micro-batch gains nothing from several devices, whatever the measured times of its layers are."""
    pipesched.tune(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), X, devices=["cpu"] * 2, confirm=0, **ONE)


@pytest.mark.parametrize("call", [makes, tunes])
def test_a_warning_points_at_the_line_that_called(call: Callable[[], None], judged: Callable[[str], None]) -> None:
    judged("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    source, first = inspect.getsourcelines(call)
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, first + len(source) - 1)]


def profiles() -> None:
    pipesched.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), X)


def test_a_warning_about_measured_times_points_at_the_line_that_called(judged: Callable[[str], None]) -> None:
    """Times are measured in another thread."""
    judged("it took long")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profiles()
    source, first = inspect.getsourcelines(profiles)
    assert {"it took long" in str(one.message) for one in caught} == {True}
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, first + len(source) - 1)}
