"""Collectives: connects the simulated devices of several processes, by NCCL's rules of order.

A group is made by `init_process_group("cpu:gloo,sim:simulated")`; two ranks are also connected by
`pipesched.devices.collectives.pair_maker`. The calls of a communicator run one after another, on a stream that waits
for the current stream at the call. A call without ``async_op`` runs on the current stream, as in torch since 2.8. A
work holds its tensors until a stream waits for it; nothing is recorded with ``record_stream``.

All bytes travel through the store of the group. Call number k of a rank must fit call number k of the other ranks: the
same collective, or a send and a receive. If it does not, the devices would wait for each other forever, and an error
says so. A host waits for the other hosts in a receive, in a collective, and where it waits for a send.
"""

import ctypes
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from tests.simulated.accelerator import Accelerator, start
from tests.simulated.happens_before import stream_key
from tests.simulated.lanes import Stamp

__all__ = ["BACKEND", "CUT_OFF", "CollectiveError", "SimulatedGroup", "register"]

BACKEND = "cpu:gloo,sim:simulated"
#: The sends that were in flight when their group was aborted.
CUT_OFF: list[str] = []
_FITS = {"send": "receive", "receive": "send"}
_LONGEST_PAUSE_S = 1e-3


class CollectiveError(RuntimeError):
    """The calls of several ranks do not fit, or a rank makes no call."""


class Call(NamedTuple):
    """A call of one rank. Its stream begins at the virtual time `ready_s`."""

    name: str
    nbytes: int
    ready_s: float

    def __str__(self) -> str:
        return f"{self.name} of {self.nbytes} bytes"


class Communicator:
    """The calls of some ranks, one after another, and the stream that runs them.

    Args:
        store: carries the calls. Each communicator needs a store of its own.
        rank: this rank.
        size: the number of ranks.
        timeout_s: how long a rank waits for the calls of the others.

    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.others = [other for other in range(size) if other != rank]
        self._store = store
        self._timeout_s = timeout_s
        self._number = 0
        #: Each of them checks that an earlier send has been received.
        self.unmet: list[Callable[[], object]] = []
        self.last_send: SimulatedWork | None = None
        self._stream: torch.Stream | None = None
        self._aborted = threading.Event()

    def stream(self, device: torch.device) -> torch.Stream:
        """Return the communicator's own stream. Each rank has one device."""
        if self._stream is None:
            self._stream = torch.Stream(device=device)
        return self._stream

    def post(self, call: Call, contents: bytes = b"") -> int:
        """Make the next call, and return its number. The first call of a rank waits for the first calls of all."""
        if not self._number:
            self._store.set(f"here/{self.rank}", "")
            for other in self.others:
                self._wait(f"here/{other}", f"rank {other} has not used this communicator; rank {self.rank} is at")
        number = self._number
        self._number += 1
        header = json.dumps(call).encode()
        self._store.set(f"{number}/{self.rank}", len(header).to_bytes(4, "little") + header + contents)
        return number

    def has(self, number: int, other: int) -> bool:
        """Whether another rank has made its call with this number."""
        return bool(self._store.check([f"{number}/{other}"]))

    def read(self, number: int, own: Call, other: int) -> tuple[Call, bytes]:
        """Wait for another rank's call with this number, and return it with its contents."""
        key = f"{number}/{other}"
        self._wait(key, f"rank {other} has not made its call {number}; call {number} of rank {self.rank} is {own}, in")
        value = self._store.get(key)
        start = 4 + int.from_bytes(value[:4], "little")
        call = Call(*json.loads(value[4:start]))
        if call.name != _FITS.get(own.name, own.name) or call.nbytes != own.nbytes:
            raise CollectiveError(
                f"the calls of a communicator must fit, or devices wait forever; call {number} of rank {self.rank} is "
                f"{own}, but that of rank {other} is {call}; make the calls in the same order in all ranks"
            )
        return call, value[start:]

    def meet_earlier(self) -> None:
        """Wait until the other rank has received all earlier sends, before which it makes no later call."""
        while self.unmet:
            self.unmet.pop(0)()

    def forget(self, number: int, rank: int) -> None:
        """Remove a call that all ranks have read."""
        self._store.delete_key(f"{number}/{rank}")

    def abort(self) -> None:
        """End all waits of this rank."""
        self._aborted.set()

    def _wait(self, key: str, missing: str) -> None:
        end_s = time.monotonic() + self._timeout_s
        pause_s = 1e-5
        while not self._store.check([key]):
            if self._aborted.is_set():
                raise CollectiveError("the communicator was aborted")
            if time.monotonic() > end_s:
                raise CollectiveError(
                    f"all ranks must make the calls of a communicator, or devices wait forever; {missing} its call "
                    f"{self._number} after {self._timeout_s:g} s; make the same calls in all ranks"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Lane(NamedTuple):
    """The stream on which a call runs, and the thread that launches it."""

    device: torch.device
    thread: int
    key: int


class SimulatedWork(distributed.Work):
    """A call on the device. Holds the tensors until a stream waits for it.

    Args:
        accelerator: the simulation.
        lane: where the call runs.
        stamp: the end of the call.
        tensors: the tensors of the call.
        meet: waits for the other rank, and returns the virtual time at which both have begun. None: they have met.
        has_peer: whether ``meet`` need not wait.

    """

    def __init__(
        self,
        accelerator: Accelerator,
        lane: _Lane,
        stamp: Stamp,
        tensors: Sequence[Tensor],
        *,
        meet: Callable[[], float] | None = None,
        has_peer: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._judge = accelerator.judge
        self._thread = accelerator.backend.host_thread
        self._device = lane.device
        self._stamp = stamp
        self._tensors = tuple(tensors)
        self._meet = meet
        self._has_peer = has_peer

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait. The host waits until the other rank has made its call."""
        self.meet()
        stream = torch.accelerator.current_stream(self._device)
        self._judge.stream_waits(self._thread(), _key(stream), self._stamp)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended at the virtual time of this thread, which knows that from then on."""
        if not self._has_peer():
            return False
        self.meet()
        thread = self._thread()
        if self._judge.host_time_s(thread) < self._stamp.time_s:
            return False
        self._judge.take_over(thread, self._stamp)
        self._tensors = ()
        return True

    def lets_go(self) -> bool:
        """Whether the tensors are free: a stream has waited for the call, or this thread knows that it is done."""
        return not self._tensors or self.is_known(self._thread())

    def is_known(self, thread: int) -> bool:
        """Whether a thread knows that the call is done."""
        return self._judge.knows(thread, self._stamp)

    def __str__(self) -> str:
        return f"operation {self._stamp.number} of {self._stamp.stream}"

    def meet(self) -> None:
        """Wait until the other rank has made its call."""
        if self._meet is not None:
            begun_s = self._meet()
            self._meet = None
            self._has_peer = lambda: True
            self._stamp = self._stamp._replace(time_s=max(begun_s, self._stamp.time_s))


def _of_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method for device tensors, which hands calls with tensors of the CPU to gloo."""

    @functools.wraps(method)
    def called(self: "SimulatedGroup", *args: Any) -> Any:
        first = args[0]
        while not isinstance(first, Tensor):
            first = first[0]
        if first.is_cpu:
            return getattr(self.host, method.__name__)(*args)
        return method(self, *args)

    return called


class SimulatedGroup(distributed.ProcessGroup):
    """A process group whose tensors may be on a simulated device, or on the CPU if it has a `host` group.

    Args:
        store: carries all calls.
        rank: this rank.
        size: the number of ranks.
        timeout_s: how long a rank waits for the calls of the others.
        host: a group for tensors of the CPU. Default: None (there are none).

    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, host: Any = None) -> None:
        super().__init__(rank, size)
        self._store = store
        self.host = host
        if host is not None:  # also gives the group its name
            self._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, host)
            self._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)  # torch 2.15 asks it for its name
        self._accelerator = start()
        self._own_rank, self._own_size = rank, size
        self._make = functools.partial(_communicator, store, timeout_s)
        self._collectives = self._make("all", rank, size)
        self._pairs: dict[int, Communicator] = {}  # the sends and receives with another rank have a communicator
        self._held: list[SimulatedWork] = []

    # ---- collectives ----
    @_of_device
    def allreduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        (tensor,) = tensors
        reduction = _reduction(opts.reduceOp)

        def place(parts: list[Tensor]) -> None:
            _memory(tensor).copy_(_bytes(reduction.of([part.view(tensor.dtype) for part in parts])))

        return self._run(f"all_reduce to the {reduction.name}", opts.asyncOp, [tensor], [tensor], tensor, place)

    @_of_device
    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        (tensor,) = tensors
        root = opts.rootRank
        is_root = root == self._own_rank

        def place(parts: list[Tensor]) -> None:
            _memory(tensor).copy_(parts[root])

        reads, writes = ([tensor], []) if is_root else ([], [tensor])
        return self._run(f"broadcast from {root}", opts.asyncOp, reads, writes, tensor, place, gives=is_root)

    @_of_device
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:

        def place(parts: list[Tensor]) -> None:
            for output, part in zip(outputs[0], parts, strict=True):
                _memory(output).copy_(part)

        return self._run("all_gather", opts.asyncOp, inputs, outputs[0], inputs[0], place)

    @_of_device
    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any) -> SimulatedWork:

        def place(parts: list[Tensor]) -> None:
            _memory(output).copy_(torch.cat(parts))

        return self._run("all_gather", opts.asyncOp, [given], [output], given, place)

    @_of_device
    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> SimulatedWork:
        reduction = _reduction(opts.reduceOp)

        def place(parts: list[Tensor]) -> None:
            own = [part.view(given.dtype).chunk(self._own_size)[self._own_rank] for part in parts]
            _memory(output).copy_(_bytes(reduction.of(own)))

        return self._run(f"reduce_scatter of the {reduction.name}", opts.asyncOp, [given], [output], given, place)

    @_of_device
    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> SimulatedWork:
        if output_sizes or input_sizes:
            raise NotImplementedError("simulated devices exchange equal parts only")

        def place(parts: list[Tensor]) -> None:
            _memory(output).copy_(torch.cat([part.chunk(self._own_size)[self._own_rank] for part in parts]))

        return self._run("all_to_all", opts.asyncOp, [given], [output], given, place)

    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """Wait for the hosts of all ranks; no stream waits."""
        return self.host.barrier() if opts is None else self.host.barrier(opts)

    # ---- messages ----
    @_of_device
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> SimulatedWork:
        (tensor,) = tensors
        communicator = self._pair(to)
        lane = self._lane(tensor, communicator)
        call = self._call("send", tensor, lane)
        number = communicator.post(call, bytes(_memory(tensor).numpy()))
        stamp = self._report("send", lane, [tensor], [], tensor)
        other = communicator.others[0]
        cost_s = stamp.time_s - call.ready_s

        def meet() -> float:
            met, _ = communicator.read(number, call, other)
            communicator.forget(number, other)
            return met.ready_s + cost_s

        work = SimulatedWork(
            self._accelerator, lane, stamp, tensors, meet=meet, has_peer=lambda: communicator.has(number, other)
        )
        communicator.unmet.append(work.meet)
        communicator.last_send = work
        return self._hold(work)

    @_of_device
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> SimulatedWork:
        (tensor,) = tensors
        communicator = self._pair(source)
        lane = self._lane(tensor, communicator)
        call = self._call("receive", tensor, lane)
        number = communicator.post(call)
        other = communicator.others[0]
        communicator.meet_earlier()
        met, contents = communicator.read(number, call, other)
        communicator.forget(number, other)
        _memory(tensor).copy_(_tensor(contents))
        stamp = self._report("receive", lane, [], [tensor], tensor, met.ready_s)
        return self._hold(SimulatedWork(self._accelerator, lane, stamp, tensors))

    # ---- the group ----
    def size(self) -> int:
        return self._own_size

    def rank(self) -> int:
        return self._own_rank

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:  # torch's name
        return "simulated"

    def abort(self) -> None:
        """End all waits of this rank, and note the sends in flight, which NCCL would cut off."""
        thread = self._accelerator.backend.host_thread()
        last = [communicator.last_send for communicator in self._communicators() if communicator.last_send is not None]
        CUT_OFF.extend(str(send) for send in last if not send.is_known(thread))
        self.shutdown()

    def shutdown(self) -> None:
        for communicator in self._communicators():
            communicator.abort()

    def _communicators(self) -> list[Communicator]:
        return [self._collectives, *self._pairs.values()]

    def _pair(self, other: int) -> Communicator:
        if other not in self._pairs:
            low, high = sorted((self._own_rank, other))
            self._pairs[other] = self._make(f"{low}-{high}", int(self._own_rank == high), 2)
        return self._pairs[other]

    def _lane(self, tensor: Tensor, communicator: Communicator | None) -> _Lane:
        """Return where a call runs: on the communicator's stream, or on the current stream if there is none."""
        stream = current = torch.accelerator.current_stream(tensor.device)
        if communicator is not None:
            stream = communicator.stream(tensor.device)
            stream.wait_stream(current)
        return _Lane(tensor.device, self._accelerator.backend.host_thread(), _key(stream))

    def _call(self, name: str, tensor: Tensor, lane: _Lane) -> Call:
        return Call(name, tensor.numel() * tensor.itemsize, self._accelerator.judge.ready_s(lane.thread, lane.key))

    def _run(
        self,
        name: str,
        asynchronous: bool,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        tensor: Tensor,
        place: Callable[[list[Tensor]], None],
        *,
        gives: bool = True,
    ) -> SimulatedWork:
        """Run a collective. ``place`` writes the results, from the contents of ``tensor`` in all ranks that give it."""
        communicator = self._collectives
        lane = self._lane(tensor, communicator if asynchronous else None)
        call = self._call(name, tensor, lane)
        number = communicator.post(call, bytes(_memory(tensor).numpy()) if gives else b"")
        met = {other: communicator.read(number, call, other) for other in communicator.others}
        if number:
            communicator.forget(number - 1, self._own_rank)  # who makes call k has read call k - 1
        parts = {other: _tensor(contents) for other, (_, contents) in met.items()}
        parts[self._own_rank] = _memory(tensor).clone()
        place([parts[rank] for rank in range(self._own_size)])
        begun_s = max((other.ready_s for other, _ in met.values()), default=0.0)
        stamp = self._report(name, lane, reads, writes, tensor, begun_s)
        held = [*reads, *writes] if asynchronous else []
        return self._hold(SimulatedWork(self._accelerator, lane, stamp, held))

    def _report(
        self,
        name: str,
        lane: _Lane,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        tensor: Tensor,
        begun_s: float = 0.0,
    ) -> Stamp:
        backend = self._accelerator.backend
        blocks = [[backend.block_of(one) for one in tensors] for tensors in (reads, writes)]
        nbytes = tensor.numel() * tensor.itemsize
        return self._accelerator.judge.transferred(
            lane.thread, lane.key, f"collective {name}", *blocks, nbytes, begun_s, backend.place_here()
        )

    def _hold(self, work: SimulatedWork) -> SimulatedWork:
        """Keep a work that the caller may drop until its tensors are free."""
        self._held = [held for held in self._held if not held.lets_go()]
        self._held.append(work)
        return work


def register() -> None:
    """Make torch and pipesched know how simulated devices are connected."""
    from pipesched.devices.collectives import register_pairs  # imported after the simulation has started

    if "simulated" not in distributed.Backend.backend_list:
        distributed.Backend.register_backend("simulated", _group, devices=["sim"])
    register_pairs("sim", lambda store, rank, timeout_s: SimulatedGroup(store, rank, 2, timeout_s))


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    host = distributed.ProcessGroupGloo(distributed.PrefixStore("cpu", store), rank, size, timeout)
    return SimulatedGroup(distributed.PrefixStore("sim", store), rank, size, timeout.total_seconds(), host)


def _communicator(store: Any, timeout_s: float, name: str, rank: int, size: int) -> Communicator:
    return Communicator(distributed.PrefixStore(name, store), rank, size, timeout_s)


def _key(stream: torch.Stream) -> int:
    return stream_key(stream.device.index, stream.stream_id)


def _memory(tensor: Tensor) -> Tensor:
    """Return the bytes of a device tensor, which are in the host's memory, as a tensor of the CPU."""
    if not tensor.is_contiguous():
        raise ValueError("the tensors of a collective must be contiguous")
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8)


def _tensor(contents: bytes) -> Tensor:
    if not contents:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class _Reduction(NamedTuple):
    """A reduction that adds, or compares, the parts in rank order."""

    name: str
    fold: Callable[[Tensor, Tensor], Tensor]
    is_mean: bool = False

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum, mean, maximum or minimum of the parts."""
        total = functools.reduce(self.fold, parts)
        return total / len(parts) if self.is_mean else total


_REDUCTIONS = {
    ReduceOp.SUM: _Reduction("sum", torch.add),
    ReduceOp.AVG: _Reduction("mean", torch.add, is_mean=True),
    ReduceOp.MAX: _Reduction("maximum", torch.maximum),
    ReduceOp.MIN: _Reduction("minimum", torch.minimum),
}


def _reduction(op: Any) -> _Reduction:
    for kind, reduction in _REDUCTIONS.items():
        if op == kind:  # torch wraps the kind in another object, which has no equal hash
            return reduction
    raise NotImplementedError(f"simulated devices have no reduction {op}")
