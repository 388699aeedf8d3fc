"""Jobs for run_losses.py: each rank is a forked process that trains, and one or two ranks are lost on the way."""

import gc
import json
import logging
import os
import socket
import struct
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched import Distributed, Numerics, Pipeline
from pipesched.elastic.recovered import Recovered
from pipesched.elastic.redundancy import Redundancy
from pipesched.elastic.state_transfer import MovedTensors
from pipesched.elastic.survivors import Survivors, may_go_on
from pipesched.errors import CheckpointError, RankLost
from pipesched.pipeline.regrouping import Regrouping
from pipesched.planning.plan import Plan
from pipesched.runtime.coordination import failure_notices
from pipesched.runtime.rank_grid import Inputs
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.transport.sockets import SocketPort
from tests.support.jobs.faults import CallInBackward, Fuse, store_in_rank_0
from tests.support.network_namespaces import Hosts
from tests.support.sleeping_layers import waited

WIDTH, ROWS, MICROBATCHES, LAYERS = 16, 16, 4, 8
STEPS, AT = 8, 3  # the number of steps, and the step in or before which a rank is lost
FORWARD_S = 0.005  # each layer sleeps for this long in its forward, and for twice as long in its backward
PATIENCE_S = 60.0  # how long a rank waits for a file
#: What may happen to a rank. The last four concern links. "link": the connections with the next rank end, and can be
#: made anew, so nobody is lost. "link, alarms too": the alarms cannot reach each other, either. "cable": no byte passes
#: to the host of the next rank. "all cables": no byte passes to any other host.
FAULTS = (
    "SIGKILL",
    "SIGSTOP",
    "sys.exit(3)",
    "os._exit(0)",
    "raise",
    "link",
    "link, alarms too",
    "cable",
    "all cables",
)
#: Where it happens: in a forward, a backward, a weight gradient or an update; after or before a copy is sent; between
#: two steps; in the transfer of a replan; in a save.
MOMENTS = ("F", "B", "W", "update", "copy sent", "copy", "between steps", "replan", "save")
#: Where a second rank may be lost: before it agrees with the others, before it connects anew, while state moves, or
#: while the lost step runs again.
IN_RECOVERY = ("agreeing", "connecting", "moving", "again")
_PAIRED = ("link", "link, alarms too", "cable")
_CABLES = ("cable", "all cables")


class LossCase(NamedTuple):
    """A loss to test.

    fault: one of FAULTS; "" if nothing is lost. moment: one of MOMENTS. rank: the rank that is lost. store: the process
    that runs the store of torch's default group: "rank 0", "of its own", or "env://". second: a second rank that is
    lost; None if there is none. second_moment: one of MOMENTS or of IN_RECOVERY. num_ranks, replicas: the mesh. inputs:
    the ranks that pass batches.
    """

    fault: str
    moment: str
    rank: int
    store: str = "rank 0"
    second: int | None = None
    second_moment: str = ""
    num_ranks: int = 4
    replicas: int = 1
    inputs: Inputs = "all"

    @property
    def peer(self) -> int | None:
        """The rank at the other end of a link that is cut."""
        return (self.rank + 1) % self.num_ranks if self.fault in _PAIRED else None

    @property
    def num_lost(self) -> int:
        """The number of ranks that do not go on."""
        if self.fault == "link":
            return 0
        return self.num_ranks if self.is_refused else len(self.victims)

    @property
    def is_refused(self) -> bool:
        """Whether nobody may go on: a layer is lost with its copy, or the others may be the larger part."""
        if self.second_moment in IN_RECOVERY:
            return False
        live = [rank for rank in range(self.num_ranks) if rank not in self.victims]
        if self.fault == "SIGSTOP" and not may_go_on(live, self.victims):  # nobody can know that a rank is frozen
            return True
        near = self.second is not None and (self.second - self.rank) % self.num_ranks in (1, self.num_ranks - 1)
        return near and self.replicas == 1

    @property
    def over_hosts(self) -> bool:
        """Whether each rank is on a host of its own."""
        return self.fault in _CABLES

    @property
    def victims(self) -> list[int]:
        """The ranks that fail. Of the two ends of a link, either may go on."""
        return [rank for rank in (self.rank, self.second) if rank is not None] if self.fault else []

    @property
    def schedule(self) -> str:
        """The schedule; one with weight gradients if a rank is lost there."""
        return "zb-h1" if "W" in (self.moment, self.second_moment) else "1f1b"


class Files(NamedTuple):
    """The files of a case."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def hosts(self) -> Path:
        """Contains the names of the hosts, if each rank is on its own."""
        return self.folder / "hosts"

    @property
    def cut(self) -> Path:
        """Exists once a link is cut."""
        return self.folder / "cut"

    @property
    def over(self) -> Path:
        """Exists once the ranks may end."""
        return self.folder / "over"

    def process(self, rank: int) -> Path:
        return self.folder / f"{rank}.process"

    def fault(self, rank: int) -> Path:
        return self.folder / f"{rank}.fault"

    def done(self, rank: int) -> Path:
        """Exists once a rank has run all steps; contains the losses and the times."""
        return self.folder / f"{rank}.done"

    def end(self, rank: int) -> Path:
        """Exists once a rank has ended; contains its error."""
        return self.folder / f"{rank}.end"


def write(file: Path, value: Any) -> None:
    """Write a file that exists only once it is complete."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.rename(file)


def wait_for(*files: Path) -> None:
    """Wait until files exist."""
    end_s = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < end_s, files
        time.sleep(0.01)


class Hooks:
    """Calls the fuse of a rank at each moment. A forward or a backward is one of the second micro-batch or later."""

    def __init__(self, fuse: Fuse, moment: str) -> None:
        self._fuse = fuse
        self._moment = moment
        self._counts: Counter[str] = Counter()

    def __deepcopy__(self, memo: Any) -> "Hooks":
        return self

    def arm(self) -> None:
        """Let this rank fail at its moment from now on."""
        self._counts.clear()
        self._fuse.phase = self._moment

    def at(self, moment: str) -> None:
        self._counts[moment] += 1
        if moment not in ("F", "B", "W") or self._counts[moment] > LAYERS // 2:
            self._fuse.at(moment)

    def attach(self) -> None:
        """Let the parts of pipesched that are not a user's code call the fuse. For the lost rank's process only."""
        _call_around(Stage, "weight_grad", before=lambda *_: self.at("W"))
        _call_around(Redundancy, "_commit", before=lambda *args: self.at("copy") if args[-1] == AT + 1 else None)
        _call_around(Redundancy, "_sent", after=lambda *_: self.at("copy sent"))
        _call_around(MovedTensors, "_run_round", after=lambda *_: self.at("replan"))
        _call_around(MovedTensors, "__init__", after=lambda *_: self.at("moving"))
        _call_around(Survivors, "agree", before=lambda *_: (self.arm_for_recovery(), self.at("agreeing")))
        _call_around(Regrouping, "connect", before=lambda *_: self.at("connecting"))
        _call_around(Regrouping, "take_over", after=lambda *_: self.at("again"))

    def arm_for_recovery(self) -> None:
        if self._moment in IN_RECOVERY:
            self.arm()


def _call_around(
    kind: type, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    own = getattr(kind, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = own(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(kind, name, call)


class Layer(nn.Module):
    """A layer that sleeps, and calls the fuse in its forward and in its backward."""

    def __init__(self, hooks: Hooks, seconds: float) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.hooks, self.seconds = hooks, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.hooks.at("F")
        x = waited(self.drop(self.norm(self.linear(x)).tanh()), self.seconds)
        return CallInBackward.apply(x, partial(self.hooks.at, "B"))  # type: ignore[no-untyped-call,no-any-return]


def model(hooks: Hooks, seconds: float = FORWARD_S) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(hooks, seconds) for _ in range(LAYERS)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def plan_of(num_ranks: int, schedule: str, hooks: Hooks) -> Plan:
    """Return a plan with other boundaries than those with which the run begins."""
    inner = [LAYERS * stage // num_ranks for stage in range(1, num_ranks)]
    cuts = [cut - (index == 0) for index, cut in enumerate(inner)]
    x, _ = batch(0)
    options: dict[str, Any] = {"num_microbatches": MICROBATCHES, "boundaries": cuts, "devices": ["cpu"] * num_ranks}
    loss_fn = nn.functional.mse_loss
    with Pipeline(model(hooks, 0.0), x[: ROWS // MICROBATCHES], loss_fn=loss_fn, schedule=schedule, **options) as pipe:
        return pipe.plan


class Times(logging.Handler):
    """Keeps the times at which this rank notices losses, has recovered, and ends a call."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.noticed_s: list[float] = []
        self.ended_s: list[float] = []
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if " stopped: " in text or text.startswith("before step "):
            self.said.append(f"{record.created:.3f} {text}")
        if " stopped: " in text:
            self.noticed_s.append(record.created)


def run_rank(case: LossCase, rank: int, port: int, timeout_s: float, files: Files) -> None:
    """Run the script of a rank: train, on some ranks until they fail, and wait until all may end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    files.process(rank).write_text(str(os.getpid()))
    times = Times()
    logging.getLogger("pipesched").addHandler(times)
    logging.getLogger("pipesched").setLevel(logging.INFO)
    moment = case.second_moment if rank == case.second else case.moment
    link = Link(case, rank, files)
    ways = dict.fromkeys((*_PAIRED, *_CABLES), link.cut)
    hooks = Hooks(Fuse(case.fault, "", files.fault(rank), ways), moment)
    if rank in case.victims:
        hooks.attach()
    _init_group(case, rank, port, files)
    mesh = init_device_mesh("cpu", (case.replicas, case.num_ranks // case.replicas), mesh_dim_names=("dp", "pp"))
    share = Share(mesh["dp"].get_local_rank(), case.replicas)
    pipe = Pipeline(
        model(hooks),
        batch(0)[0][: ROWS // MICROBATCHES],
        loss_fn=nn.functional.mse_loss,
        mesh=mesh if case.replicas > 1 else mesh["pp"],
        schedule=case.schedule,
        num_microbatches=MICROBATCHES // case.replicas,
        num_stages=case.num_ranks // case.replicas,
        optimizer=_optimizer(hooks),
        numerics=Numerics(
            reduction_order="tree" if case.replicas > 1 else "sequential",
            batch_norm="mini-batch" if case.replicas > 1 else "micro-batch",
        ),
        seed=3,
        distributed=Distributed(
            timeout=timeout_s,
            redundancy="neighbour",
            on_failure="recover",
            on_recovery=share.follow,
            inputs=case.inputs,
        ),
    )
    train = Training(case, pipe, files, times, hooks, rank, share)
    link.pipe = pipe
    losses = train.run(link)
    write(
        files.done(rank), {"losses": losses, "noticed_s": times.noticed_s, "ended_s": times.ended_s, "said": times.said}
    )
    wait_for(files.over)
    pipe.close()


def _optimizer(hooks: Hooks) -> Callable[[Any], torch.optim.Optimizer]:
    class AdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if threading.current_thread() is threading.main_thread():  # not the copy that a neighbour holds
                hooks.at("update")
            return result

    return lambda params: AdamW(params, lr=0.01)


def _init_group(case: LossCase, rank: int, port: int, files: Files) -> None:
    said, count, limit = files.folder / str(rank), case.num_ranks, timedelta(seconds=60)
    if case.over_hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = f"to{(rank + 1) % count}"
        store = store_in_rank_0(rank, said, Hosts.address(0))
    elif case.store == "env://":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
        distributed.init_process_group("gloo")
        return
    elif case.store == "rank 0":
        store = store_in_rank_0(rank, said)
    else:
        store = distributed.TCPStore("127.0.0.1", port, None, False, limit)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)


class Share:
    """The part of each batch that this process's replica gets, as a data loader divides it."""

    def __init__(self, replica: int, num_replicas: int) -> None:
        self._replica, self._num_replicas = replica, num_replicas

    def follow(self, recovered: Recovered) -> None:
        self._replica, self._num_replicas = recovered.replica, recovered.num_replicas

    def of(self, whole: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.chunk(self._num_replicas)[self._replica] for tensor in whole]


class Training:
    """The loop of the user's script."""

    def __init__(
        self, case: LossCase, pipe: Pipeline, files: Files, times: Times, hooks: Hooks, rank: int, share: "Share"
    ) -> None:
        self._case, self._pipe, self._files, self._times, self._hooks = case, pipe, files, times, hooks
        self._share = share
        self._fails = rank in case.victims
        self._moments = {case.moment, case.second_moment}
        replans = "replan" in self._moments
        counts = range(1, case.num_ranks + 1) if replans else ()
        self._plans = {count: plan_of(count, case.schedule, Hooks(Fuse("", "", Path()), "")) for count in counts}

    def run(self, link: "Link") -> list[float]:
        """Run all steps, and return their losses."""
        losses = []
        for step in range(STEPS):
            if step == AT:
                link.watch()
                if self._fails:
                    self._hooks.arm()
                self._between()
            losses.append(self._step(step).item())
            self._times.ended_s.append(time.time())
        if self._case.fault == "SIGSTOP" or "save" in self._moments:
            self._repeated(self._save)
            assert self._pipe.load(str(self._files.checkpoint)).step == STEPS
        return losses

    def _step(self, step: int) -> Tensor:
        if self._case.inputs == "all":
            x, y = self._share.of(batch(step))
            return self._pipe.step(x, target=y)
        try:
            return self._step_of_first(step)
        except RankLost as error:  # rank 0 was lost before it called step
            if "call step again" not in str(error):
                raise
            return self._step_of_first(step)

    def _step_of_first(self, step: int) -> Tensor:
        if distributed.get_rank():
            return self._pipe.step()
        x, y = batch(step)
        return self._pipe.step(x, target=y)

    def _between(self) -> None:
        self._hooks.at("between steps")
        if "replan" in self._moments:
            self._repeated(lambda: self._pipe.replan(self._plans[distributed.get_world_size()]))
        if "save" in self._moments:
            flush = os.fsync
            os.fsync = lambda file: (self._hooks.at("save"), flush(file))[1]  # type: ignore[assignment]
            self._repeated(self._save)
            os.fsync = flush

    def _save(self) -> None:
        self._pipe.save(str(self._files.checkpoint))

    def _repeated(self, call: Callable[[], Any]) -> None:
        """Call a method, again after each loss."""
        while True:
            try:
                call()
                break
            except RankLost:
                self._pipe.recover()
            except CheckpointError:  # all ranks raise it if one has failed to write
                if self._fails and self._case.fault != "SIGSTOP":
                    raise
        self._times.ended_s.append(time.time())


class Link:
    """The links of a rank, which may be cut while both ends live."""

    def __init__(self, case: LossCase, rank: int, files: Files) -> None:
        self._case, self._rank, self._files = case, rank, files
        self._other = None if case.peer is None else {case.rank: case.peer, case.peer: case.rank}.get(rank)
        self.pipe: Any = None

    def watch(self) -> None:
        """At both ends of a link: refuse new connections once it is cut."""
        if self._other is None or self._case.over_hosts:
            return
        before = {id(one) for one in gc.get_objects() if isinstance(one, SocketPort)}
        connect, other, cut = SocketPort._connect, self._other, self._files.cut

        def connected(port: SocketPort, to: int, *args: Any) -> Any:
            if to == other and id(port) in before and cut.exists():
                raise ConnectionRefusedError
            return connect(port, to, *args)

        SocketPort._connect = connected  # type: ignore[method-assign]
        if self._case.fault == "link":
            return
        begin, address = failure_notices._NoticeCall.begin, self._alarm(other)

        def begun(call: Any, selector: Any) -> None:
            if call.address != address or not cut.exists():
                begin(call, selector)

        failure_notices._NoticeCall.begin = begun  # type: ignore[method-assign]

    def _alarm(self, rank: int) -> Any:
        return self.pipe._recovery._connected.alarm.addresses[rank]

    def cut(self) -> None:
        """Cut the link, or all links of this rank's host."""
        self._files.cut.touch()
        if self._case.over_hosts:
            others = [self._other] if self._other is not None else range(self._case.num_ranks)
            name = json.loads(self._files.hosts.read_text())[self._rank]
            for other in others:
                if other != self._rank:
                    subprocess.run(["ip", "-n", name, "link", "set", f"to{other}", "down"], check=True)
            return
        assert self._other is not None
        spared = {self._alarm(rank).port for rank in (self._rank, self._other)} if self._case.fault == "link" else set()
        for connection in _connections_to(int(self._files.process(self._other).read_text())):
            with connection:
                tcp = connection.family == socket.AF_INET
                if not tcp or not {connection.getsockname()[1], connection.getpeername()[1]} & spared:
                    connection.shutdown(socket.SHUT_RDWR)


def _connections_to(process: int) -> Iterator[socket.socket]:
    """Yield copies of this process's connections to another process of this machine."""
    ports = _local_ports(process)
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            peer = connection.getpeername()
            if connection.family == socket.AF_UNIX:
                found = (
                    struct.unpack("@iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                    == process
                )
            else:
                found = peer[1] in ports
        except OSError:
            found = False
        if found:
            yield connection
        else:
            connection.close()


def _local_ports(process: int) -> set[int]:
    """Return the TCP ports of the sockets of a process."""
    inodes = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        target = os.readlink(file)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[9] in inodes}
