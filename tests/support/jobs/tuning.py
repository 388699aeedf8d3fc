"""Jobs of test_mesh_tuning: each function runs on all ranks of a group at the same time."""

import copy
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import pipesched
from pipesched import Pipeline, Plan, Search
from pipesched.testing import reference_step

X, Y = (torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def model(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.Dropout(0.1))))


def tuned(group: Any, own: nn.Module, **options: Any) -> Plan:
    choices = {"batch_size": 8, "num_microbatches": 4, "loss_fn": functional.mse_loss, "target": Y, **options}
    choices.setdefault("all_ranks", True)  # without all_ranks, tune would use one rank for such small layers
    return pipesched.tune(own, X, mesh=DeviceMesh.from_group(group, "cpu"), **choices)


def a_plan_is_confirmed_by_all(group: Any) -> dict[str, Any]:
    own = model()
    before = copy.deepcopy(own.state_dict())
    parameters, numbers = list(own.parameters()), torch.get_rng_state()
    plan = tuned(group, own)
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    assert all(one is other for one, other in zip(own.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert torch.equal(torch.get_rng_state(), numbers)
    with Pipeline(
        own, X, loss_fn=functional.mse_loss, mesh=DeviceMesh.from_group(group, "cpu"), plan=plan, seed=3
    ) as it:
        x, y = X.repeat(4, 1), Y.repeat(4, 1)
        loss = it.step(x, target=y)
        expected = reference_step(model(), x, target=y, loss_fn=functional.mse_loss, num_microbatches=4, seed=3)
        assert torch.equal(loss, expected)
    return plan.to_dict()


def only_rank_0_measures(group: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the argument ``ranks_are`` of each measurement on this rank, and the plan."""
    from pipesched.pipeline import tune as tuning

    real, calls = tuning.measure, []

    def measure(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["ranks_are"])
        time.sleep(0.1)
        return real(*args, **kwargs)

    tuning.measure = measure
    try:
        plan = tuned(group, model(), confirm=0)
    finally:
        tuning.measure = real
    return calls, plan.to_dict()


def layers_run_in_the_rank(group: Any) -> list[str]:
    """Return the names of the threads in which layers run while a pipeline is made."""
    names = set()

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            names.add(threading.current_thread().name)
            return super().forward(x)

    own = nn.Sequential(*(Noting(8, 8) for _ in range(4)))
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "mesh": DeviceMesh.from_group(group, "cpu")}
    for search in (Search(), Search(batch_size=8)):  # with a batch size, several sizes of micro-batches are measured
        with Pipeline(own, X, schedule="auto", search=search, **options):
            pass
    return sorted(names)


def what_cannot_be_asked(group: Any) -> str:
    try:
        tuned(group, model(), num_stages=99)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def what_fails_on_one_rank(group: Any) -> str:
    """Return this rank's error if a layer fails on one rank during the trial runs."""

    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.breaks and torch.is_grad_enabled():
                raise OSError("no layer today")
            return super().forward(x)

    own = model()
    own.append(Broken(8, 8))
    own[-1].breaks = False
    profile = pipesched.profile(own, X, rows=[2])
    own[-1].breaks = True
    try:
        tuned(group, own, profile=profile, schedule="1f1b")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
