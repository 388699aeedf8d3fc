"""While a profiler of torch records, a step enters a range for each action, with the action's name."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipesched import Pipeline
from pipesched.program.actions import Lane
from pipesched.runtime.executors import interpreter
from tests.support import places


def step_ranges(group, is_profiled):
    """Return the computations of a step in this process, and the ranges that the step entered."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.randn(4, 4)
    entered = []

    @contextmanager
    def noted(name):
        entered.append(name)
        yield

    options = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": nn.functional.mse_loss}
    with Pipeline(model, x[:2], **options, **places.place(group)) as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "record_function", noted)
        if is_profiled:
            with profile(activities=[ProfilerActivity.CPU]):
                pipe.step(x, target=x)
        else:
            pipe.step(x, target=x)
        computed = [str(span.action) for span in pipe.trace.spans if span.lane is Lane.COMPUTE]
    return computed, entered


def test_each_action_has_a_range(run):
    for computed, entered in run(2, step_ranges, True):
        assert computed
        assert set(computed) <= set(entered)


def test_without_a_profiler_a_step_enters_no_range(run):
    for computed, entered in run(2, step_ranges, False):
        assert computed
        assert not entered


def test_a_profilers_table_shows_the_ranges():
    """Of a rank that runs in the thread that profiles, as over processes."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded, interpreter.record_function("1F0"):
        torch.ones(1)
    assert "1F0" in {event.key for event in recorded.key_averages()}
