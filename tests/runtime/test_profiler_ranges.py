"""A profiler of torch that records a step shows a range for each action, with the action's name."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipesched import Pipeline
from tests.support import places

ALL = torch.profiler._ExperimentalConfig(profile_all_threads=True)  # ranks in one process are threads


def ranges(group):
    """Return the names of the ranges of the actions of one step, of those in this process."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.randn(4, 4)
    options = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": nn.functional.mse_loss}
    with Pipeline(model, x[:2], **options, **places.place(group)) as pipe:
        pipe.step(x, target=x)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL) as recorded:
            pipe.step(x, target=x)
        computed = {str(span.action) for span in pipe.trace.spans}
    return computed, {event.key for event in recorded.key_averages()}


def test_each_computation_has_a_range_in_one_process_and_over_processes(run):
    for computed, found in run(2, ranges):
        assert computed
        assert computed <= found


def test_without_a_profiler_a_step_enters_no_range(monkeypatch):
    entered = []
    monkeypatch.setattr("pipesched.runtime.executors.interpreter.record_function", entered.append)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with Pipeline(model, x[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b") as pipe:
        pipe.step(x, target=x)
    assert not entered
