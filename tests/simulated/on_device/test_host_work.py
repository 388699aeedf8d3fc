"""A step in the steady state never waits for a device, and launches few events and waits for each action."""

import pytest
import torch

from pipesched import Numerics
from tests.simulated.host_work import counted_step


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, foreach=False)


def users_loss(output, target):
    return torch.nn.functional.cross_entropy(output.float(), target)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": sgd}, {"optimizer": sgd, "numerics": Numerics(clip_grad_norm=1.0)}, {"loss_fn": users_loss}],
    ids=["gradients", "updates", "clipping", "own loss function"],
)
def test_a_step_waits_for_no_device_and_launches_few_events(sim, schedule, options):
    work = counted_step(sim, schedule, **options)
    assert work.counts["host synchronisations"] == work.counts["hidden synchronisations"] == 0
    # One for the end of each action; for each message one after its value, and one for the stream that takes it.
    assert work.counts["events"] <= work.num_actions + 2 * work.num_messages + 20
    assert work.counts["waits"] <= 2 * work.num_messages + 12


def test_a_loss_read_by_the_caller_is_counted(sim):
    loss = torch.ones(1, device="sim:0").sum()
    loss.item()
    assert sim.judge.counts["host synchronisations"] == 1
