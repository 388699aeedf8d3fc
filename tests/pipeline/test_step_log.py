import re
from collections import defaultdict

import pytest
import torch
from torch import nn

from pipesched import Pipeline, StepLog
from pipesched.errors import InputError
from pipesched.pipeline.step_log import StepFigures
from tests.support import added_losses

X = torch.ones(8, 4)


class Writer:
    def __init__(self):
        self.scalars = defaultdict(dict)

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars[tag][global_step] = scalar_value


def pipeline(**options):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return Pipeline(
        model,
        X[:2],
        loss_fn=nn.functional.mse_loss,
        devices=["cpu"] * 2,
        **{"num_microbatches": 4, "schedule": "1f1b", **options},
    )


def test_a_line_says_what_a_step_took():
    figures = StepFigures(
        step=7, step_s=0.839, bubble_ratio=0.182, busy=(0.8, 0.836), loss=2.3125, predicted_s=0.812, whole_s=1.02
    )
    assert str(figures) == (
        "step 7: loss 2.312, 839 ms (+3.3% compared to 812 ms predicted), one step every 1.02 s, bubble 18.2%, "
        "busy 80% 84%"
    )
    figures = StepFigures(
        step=1, step_s=0.5, bubble_ratio=0.0, busy=(1.0,), loss=2.0, metrics={"balance": 0.0125, "accuracy": 0.5}
    )
    assert str(figures) == "step 1: loss 2, balance 0.0125, accuracy 0.5, 500 ms, bubble 0.0%, busy 100%"
    figures = StepFigures(step=0, step_s=0.5, bubble_ratio=0.0, busy=(1.0,))
    assert str(figures) == "step 0: 500 ms, bubble 0.0%, busy 100%"


def test_tokens_per_second_are_those_of_whole_steps():
    lines = []
    with pipeline() as pipe:
        log = StepLog(pipe, tokens=1000, show=lines.append)
        first, second = (log(pipe.step(X, target=X)) for _ in range(2))
        assert first.tokens_per_s is None
        assert second.tokens_per_s == 1000 / second.whole_s
        assert f", {second.tokens_per_s:,.0f} tokens/s, bubble" in lines[1]
        assert second.scalars["pipesched/tokens_per_s"] == second.tokens_per_s
        with pytest.raises(InputError, match="tokens= must be the number of tokens in a step, at least 1; got 0"):
            StepLog(pipe, tokens=0)


def test_one_step_of_so_many_is_said_and_written():
    lines, writer = [], Writer()
    with pipeline() as pipe:
        log = StepLog(pipe, writer, every=2, show=lines.append)
        said, traces = [], []
        for _ in range(5):
            loss = pipe.step(X, target=X)
            said.append(log(loss))
            traces.append(pipe.trace)
    assert [figures is None for figures in said] == [True, False, True, False, True]
    assert lines == [str(said[1]), str(said[3])]
    assert sorted(writer.scalars) == [
        "pipesched/bubble_ratio",
        "pipesched/busy/rank_0",
        "pipesched/busy/rank_1",
        "pipesched/loss",
        "pipesched/predicted_s",
        "pipesched/step_s",
        "pipesched/whole_s",
    ]
    assert writer.scalars["pipesched/step_s"] == {1: traces[1].makespan_s, 3: traces[3].makespan_s}
    assert list(writer.scalars["pipesched/whole_s"]) == [3]
    assert writer.scalars["pipesched/whole_s"][3] > traces[3].makespan_s
    assert writer.scalars["pipesched/bubble_ratio"][3] == traces[3].bubble_ratio
    assert writer.scalars["pipesched/loss"][3] == float(loss)
    busy = [writer.scalars[f"pipesched/busy/rank_{rank}"][3] for rank in (0, 1)]
    assert 1 - sum(busy) / 2 == pytest.approx(traces[3].bubble_ratio)


def test_losses_that_layers_add_are_entries_of_their_own():
    lines, writer = [], Writer()
    with added_losses.pipeline(added_losses.row(), {"devices": ["cpu"] * 2}, schedule="1f1b") as pipe:
        log = StepLog(pipe, writer, show=lines.append)
        figures = log(pipe.step(added_losses.X, target=added_losses.Y))
        assert figures.metrics == {name: float(value) for name, value in pipe.metrics.items()}
    assert list(figures.metrics) == ["added_loss", "z"]
    assert writer.scalars["pipesched/metrics/z"] == {0: figures.metrics["z"]}
    assert f"added_loss {figures.metrics['added_loss']:.4g}, z {figures.metrics['z']:.4g}, " in lines[0]


def test_nothing_is_said_before_the_first_step_and_numbers_are_the_users():
    with pipeline() as pipe:
        log = StepLog(pipe, show=None)
        assert log() is None
        pipe.step(X, target=X)
        assert log(step=41).step == 41
        assert log().step == 2


def test_a_step_of_an_asynchronous_schedule_is_one_of_several_in_its_trace():
    with pipeline(schedule="pipedream", optimizer=lambda params: torch.optim.SGD(params, lr=0.1)) as pipe:
        for _ in range(4):
            pipe.step(X, target=X)
        pipe.flush()
        figures = StepLog(pipe, show=None)(torch.zeros(()))
        assert figures.step_s == pytest.approx(pipe.trace.makespan_s / 4)
        assert figures.predicted_s is None


def test_a_short_batch_is_a_step():
    with pipeline() as pipe:
        pipe.step(X[:1], target=X[:1])
        figures = StepLog(pipe, show=None)()
        assert figures.step_s == pipe.trace.makespan_s
        assert figures.predicted_s is None


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_every_is_a_whole_number(every):
    with pipeline() as pipe, pytest.raises(InputError, match=re.escape(f"at least 1; got {every}; pass 1 or more")):
        StepLog(pipe, every=every)
