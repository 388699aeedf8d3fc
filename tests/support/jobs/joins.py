"""Jobs in which ranks join and leave: each rank is a forked process that trains until the last step."""

import hashlib
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched import Distributed, Numerics, Pipeline
from pipesched.elastic.recovered import Recovered

WIDTH, ROWS, MICROBATCHES, LAYERS = 16, 16, 8, 8
TIMEOUT_S = 60.0


class Script(NamedTuple):
    """What a rank does.

    num_steps: the number of steps. pause_s: how long to sleep after each step. kill_before: the step before which the
    process kills itself. leave_before: the step before which it leaves. wait_before: the step before which it waits,
    as the first rank, until a process has joined or asks to join. None: never.
    kind: the kind of the pipeline.
    """

    num_steps: int = 16
    pause_s: float = 0.0
    kill_before: int | None = None
    leave_before: int | None = None
    wait_before: int | None = None
    kind: str = ""


class Tied(nn.Module):
    """A model whose first and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS - 2)))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))  # type: ignore[no-any-return]


class InPlace(torch.optim.SGD):
    """An optimizer of the old kind, which writes to gradients so that nobody sees it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data.add_(parameter.data, alpha=0.1)
        return super().step(closure)


class Loss(nn.Module):
    """A loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(output), target)


def model(kind: str = "") -> nn.Module:
    torch.manual_seed(0)
    if kind == "tied weights":
        return Tied()
    layers = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(LAYERS)
    )
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def in_groups(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two groups."""
    matrices = [parameter for parameter in params if parameter.dim() > 1]
    others = [parameter for parameter in params if parameter.dim() < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.01)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "": dict,
    "tied weights": dict,
    "a loss with weights": lambda: {"loss_fn": Loss()},
    "a scaler": lambda: {"numerics": Numerics(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))},
    "non-finite": lambda: {"numerics": Numerics(on_nonfinite="skip")},
    "two groups": lambda: {"optimizer": in_groups},
    "momentum": lambda: {"optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)},
    "writes to gradients": lambda: {"optimizer": lambda params: InPlace(params, lr=0.05)},
    "data changed by hand": dict,
    "rates by stage": dict,
    "compile": lambda: {"compile": True},
    "checkpoint": lambda: {"checkpoint": "always"},
    "zb-v": lambda: {"schedule": "zb-v"},
    "dualpipe-v": lambda: {"schedule": "dualpipe-v"},
    "interleaved-1f1b": lambda: {"schedule": "interleaved-1f1b"},
    "auto": lambda: {"schedule": "auto"},
    "searched": lambda: {"schedule": "searched"},
}


def options(kind: str = "") -> dict[str, Any]:
    """Return the options of the pipeline in every process."""
    return {
        "loss_fn": nn.functional.mse_loss,
        "schedule": "1f1b",
        "num_microbatches": MICROBATCHES,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "numerics": Numerics(clip_grad_norm=0.5),
        "seed": 3,
        **KINDS[kind](),
    }


def member(folder: str, rank: int, count: int, port: int, script: Script) -> None:
    """Run a rank with which the job begins."""
    store = distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT_S))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    _run(Path(folder), script, init_device_mesh("cpu", (count,), mesh_dim_names=("pp",)))


def newcomer(folder: str, script: Script) -> None:
    """Run a process that joins the job."""
    _run(Path(folder), script, None)


def _run(folder: Path, script: Script, mesh: Any) -> None:
    """Write the losses of this process, and a digest of the weights after the last step, to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: list[Recovered] = []
    try:
        distributed_options = Distributed(
            timeout=TIMEOUT_S,
            redundancy="neighbour",
            on_failure="recover",
            on_recovery=told.append,
            rendezvous=folder / "job",
        )
        x, _ = batch(0)
        pipe = Pipeline(
            model(script.kind),
            x[: ROWS // MICROBATCHES],
            mesh=mesh,
            distributed=distributed_options,
            **options(script.kind),
        )
        (folder / f"{os.getpid()}.ready").touch()
        found = _trained(pipe, script, told)
        found["first"] = 0 if mesh is not None else told[0].step
        found["told"] = [str(one).rpartition("; ")[0] for one in told]
    except BaseException:
        found = {"error": traceback.format_exc()}
    file = folder / f"{os.getpid()}.new"
    file.write_text(json.dumps(found))
    file.rename(folder / f"{os.getpid()}.done")


def _trained(pipe: Pipeline, script: Script, told: Sequence[Recovered]) -> dict[str, Any]:
    losses: dict[int, float] = {}
    for step in range(pipe._running.step, script.num_steps):
        if step == script.kill_before:
            os.kill(os.getpid(), 9)
        if step == script.leave_before:
            pipe.leave()
            return {"losses": losses}
        if step == script.wait_before and distributed.get_rank() == 0:
            assert pipe._recovery is not None
            while not (pipe._recovery._joining.num_waiting() or any(one.joined for one in told)):
                time.sleep(0.01)
        change_by_hand(pipe, script.kind, step)
        x, y = batch(step)
        losses[step] = pipe.step(x, target=y).item()
        time.sleep(script.pause_s)
    weights = pipe.full_state_dict()
    pipe.close()
    return {"losses": losses, "weights": digest(weights)}


def change_by_hand(pipe: Pipeline, kind: str, step: int) -> None:
    """Change weights or learning rates before a step, as a user's code may do."""
    if kind == "data changed by hand" and step == 1:
        for parameter in pipe.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    if kind == "rates by stage":
        for optimizer in pipe.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * 0.9**step


def undisturbed(num_steps: int, kind: str = "") -> tuple[list[float], str]:
    """Return the losses of a run in one process, and a digest of its weights."""
    x, _ = batch(0)
    with Pipeline(model(kind), x[: ROWS // MICROBATCHES], devices=["cpu"] * 2, **options(kind)) as pipe:
        losses = []
        for step in range(num_steps):
            change_by_hand(pipe, kind, step)
            x, y = batch(step)
            losses.append(pipe.step(x, target=y).item())
        return losses, digest(pipe.full_state_dict())


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of the bits of some weights."""
    said = hashlib.sha256()
    for name in sorted(weights):
        said.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return said.hexdigest()
