"""What a user who is new to Pipeline does first, and what it says to that."""

import pytest
from torch import nn

from pipesched.errors import ExecutionError
from tests.support.peer_cases import linears, mse, pipeline, rows

X, Y = rows(), rows(seed=2)


def test_a_trace_before_the_first_step_is_an_error_with_a_remedy():
    match = r"none has run under this plan yet; call step\(\) first, or read predicted for the simulated trace"
    with pipeline(linears(), X[:2], loss_fn=mse) as pipe:
        with pytest.raises(ExecutionError, match=match):
            _ = pipe.trace
        with pytest.raises(ExecutionError, match=match):
            pipe.gather_trace()
        assert pipe.report().measured is None
        pipe.step(X, target=Y)
        assert pipe.trace.num_microbatches == pipe.num_microbatches
        assert pipe.gather_trace() == pipe.trace
        pipe.replan(pipe.plan)
        with pytest.raises(ExecutionError, match=match):  # the steps of another plan do not count
            _ = pipe.trace


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)])
def test_a_pipeline_is_true_whatever_the_length_of_its_model(model):
    with pipeline(model, X[:2], 1, schedule="1f1b") as pipe:
        assert pipe
