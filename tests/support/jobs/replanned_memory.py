"""A job that measures the memory of a process while the plan changes, on CPUs and on accelerators."""

import gc
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, schedules
from pipesched.devices.memory import allocated_bytes
from pipesched.devices.streams import synchronize
from pipesched.planning.plan import Plan
from tests.support.places import Group

_WIDTH, _ROWS, _LAYERS = 32, 16, 8
_adam = partial(torch.optim.AdamW, lr=0.01, foreach=False)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x[None])[0][0]


def _model() -> nn.Module:
    return nn.Sequential(_Recurrent(), *(_Block() for _ in range(_LAYERS - 1)))


def _plan(schedule: str, num_ranks: int) -> Plan:
    stages = schedules.get(schedule).program(num_ranks, 4).num_weights
    cut = [_LAYERS * stage // stages for stage in range(1, stages)]
    options = {"loss_fn": functional.mse_loss, "schedule": schedule, "boundaries": cut, "num_microbatches": 4}
    with Pipeline(_model(), _batch()[:4], devices=["cpu"] * num_ranks, **options) as pipe:
        return pipe.plan


def _batch() -> Tensor:
    return torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(1))


def _held_bytes(devices: list[torch.device]) -> list[int]:
    """Return the size of all tensors of this process on each of these devices."""
    gc.collect()
    if devices[0].type != "cpu":
        for device in devices:
            synchronize(device)
        return [allocated_bytes(device) for device in devices]
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and thing.is_cpu]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return [sum(storages.values())]


class _Run:
    """A pipeline over all processes of the group or, without a group, in this process."""

    def __init__(
        self, group: Group | None, kind: str, plan: Plan, *, user: bool, built_on: str = "cpu", zero: int = 0
    ) -> None:
        with torch.device(built_on):
            model = _model()
        self._replica, self._num_replicas = 0, 1
        options: dict[str, Any] = {"optimizer": None if user else _adam}
        if group is None:
            options["devices"] = ["cpu"] * 2 if kind == "cpu" else [f"{kind}:0", f"{kind}:1"]
        elif group.size() == 4:
            options["mesh"] = mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "pp"))
            self._replica, self._num_replicas = mesh.get_local_rank("dp"), 2
            options |= {"distributed": Distributed(zero=zero), "numerics": Numerics(batch_norm="mini-batch")}
        else:
            options["mesh"] = DeviceMesh.from_group(group, kind)
        self.pipe = Pipeline(model, _batch()[:4], loss_fn=functional.mse_loss, plan=plan, seed=1, **options)
        self.own = _adam(self.pipe.parameters()) if user else None
        self.known: set[torch.optim.Optimizer] = set()  # as schedulers would know them

    def change(self, plan: Plan) -> None:
        self.pipe.replan(plan, **({} if self.own is None else {"optimizer": self.own}))

    def step(self) -> None:
        x = _batch().chunk(self._num_replicas)[self._replica]
        self.pipe.step(x, target=x)
        self.known |= {*self.pipe.optimizers.values()}
        if self.own is not None:
            self.own.step()


def bytes_under_changes(
    group: Group | None, kind: str, changes: int, options: Mapping[str, Any]
) -> dict[str, list[list[int]]]:
    """Return the bytes of this process on its devices after each change, and last with a pipeline that begins so.

    The results are keyed by the plan: "all" uses all ranks, "one" only rank 0. The last one is that of a pipeline that
    was made with the plan and has run one step.
    """
    devices = [torch.device("cpu")]
    if kind != "cpu":
        indices = [0, 1] if group is None else [torch.accelerator.current_device_index()]
        devices = [torch.device(kind, index) for index in indices]
    plans = {"all": _plan("zb-h1", 2), "one": _plan("1f1b", 1)}
    make = partial(_Run, group, kind, **options)
    found: dict[str, list[list[int]]] = {name: [] for name in plans}

    def measure(name: str) -> None:
        found[name].append([now - then for now, then in zip(_held_bytes(devices), before, strict=True)])

    before = _held_bytes(devices)
    run = make(plan=plans["one"])
    with run.pipe:
        run.step()
        for change in range(changes):
            name = ["all", "one"][change % 2]
            run.change(plans[name])
            run.step()
            measure(name)
        run.pipe.gather_model()
        assert all(bool(value.isfinite().all()) for value in run.pipe.model.state_dict().values())
    del run
    for name, plan in plans.items():
        before = _held_bytes(devices)
        run = make(plan=plan)
        with run.pipe:
            run.step()
            measure(name)
        del run
    return found


def check_no_growth(found: Mapping[str, list[list[int]]], kept: int) -> None:
    """Check that no memory is left by changes, except at most ``kept`` bytes for the messages of other plans."""
    for name, (first, second, *later, fresh) in found.items():
        assert all(each == second for each in later), (name, first, second, later)
        more = [now - due for now, due in zip(second, fresh, strict=True)]
        assert all(0 <= each <= kept for each in more), (name, more, fresh)
