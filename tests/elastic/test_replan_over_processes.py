"""Over processes, a run under changing plans has the bits of a run that never changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from pipesched import Distributed, Pipeline
from pipesched.errors import InputError
from pipesched.pipeline.step_history import StepHistory
from pipesched.runtime.transport.message_layout import MessageLayout
from tests.support import resumed_runs as runs
from tests.support.call_count import calls
from tests.support.jobs import replanning as jobs
from tests.support.models import assert_equal_bits
from tests.support.rank_processes import Ranks
from tests.support.resumed_runs import Half
from tests.support.sleeping_layers import Waiting

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:BatchNorm sees", "ignore:each of", "ignore:a learning rate scheduler"),
]

FOUR = [Half(2), Half(4, "zb-h1"), Half(1), Half(3, "interleaved-1f1b", checkpoint="always")]
REPLICATED = [Half(2, replicas=2), Half(1, replicas=2), Half(2, "zb-v", replicas=2, checkpoint="always")]


def check(found, due):
    """Check that all processes have the losses, and together the tensors, of a run that never changes."""
    losses, tensors = due
    together = {}
    for own_losses, own, _ in found:
        assert_equal_bits(dict(enumerate(own_losses)), dict(enumerate(losses)))
        together |= own
    assert_equal_bits(runs.whole(together), tensors)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("optimizer", ["user", "pipeline"])
def test_changes_of_schedule_ranks_and_checkpointing(ranks: Ranks, optimizer: str) -> None:
    halves = [replace(half, optimizer=optimizer) for half in FOUR]
    check(ranks.run(4, jobs.trained, halves), runs.never_stopped())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_replicas_change_together(ranks: Ranks, zero: int | None) -> None:
    """None: with an optimizer of the user."""
    choices = {"optimizer": "user"} if zero is None else {"optimizer": "pipeline", "zero": zero}
    halves = [replace(half, **choices) for half in REPLICATED]
    check(ranks.run(4, jobs.trained, halves), runs.never_stopped((halves[0].sums,) * 2))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own", ["user", "pipeline"])
def test_the_number_of_replicas_changes_with_the_same_bits(ranks: Ranks, own: str) -> None:
    """With sums in a tree."""
    halves = [Half(2, replicas=2), Half(3, "zb-h1"), Half(1, replicas=4), Half(1, replicas=2), Half(4)]
    found = ranks.run(4, jobs.trained, [replace(half, optimizer=own) for half in halves], True)
    same = ranks.run(4, jobs.trained, [Half(2, optimizer=own, replicas=2)], True)
    check(found, (same[0][0], runs.whole({name: value for one in same for name, value in one[1].items()})))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("slow", [{2: 2.0}, {1: 3.0, 2: 3.0}, {1: 50.0}, {0: 50.0}, {3: 4.0}])
def test_slow_processes_get_fewer_layers_or_none(ranks: Ranks, slow: dict[int, float]) -> None:
    """Rank 0 searches, and all processes know then which are slow, and later that they are not any more."""
    found = ranks.run(4, jobs.with_slow_processes, slow, timeout_s=60)
    for losses, ((then, known), (_, later)) in found:
        assert_equal_bits(dict(enumerate(losses)), dict(enumerate(runs.never_stopped()[0][:6])))
        assert max(then[rank] for rank in slow) < max(then.values())
        assert max(slow.values()) < 10 or not any(then[rank] for rank in slow)
        assert known.keys() == slow.keys()
        assert min(known.values()) > 1.5
        assert later == {}
    assert all(one[1] == found[0][1] for one in found)


def test_a_pipeline_looks_for_a_faster_plan_unasked(ranks: Ranks) -> None:
    """It says why it keeps a plan, and does not search if the processes take the expected times."""
    found = ranks.run(4, jobs.unasked, timeout_s=60)
    for losses, plans, said in found:
        assert_equal_bits(dict(enumerate(losses)), dict(enumerate(runs.never_stopped()[0][:11])))
        assert plans == found[0][1]
        assert plans[0] == plans[1] != plans[2]
        replans = [text for text in said if text.startswith("replanned before step")]
        assert [text.partition(": ")[0] for text in replans] == [
            f"replanned before step {at}" for at in (2, 4, 6, 8, 10)
        ]
        assert ": moved: " in replans[0]
        assert "kept: the times of the ranks have not changed since the last search; " in replans[-1]


def test_idle_processes_measure_their_speed(ranks: Ranks) -> None:
    for found in ranks.run(4, jobs.idle_speed):
        assert found.keys() == {2, 3}
        assert min(found.values()) > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "this pipeline has replan_every=5 and no optimizer="),
        ({"optimizer": torch.optim.SGD, "schedule": "pipedream"}, "and a schedule whose steps overlap"),
    ],
)
def test_a_pipeline_that_cannot_look_unasked(options: dict, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            torch.randn(2, 4),
            devices=["cpu"] * 2,
            loss_fn=nn.functional.mse_loss,
            distributed=Distributed(replan_every=5),
            **options,
        )


def test_a_number_of_steps_that_is_none() -> None:
    with pytest.raises(InputError, match="replan_every= must be a number of steps, at least 1; got 0"):
        Distributed(replan_every=0)


def measured_steps(group) -> list[float]:
    """Return the times of the first forward in the steps that a replan reads. Each step is slower than the last."""
    mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    layers = [Waiting(0.0) for _ in range(2)]
    choices = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": nn.functional.mse_loss}
    with Pipeline(nn.Sequential(*layers), torch.ones(1, 4), mesh=mesh, **choices) as pipe:
        for step in range(5):
            for layer in layers:
                layer.seconds = 0.01 * step
            pipe.step(torch.ones(2, 4), target=torch.ones(2, 4)).item()
        steps, _ = pipe._history.gather_steps()
    return [next(span.end_s - span.start_s for span in step.spans) for step in steps]


def test_the_measured_steps_are_those_that_ran(ranks: Ranks) -> None:
    for times in ranks.run(2, measured_steps):
        assert len(times) == 4  # the first is warm-up
        assert all(seconds >= 0.01 * step for step, seconds in enumerate(times, 1))
        assert len({*times}) == 4


def sent_in_a_look(group, num_microbatches: int, num_layers: int) -> tuple[int, int, int]:
    """Return how many actions this process has measured, and how many values and bytes it sends of them."""
    mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    choices = {"schedule": "1f1b", "num_microbatches": num_microbatches, "loss_fn": nn.functional.mse_loss}
    x = torch.ones(num_microbatches, 4)
    size = 0
    write = MessageLayout.written

    def written(layout: MessageLayout) -> bytes:
        nonlocal size
        data = write(layout)
        size += len(data)
        return data

    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    with Pipeline(nn.Sequential(*layers), x[:1], mesh=mesh, **choices) as pipe:
        for _ in range(4):
            pipe.step(x, target=x).item()
        pipe._history.gather_steps()  # measures the layers, and sends their costs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MessageLayout, "written", written)
            # Where a rank is slow, another exchange follows; here one is slow when the machine is busy.
            patch.setattr(StepHistory, "_strays", lambda history, runs: 1.0)
            seen = calls(pipe._history.gather_steps)
        encoded = {name: count for (file, name), count in seen.items() if Path(file).name == "encoding.py"}
        return sum(len(list(run.spans())) for run in list(pipe._running.runs)[1:]), encoded["_write"], size


def test_a_look_sends_only_the_times_of_actions(ranks: Ranks) -> None:
    """Not one value for each action, but 16 bytes. Rank 1 sends those of its actions, and rank 0 those of all."""
    few, many = (list(zip(*ranks.run(2, sent_in_a_look, count, 2), strict=True)) for count in (4, 40))
    assert few[1] == many[1]
    more = [many_actions - few_actions for few_actions, many_actions in zip(few[0], many[0], strict=True)]
    assert min(more) > 300
    for rank, sent in enumerate((sum(more), more[1])):
        assert 0 <= many[2][rank] - few[2][rank] - 16 * sent < 32  # longer numbers in the shapes of arrays


def test_a_later_look_sends_no_costs_of_layers(ranks: Ranks) -> None:
    few, many = (ranks.run(2, sent_in_a_look, 4, num_layers) for num_layers in (2, 20))
    assert few == many
