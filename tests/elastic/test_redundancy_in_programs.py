"""A running pipeline's program has the actions that keep copies, and its traces and predictions show them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from pipesched import Distributed, Pipeline
from pipesched.program.actions import Kind
from pipesched.simulation.trace import Trace
from tests.support.rank_processes import Ranks
from tests.support.sleeping_layers import waited

ROOT = Path(__file__).parents[2]
COPYING = (Kind.MIRROR, Kind.KEEP, Kind.REPLAY)

pytestmark = pytest.mark.timeout(100)


class Layer(nn.Linear):
    """A linear layer that takes so long that four ranks are faster than one."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return waited(super().forward(x), 0.003)


def trained(group: Any, shape: tuple[int, ...], options: Any) -> tuple[Trace, Trace, list[float]]:
    """Return the trace of the third step, its prediction, and the step times of the plan's alternatives."""
    names = ("pp",) if len(shape) == 1 else ("dp", "pp")
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(*(Layer() for _ in range(8))),
        torch.ones(2, 8),
        loss_fn=nn.functional.mse_loss,
        mesh=mesh,
        num_microbatches=4,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        distributed=Distributed(redundancy="neighbour"),
        **options,
    )
    with pipe:
        for _ in range(3):
            pipe.step(torch.ones(8, 8), target=torch.ones(8, 8)).item()
        trace = pipe.gather_trace()
        assert trace is not None
        plan = pipe.plan
        return trace, plan.predicted(), [one.step_s for one in plan.alternatives]


def stages_of(trace: Trace, kind: Kind) -> list[int]:
    return sorted(span.action.stage for span in trace.spans if span.action.kind is kind)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 4), ("interleaved-1f1b", 8)])
def test_a_step_shows_when_each_stage_was_copied(ranks: Ranks, schedule: str, num_stages: int) -> None:
    for trace, predicted, _ in ranks.run(4, trained, (4,), {"schedule": schedule, "num_stages": num_stages}):
        ended_s = {span.action: span.end_s for span in trace.spans}
        begun_s = {span.action: span.start_s for span in trace.spans}
        for kind in COPYING:
            assert stages_of(trace, kind) == stages_of(predicted, kind) == list(range(num_stages))
        for action, start_s in begun_s.items():
            if action.kind is Kind.UPDATE:
                assert ended_s[action._replace(kind=Kind.KEEP)] <= start_s
        by_rank = [[span for span in row if span.action.kind in COPYING] for row in trace.redundancy_by_rank]
        for spans in by_rank:
            assert [span.action.kind for span in spans] == sorted(
                (span.action.kind for span in spans), key=COPYING.index
            )


def test_replicas_only_keep_their_own_state(ranks: Ranks) -> None:
    for trace, predicted, _ in ranks.run(4, trained, (2, 2), {"schedule": "1f1b"}):
        assert stages_of(trace, Kind.KEEP) == stages_of(predicted, Kind.KEEP) == [0, 1]
        assert not stages_of(trace, Kind.MIRROR) + stages_of(trace, Kind.REPLAY)


def test_the_search_counts_the_copies(ranks: Ranks) -> None:
    for _, predicted, alternatives in ranks.run(4, trained, (4,), {}):
        assert stages_of(predicted, Kind.REPLAY)
        assert alternatives[0] == pytest.approx(predicted.makespan_s)


def test_a_process_ends_well_while_a_copy_is_brought_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.jobs.copied_at_exit"]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [(process.returncode, out) for process, out in zip(started, said, strict=True)] == [(0, "ran\n")] * 2
