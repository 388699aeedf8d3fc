"""A violation in a pipeline names the rank, the stage and the micro-batch of both operations."""

from contextlib import contextmanager

import torch
from torch import nn

from pipesched import Pipeline
from pipesched.runtime.executors import processes, threads
from tests.simulated.actions import label_actions
from tests.simulated.violations import ViolationKind


class Racing(nn.Module):
    """Computes on the CPU, and beside it on a device: the second layer does not wait for the first one."""

    def __init__(self, shared, writes):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.shared = shared
        self.writes = writes

    def forward(self, x):
        with torch.Stream(device="sim:0"):
            if self.writes:
                self.shared[x.shape[0]] = torch.ones(3, device="sim:0") * 2
            else:
                self.shared[x.shape[0]] + 1
        return self.linear(x)


@contextmanager
def labelled(sim):
    """The executors' interpreter labels its threads."""
    before = threads.interpret
    label_actions(sim)
    try:
        yield
    finally:
        threads.interpret = processes.interpret = before


def test_a_violation_names_rank_stage_and_microbatch(sim):
    shared = {}
    model = nn.Sequential(Racing(shared, writes=True), Racing(shared, writes=False))
    x = torch.ones(5, 3)  # micro-batches of three rows and of two
    options = {"devices": ["cpu", "cpu"], "num_microbatches": 2, "schedule": "gpipe", "boundaries": [1]}
    with labelled(sim), Pipeline(model, x[:3], loss_fn=nn.MSELoss(), **options) as pipe:
        sim.judge.forget()
        pipe.step(x, target=torch.zeros(5, 3))
    found = [violation for violation in sim.judge.violations if violation.later.name == "aten::add"]
    assert {violation.kind for violation in found} == {ViolationKind.READ}
    assert {(str(violation.earlier.label), str(violation.later.label)) for violation in found} == {
        (f"0F{i} (stage 0, micro-batch {i}), rank 0", f"1F{i} (stage 1, micro-batch {i}), rank 1") for i in (0, 1)
    }
    assert {violation.later.thread for violation in found} == {"pipesched rank 1"}
    assert all(violation.later.frames[0][0] == __file__ for violation in found)
