"""Runs of special schedules and modes continue with the bits of a run that did not stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Numerics, Pipeline, Plan
from pipesched.errors import ExecutionError
from tests.support.models import assert_equal_bits
from tests.support.places import Group, OneProcess, place
from tests.support.rank_processes import Ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:BatchNorm sees one micro-batch")]

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    )


def continued(group: Group, schedule: str, path: str, options: dict[str, Any]) -> None:
    """Three steps after a save equal three steps after a load. A save flushes an asynchronous schedule."""
    found: list[dict[str, Tensor]] = []
    for seed in (0, 1):
        choices = {"schedule": schedule, "num_microbatches": 4, "seed": 3 + seed, **options, **place(group)}
        own: Any = None if schedule == "chimera" else torch.optim.Adam
        if schedule == "chimera":  # copies of layers have no running statistics of their own
            choices["numerics"] = Numerics(batch_norm="mini-batch")
        boundaries = [3]  # updates of asynchronous schedules depend on the cut
        with Pipeline(
            model(seed), X[:2], loss_fn=nn.functional.mse_loss, optimizer=own, boundaries=boundaries, **choices
        ) as pipe:
            users = torch.optim.Adam(pipe.parameters()) if own is None else None

            def train(pipe: Pipeline = pipe, users: Any = users) -> None:
                for _ in range(3):
                    pipe.step(X, target=Y)
                    if users is not None:
                        users.step()
                        users.zero_grad()

            if seed == 0:
                train()
                pipe.save(path, optimizer=users)
            else:
                pipe.load(path, optimizer=users)
            train()
            found.append({name: value.clone() for name, value in pipe.state_dict().items()})
    assert_equal_bits(*found)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("pipedream", {}),
        ("pipedream-2bw", {}),
        ("chimera", {}),
        ("1f1b", {"numerics": Numerics(batch_norm="mini-batch")}),
    ],
)
def test_a_run_continues(schedule: str, options: dict[str, Any], tmp_path: Path) -> None:
    continued(OneProcess(2), schedule, str(tmp_path), options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["pipedream", "chimera"])
def test_a_run_over_a_mesh_continues(ranks: Ranks, schedule: str, tmp_path: Path) -> None:
    ranks.run(2, continued, schedule, str(tmp_path), {})


def test_ranks_without_stages_take_part(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "devices": ["cpu"] * 2, "boundaries": [3]}
    with Pipeline(model(0), X[:2], loss_fn=nn.functional.mse_loss, **options) as pipe:
        plan = pipe.plan
    ranks.run(3, _two_of_three, plan.to_dict(), str(tmp_path))


def _two_of_three(group: Group, plan: dict[str, Any], path: str) -> None:
    loss_fn = nn.functional.mse_loss
    with Pipeline(model(0), X[:2], loss_fn=loss_fn, plan=Plan.from_dict(plan), **place(group)) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        pipe.step(X, target=Y)
        optimizer.step()
        optimizer.zero_grad()
        pipe.save(path, optimizer=optimizer)
        pipe.step(X, target=Y)
        assert pipe.load(path, optimizer=optimizer).step == 1
        assert sum(1 for _ in pipe.named_parameters()) == (4, 6, 0)[group.rank()]


def test_a_shared_buffer_arrives_on_every_rank_that_uses_it(ranks: Ranks, tmp_path: Path) -> None:
    for scale in ranks.run(2, _shared_buffer, str(tmp_path)):
        assert scale == 3


class Scaled(nn.Module):
    """Blocks that share a buffer of the model."""

    scale: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def _shared_buffer(group: Group, path: str) -> float:
    for scale in (3.0, 1.0):
        own: Any = Scaled(scale)
        options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "boundaries": [2], "seed": 1}
        with Pipeline(own, X[:2], loss_fn=nn.functional.mse_loss, **options, **place(group)) as pipe:
            if scale == 1.0:
                pipe.load(path)
                return float(own.scale)
            pipe.save(path)
    raise AssertionError


def test_a_save_from_inside_a_step_is_refused(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def save(module: nn.Module, args: Any, output: Any) -> None:
        try:
            pipe.save(tmp_path)
        except ExecutionError as error:
            found.append(error)

    own = model(0)
    own[0].register_forward_hook(save)
    with Pipeline(own, X[:2], loss_fn=nn.functional.mse_loss, devices=["cpu"], schedule="1f1b") as pipe:
        pipe.step(X, target=Y)
    assert "was called from inside a running step" in str(found[0])
