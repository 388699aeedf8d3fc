"""Jobs for run_faults.py: each rank is a forked process that runs a training script, and one rank fails."""

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pipesched
from pipesched import Distributed, Pipeline
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.runtime import connected_rank
from pipesched.saving import manifest

WIDTH, ROWS, MICROBATCHES = 16, 8, 4
STORES = ("of its own", "rank 0")  # the process that runs the TCPStore: one of its own, or rank 0
FAULTS = ("raise", "SIGKILL", "SIGSTOP", "sys.exit(3)", "os._exit(0)", "hang", "poll", "spin", "full disk")
PHASES = (
    "tune",
    "before construction",
    "while capturing",
    "while measuring",
    "while connecting",
    "while measuring links",
    "in a collective",
    "first forward",
    "first backward",
    "later forward",
    "update",
    "evaluate",
    "save",
    "save in the background",
    "get_extra_state",
    "load",
    "set_extra_state",
    "state dict",
    "close",
)


#: The phases in which a run is saved or loaded.
SAVING = PHASES[PHASES.index("save") : PHASES.index("state dict")]


class Case(NamedTuple):
    """A fault to test.

    fault: one of FAULTS. phase: the part of the script in which the fault occurs, one of PHASES. rank: the rank that
    fails. store: one of STORES. replicas: the number of replicas. by: what makes the replicas: "fully_shard"; or
    "replicate", "zero=2" or "zero=3", for replicas of one pipeline; or "tensor", for planes of one pipeline; or "by
    hand", for planes whose layers call collectives themselves.
    """

    fault: str
    phase: str
    rank: int
    store: str = "of its own"
    num_ranks: int = 3
    replicas: int = 1
    by: str = "fully_shard"


class Fuse:
    """Makes this rank fail once.

    Args:
        fault: one of FAULTS, or a key of ``others``.
        phase: the part of the script in which the fault occurs; "" if this rank does not fail.
        said: the file to which the time of the fault is written.
        others: functions that cause further faults. Default: none.

    """

    def __init__(
        self, fault: str, phase: str, said: Path, others: Mapping[str, Callable[[], None]] | None = None
    ) -> None:
        self.phase, self._fault = phase, fault
        self._said = said
        self._others = others or {}

    def __deepcopy__(self, memo: Any) -> "Fuse":
        return self

    def at(self, phase: str) -> None:
        """Fail if ``phase`` is the phase of the case."""
        if not self.phase or phase != self.phase:
            return
        self.phase = ""
        self._said.write_text(json.dumps({"fault_s": time.time()}))
        if self._fault == "raise":
            raise ValueError("a fault")
        if self._fault in self._others:
            self._others[self._fault]()
            return
        if self._fault in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, self._fault))
            return
        if self._fault == "sys.exit(3)":
            sys.exit(3)
        elif self._fault == "os._exit(0)":
            os._exit(0)
        elif self._fault == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while self._fault == "spin":
            pass
        while self._fault == "poll":
            time.sleep(0.001)
        time.sleep(1000)


def can_happen(case: "Case") -> bool:
    """Return whether a fault can happen in a setup.

    A disk can be full only while something is written. pipesched does not save DTensors, and tunes only one pipeline.
    """
    if case.fault == "full disk" and case.phase not in ("save", "save in the background"):
        return False
    if case.phase in ("while measuring links", "in a collective"):
        return case.by == "tensor"
    if case.replicas > 1 and case.by == "fully_shard":
        return case.phase not in SAVING
    return case.replicas == 1 or case.phase != "tune"


class CallInBackward(torch.autograd.Function):
    """A copy of a tensor whose backward first calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return grad.clone(), None


class Layer(nn.Module):
    """A linear layer that can fail in its forward or in its backward."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fuse, self.names = fuse, ("", "")
        self.pause_s = 0.0
        self.group: Any = None  # over which the layer adds up a tensor

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        self.fuse.at(self.names[0])
        if self.group is not None:
            distributed.all_reduce(x.detach().clone(), group=self.group)
        return CallInBackward.apply(self.linear(x), lambda: self.fuse.at(self.names[1]))  # type: ignore[no-untyped-call,no-any-return]

    def get_extra_state(self) -> Any:
        self.fuse.at("get_extra_state")
        return 1

    def set_extra_state(self, state: Any) -> None:
        self.fuse.at("set_extra_state")

    def __deepcopy__(self, memo: Any) -> "Layer":
        return self


def run_rank(case: Case, rank: int, port: int, timeout_s: float, said: Path) -> None:
    """Run the script of a rank: make a pipeline, train, evaluate, gather the state, and close."""
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60)) if port else None
    if store is None:
        store = store_in_rank_0(rank, said)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks)
    names = ("tp" if case.by in ("tensor", "by hand") else "dp", "pp")
    mesh = init_device_mesh("cpu", (case.replicas, case.num_ranks // case.replicas), mesh_dim_names=names)
    fuse = Fuse(case.fault, case.phase if rank == case.rank else "", said)
    num_stages = case.num_ranks // case.replicas
    torch.manual_seed(0)
    layers = [Layer(fuse) for _ in range(2 * num_stages)]
    model = nn.Sequential(*layers)
    x = torch.randn(ROWS, WIDTH)

    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            fuse.at("update")
            return super().step(closure)

    def sgd(params: list[Any]) -> torch.optim.Optimizer:
        if case.by != "tensor":
            return SGD(params, lr=0.01)
        made = torch.optim.SGD(params, lr=0.01)  # split weights allow no subclass
        made.register_step_pre_hook(lambda *_: fuse.at("update"))
        return made

    choices: dict[str, Any] = {}
    if case.replicas > 1 and case.by == "fully_shard":
        # Fixed boundaries, because the pipelines could measure different times and cut differently.
        choices["boundaries"] = list(range(2, 2 * num_stages, 2))
        choices["wrap"] = lambda module, stage: fully_shard(module, mesh=mesh["dp"])

    run = TensorGroup._run
    in_collective = ["while measuring links"]
    TensorGroup._run = lambda *args: (fuse.at(in_collective[0]), run(*args))[1]  # type: ignore[method-assign]
    split = {"*.linear": "column-gathered"} if case.by == "tensor" else None

    if case.by == "by hand":
        choices["boundaries"] = list(range(2, 2 * num_stages, 2))
        for layer in layers:
            layer.group = mesh["tp"].get_group()

    def name(forward: str, backward: str = "") -> None:
        for layer in layers:
            layer.names = forward, backward

    distributed.barrier()
    time.sleep(0.2)  # torch's own requests to the store at the start are not tested
    fuse.at("before construction")
    name("while capturing")
    connect = connected_rank.time_offset
    connected_rank.time_offset = lambda *args: (fuse.at("while connecting"), connect(*args))[1]  # type: ignore[assignment,attr-defined]
    if case.phase == "while measuring":
        for layer in layers:
            layer.pause_s = 0.01 if mesh["pp"].get_local_rank() == 0 else 0.0
        signal.signal(signal.SIGALRM, lambda *_: fuse.at("while measuring"))
        signal.setitimer(signal.ITIMER_REAL, 0.4)
    if case.phase == "tune":
        name("tune")
        options = {"loss_fn": nn.functional.mse_loss, "target": x[:2], "timeout": timeout_s}
        pipesched.tune(model, x[:2], mesh=mesh["pp"], batch_size=ROWS, schedule="1f1b", **options)
    pipe = Pipeline(
        model,
        x[: ROWS // MICROBATCHES],
        loss_fn=nn.functional.mse_loss,
        mesh=mesh["pp"] if case.by == "fully_shard" else mesh,
        schedule="1f1b",
        num_stages=num_stages,
        num_microbatches=MICROBATCHES,
        optimizer=sgd,
        distributed=Distributed(
            timeout=timeout_s,
            zero=int(case.by[-1]) if case.by.startswith("zero") else 0,
            tensor_parallel=split,
        ),
        seed=0,
        **choices,
    )
    signal.setitimer(signal.ITIMER_REAL, 0)
    in_collective[0] = "in a collective"
    for layer in layers:
        layer.pause_s = 0.0
    for phases in (("first forward", "first backward"), ("", ""), ("later forward", "")):
        name(*phases)
        pipe.step(x, target=x)
    name("evaluate")
    pipe.evaluate(x, target=x).item()
    if case.phase in SAVING:
        save_and_load(pipe, case, fuse, str(said.with_name("checkpoint")), lambda: pipe.step(x, target=x))
    fuse.at("state dict")
    pipe.full_state_dict()
    fuse.at("close")
    pipe.close()


def save_and_load(pipe: Pipeline, case: Case, fuse: Fuse, folder: str, step: Callable[[], Any]) -> None:
    """Save twice, the second time in the background, and load. A fault of a disk occurs when a file is flushed."""
    flush, hash_of = os.fsync, manifest.hash_of
    phase = case.phase if case.phase == "save in the background" else "save"
    os.fsync = lambda file: (fuse.at(phase), flush(file))[1]
    manifest.hash_of = lambda path: (fuse.at("load"), hash_of(path))[1]
    if phase == "save":
        pipe.save(folder)
    pipe.save(folder, asynchronous=True)
    for _ in range(3):
        step()
    pipe.load(folder)


def store_in_rank_0(rank: int, said: Path, host: str = "127.0.0.1") -> Any:
    """Return a store that rank 0 hosts. Its port is told in a file beside ``said``."""
    file = said.with_name("port")
    if rank == 0:
        store = distributed.TCPStore(host, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return distributed.TCPStore(host, int(file.read_text()), None, False, timedelta(seconds=60))


def as_script(job: Callable[[], None], said: Path) -> int:
    """Run a rank's script in this process, and return its exit code. Write error and time to the file ``said``."""
    try:
        job()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException as error:
        if not said.exists():
            said.write_text(json.dumps({"raised_s": time.time(), "error": f"{type(error).__name__}: {error}"}))
        traceback.print_exc()
        return 1
    said.write_text(json.dumps({"ended_s": time.time()})) if not said.exists() else None
    return 0
