"""Rank activity: the code in which a rank's thread is shows whether it works or waits."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pipesched.program import actions
from pipesched.runtime.coordination.rank_activity import Activity, blamed
from pipesched.runtime.executors import interpreter
from pipesched.runtime.stage import split_backward


def activity_in(monkeypatch: pytest.MonkeyPatch, *files: str) -> Activity:
    """Return the activity of a rank whose thread is in these files, the innermost first."""
    frame = None
    for file in reversed(files):
        code = SimpleNamespace(co_filename=file, co_name="run")
        frame = SimpleNamespace(f_code=code, f_lineno=1, f_back=frame)
    activity = Activity(["rank 0"])
    monkeypatch.setattr(sys, "_current_frames", lambda: {activity._thread: frame})
    return activity


@pytest.mark.parametrize("module", [actions, interpreter])
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
