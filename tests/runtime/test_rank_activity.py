"""Rank activity: the code in which a rank's thread is shows whether it works or waits."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pipesched.program import actions
from pipesched.runtime.coordination.rank_activity import Activity, blamed
from pipesched.runtime.executors import interpreter, processes
from pipesched.runtime.reductions import collective_lane
from pipesched.runtime.stage import split_backward, stage_optimizer
from pipesched.runtime.transport import channels


def activity_in(monkeypatch: pytest.MonkeyPatch, *files: str) -> Activity:
    """Return the activity of a rank whose thread is in these files, the innermost first."""
    frame = None
    for file in reversed(files):
        code = SimpleNamespace(co_filename=file, co_name="run")
        frame = SimpleNamespace(f_code=code, f_lineno=1, f_back=frame)
    activity = Activity(["rank 0"])
    monkeypatch.setattr(sys, "_current_frames", lambda: {activity._thread: frame})
    return activity


@pytest.mark.parametrize("module", [actions, channels, collective_lane, interpreter, processes])
def test_a_rank_that_reports_a_failed_wait_is_not_to_blame(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Its action has taken the whole timeout, but it has only waited for another rank."""
    activity = activity_in(monkeypatch, str(module.__file__), str(interpreter.__file__))
    state = activity.state()._replace(seconds=5.1)
    assert state.doing == "waits"
    assert blamed({"rank 0": state}, timeout_s=5) is None


@pytest.mark.parametrize("file", ["train.py", str(split_backward.__file__)])
def test_a_rank_in_a_layer_works(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    state = activity_in(monkeypatch, file, str(interpreter.__file__)).state()._replace(seconds=5.1)
    assert state.doing == "works"
    assert blamed({"rank 0": state}, timeout_s=5) is not None


def test_a_signal_handler_that_interrupts_a_wait_works(monkeypatch: pytest.MonkeyPatch) -> None:
    state = activity_in(monkeypatch, "train.py", str(channels.__file__), str(interpreter.__file__)).state()
    assert (state.doing, state.place) == ("works", "train.py:1 in run")


def test_a_rank_that_releases_a_failed_run_is_not_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next call begins, the alarm sees the activity in which the call failed."""
    activity = activity_in(monkeypatch, str(stage_optimizer.__file__))
    activity.begin("a step")
    activity.fail("waits", "a connection was lost")
    assert activity.state()[:3] == ("waits", "a step", "")
    activity.end()
    assert activity.state()[:2] == ("works", "")


def test_a_rank_that_has_raised_is_to_blame_before_it_reports_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = activity_in(monkeypatch, str(stage_optimizer.__file__))
    activity.begin("a step")
    activity.fail("raised", "ValueError: a fault")
    assert blamed({"rank 0": activity.state()}, timeout_s=5) == (["rank 0"], "ValueError: a fault")
