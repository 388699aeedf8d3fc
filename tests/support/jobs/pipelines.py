"""Jobs of test_distributed that use Pipeline(mesh=...)."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Pipeline, StepLog, schedules
from pipesched.errors import InputError, PipeschedError
from pipesched.testing import reference_step
from tests.support.models import compare_step, mixed_model
from tests.support.saved_reports import read_again


def pipeline(group: Any, name: str, model: nn.Module, **options: Any) -> Pipeline:
    """Return a Pipeline over the ranks of a process group."""
    mesh = DeviceMesh.from_group(group, "cpu")
    chunks = schedules.get(name).chunks_per_rank * group.size()
    cut = [len(model) * stage // chunks for stage in range(1, chunks)]
    choices = {"num_microbatches": 4, "boundaries": cut, "seed": 5, **options}
    return Pipeline(model, X[:2], loss_fn=functional.cross_entropy, mesh=mesh, schedule=name, **choices)


X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4


def train_pipelines(group: Any, names: list[str], checkpoint: str) -> None:
    """Check that steps with two batch sizes equal a plain loop: the loss, and this rank's gradients and buffers."""
    for name in names:
        expected, actual = mixed_model(), mixed_model()
        with pipeline(group, name, actual, checkpoint=checkpoint) as pipe:
            for step, rows in enumerate((19, 6)):
                compare_step(pipe, expected, X[:rows], target=Y[:rows], seed=5, step=step)
            mine = dict(pipe.named_parameters())
            due = dict(expected.named_parameters())
            shares = pipe._running.host.collectives.gathered(sorted(mine))
            assert sorted(key for share in shares for key in share) == sorted(due)
            trace = pipe.gather_trace()
            program = schedules.get(name).program(group.size(), 4)
            assert len(trace.by_rank) == group.size()
            assert [len(row) for row in trace.by_rank][group.rank()] == len(pipe.trace.by_rank[group.rank()])
            assert trace.num_microbatches == program.num_microbatches


def train_with_optimizer(group: Any) -> None:
    """Train with one optimizer per stage. Check that the gathered weights equal those of a plain loop.

    Also checks the step log, the report, an evaluation with outputs, and loading of a state.
    """
    expected, actual = mixed_model(), mixed_model()
    theirs = torch.optim.Adam(expected.parameters(), lr=0.05)
    with pipeline(group, "1f1b", actual, optimizer=lambda params: torch.optim.Adam(params, lr=0.05)) as pipe:
        for step in range(3):
            pipe.step(X, target=Y)
            reference_step(
                expected, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=5, step=step
            )
            theirs.step()
            theirs.zero_grad()
        whole, report, said = pipe.full_state_dict(), pipe.report(), StepLog(pipe, show=None)(0.5)
        assert (said is None) == (group.rank() > 0)
        assert said is None or len(said.busy) == group.size()
        assert read_again(report).text() == report.text()
        assert "optimizer" in next(table for table in report.tables if table.title == "Memory, predicted").columns
        assert len(report.comparison.stages) == len(report.comparison.busy) == group.size()
        assert whole.keys() == expected.state_dict().keys()
        assert all(torch.equal(whole[key], value) for key, value in expected.state_dict().items())
        loss, outputs = pipe.eval().evaluate(X, target=Y, return_outputs=True)
        assert (outputs is None) == (group.rank() != group.size() - 1)
        assert loss.isfinite()
        pipe.load_state_dict(mixed_model().state_dict())
        fresh = mixed_model().state_dict()
        assert all(torch.equal(value, fresh[key]) for key, value in pipe.state_dict().items())


def refusals(group: Any) -> list[str]:
    """Return the errors of a pipeline over a mesh for uses that it does not support."""
    said = []
    mesh = DeviceMesh.from_group(group, "cpu")
    for options in (
        {"schedule": "pipedream"},
        {"devices": ["cpu"] * group.size()},
        {"boundaries": [2 + group.rank()]},
        {"num_stages": 1},
    ):
        choices = {
            "mesh": mesh,
            "schedule": "1f1b",
            "num_microbatches": 2,
            "distributed": Distributed(timeout=20),
            **options,
        }
        try:
            Pipeline(mixed_model(), X[:2], loss_fn=functional.cross_entropy, **choices).close()
            said.append(f"no error for {options}")
        except PipeschedError as error:
            said.append(str(error))
    return said


def balanced(group: Any) -> list[str]:
    """Return the boundaries and the loss of a pipeline without boundaries= and seed=, to compare them between ranks."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Dropout(0.5))
    torch.manual_seed(group.rank())
    mesh = DeviceMesh.from_group(group, "cpu")
    with Pipeline(
        model, X[:2], loss_fn=functional.cross_entropy, mesh=mesh, num_microbatches=2, schedule="1f1b"
    ) as pipe:
        assert pipe.predicted.makespan_s > 0
        with pytest.raises(
            InputError, match=r"may only run in one process; .* a mesh; use step\(\), call .* under no_grad"
        ):
            pipe(X)
        return [*pipe.boundaries, str(pipe.step(X, target=Y))]
