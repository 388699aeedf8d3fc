"""Jobs of test_rendezvous: one rank fails to make a pipeline, or makes it late."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import pipesched
from pipesched import Distributed, Pipeline
from pipesched.errors import PipeschedError
from pipesched.profiling import layered_costs
from pipesched.progress import advance
from pipesched.runtime import process_collectives
from pipesched.testing import reference_step
from tests.support.models import mixed_model

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 4
MISTAKES: dict[str, Any] = {
    "seed": {"seed": "five"},
    "model": {"model": 5},
    "timeout": {"distributed": Distributed(timeout=-1)},
    "boundaries": {"boundaries": [99] * 10},
    "devices": {"devices": ["cpu"]},
    "init": {"init": 5},
}


def made(group: Any, model: Any = None, **options: Any) -> Pipeline:
    choices = {
        "loss_fn": functional.cross_entropy,
        "num_microbatches": 4,
        "seed": 5,
        "distributed": Distributed(timeout=30),
        **options,
    }
    choices.setdefault("boundaries", [11 * rank // group.size() for rank in range(1, group.size())])
    return Pipeline(
        mixed_model() if model is None else model, X[:4], mesh=DeviceMesh.from_group(group, "cpu"), **choices
    )


def said(call: Any) -> str:
    try:
        call()
    except (PipeschedError, TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def runs(group: Any) -> None:
    with made(group) as pipe:
        given = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5}
        assert torch.equal(pipe.step(X, target=Y), reference_step(mixed_model(), X, target=Y, **given))


def mistakes(group: Any, wrong: int) -> dict[str, str]:
    """Return this rank's errors if rank ``wrong`` passes wrong arguments. After each error, make a correct pipeline."""
    found = {}
    for name, mistake in MISTAKES.items():
        found[name] = said(lambda: made(group, **(mistake if group.rank() == wrong else {})))
        runs(group)
    links = said(
        lambda: pipesched.probe_links(DeviceMesh.from_group(group, "cpu"), timeout=-1 if group.rank() == wrong else 30)
    )
    runs(group)
    return {**found, "links": links}


def all_alike(group: Any) -> list[str]:
    """Return this rank's errors if all ranks pass the same wrong argument. Then make a pipeline."""
    found = [said(lambda: made(group, seed="five")) for _ in range(3)]
    runs(group)
    return found


def absent(group: Any, who: list[int]) -> list[str]:
    """Return this rank's errors if the ranks in ``who`` do not make a pipeline. Then make a pipeline on all ranks."""
    store, found = group.get_group_store(), []
    for attempt in range(2):
        store.set(f"begin/{who}/{attempt}/{group.rank()}", "")
        store.wait([f"begin/{who}/{attempt}/{rank}" for rank in range(group.size())], timedelta(seconds=30))
        found.append("absent")
        if group.rank() not in who:
            found[-1] = said(lambda: made(group, distributed=Distributed(timeout=2)))
        store.set(f"attempt/{who}/{attempt}/{group.rank()}", "")
        store.wait([f"attempt/{who}/{attempt}/{rank}" for rank in range(group.size())], timedelta(seconds=30))
    runs(group)
    return found


def later(group: Any) -> None:
    """Make a pipeline that rank 1 joins late, but before the timeout."""
    if group.rank() == 1:
        time.sleep(1)
    runs(group)


def measures_for_long(group: Any, how: str) -> str:
    """Return the error on this rank if rank 0 measures layers for longer than the timeout.

    how: "ends" (the measurement succeeds), "fails" (the measurement raises an error), "stops" (rank 0 sends nothing
    more, as if its process were stopped), "hangs" (a single call takes longer than the timeout), or "spins" (a single
    call uses processor time for longer than the timeout).
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    real = layered_costs.measure_layers

    def measured(*args: Any, **kwargs: Any) -> Any:
        if how == "hangs":
            time.sleep(4)
        begin_s = time.monotonic()
        while how == "spins" and time.monotonic() - begin_s < 4:
            pass
        if how == "stops":
            process_collectives.ProcessCollectives._deal = lambda *_, **__: None  # send nothing, like a stopped process
        for _ in range(30):
            time.sleep(0.1)
            advance()
        if how == "fails":
            raise OSError("no layer today")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layered_costs, "measure_layers", measured)
        patch.setattr(process_collectives.ProcessCollectives, "_deal", process_collectives.ProcessCollectives._deal)
        return said(
            lambda: trained(made(group, model, boundaries=None, schedule="1f1b", distributed=Distributed(timeout=2)))
        )


def trained(pipe: Pipeline) -> None:
    with pipe:
        pipe.step(X, target=Y)
