"""Connected rank: this process's rank of a pipeline, connected to the ranks of the other processes.

The executor and the collectives of a rank share its connections. Calls are made one at a time, and an error in a call
stops all ranks.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn
from weakref import WeakMethod, finalize

from torch import distributed

from pipesched.errors import ExecutionError, RankLost
from pipesched.program.actions import Action, Kind, Lane
from pipesched.runtime.coordination.forked_process import Forked, end_in_children, forget
from pipesched.runtime.coordination.interpreter_exit import EXIT
from pipesched.runtime.coordination.rank_activity import COLLECTIVE, Doing, Stopped, doing_at, said
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.transport.channels import Channels, check_run
from pipesched.runtime.transport.connections import HostTransport, MessageTransport, met, transport_for
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.host_copies import Courier
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.runtime.transport.rank_exchange import Exchange
from pipesched.runtime.transport.shared_value import Shared
from pipesched.runtime.transport.time_offset import time_offset
from pipesched.simulation.trace import Span

__all__ = ["ConnectedRank", "DifferentError", "account"]

_LOG = logging.getLogger(__name__)

_IDENTITY = ("program", "batch", "number of earlier steps", "values")  # compared between ranks at the start of a run


class DifferentError(ExecutionError):
    """The ranks have different values. All ranks raise this error, so the pipeline remains usable."""


class ConnectedRank:
    """One rank of a pipeline in a separate process, connected to the other ranks. The constructor is collective.

    After a failure, the connections are closed in all ranks.

    Args:
        group: a process group of the pipeline's ranks, in rank order. Only the group's store is used; ranks communicate
            over connections that the transport creates.
        grid: the arrangement of the group's ranks into replicas of the pipeline. ``grid.timeout_s`` must exceed the
            step time of the slowest rank.
        transport: creates the connections. Default: the transport for messages of this rank's device.
        encoding: encodes values other than tensors. Default: a new Encoding.

    Raises:
        ExecutionError: if a rank does not join within ``grid.timeout_s``.

    """

    def __init__(
        self,
        group: Any,
        grid: RankGrid,
        *,
        transport: MessageTransport | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        assert grid.timeout_s is not None
        self.grid = grid
        self.rank = grid.rank
        self.num_ranks = grid.num_processes
        self.device = grid.all_devices[grid.position]
        self.timeout_s = grid.timeout_s
        #: Objects that hold channels of this rank. They are dropped with the connections.
        self.bound: dict[int, Any] = {}
        #: Whether the job may go on without a rank. The alarm then outlives the connections.
        self.survives = False
        #: Encodes values other than tensors; decodes only types that were registered.
        self.encoding = encoding or Encoding((Action, Kind, Lane, Span))
        self._group = group
        self._transport = transport or transport_for(self.device)
        self._busy = threading.Lock()
        self._shared: Shared | None = None
        self._fault: str | None = None
        self._wire: Channels | None = None
        self._ends_beside: list[Callable[[], Any]] = []
        #: Functions that interrupt what waits for other ranks over the connections of ``connect_beside``.
        self.hang_ups_beside: list[Callable[[], None]] = []
        self._forked = Forked()
        self._courier = Courier(self.device)
        #: The store over which the ranks connect.
        self.alarm, self.store = met(group, grid.names, self.timeout_s)
        self.activity = self.alarm.activity
        with self.stopping_all("the construction of a pipeline"):
            connections = self._transport.connect(self.store, self.rank, self.num_ranks, self.timeout_s)
            self._end_connections = finalize(self, connections.close)
            self.alarm.on_fault(connections.hang_up)
            self.links = connections.links
            self._wire = connections.channels(_IDENTITY, self.encoding)
        with self.alone("the construction of a pipeline"):
            #: The seconds to add to this process's clock to get the time on rank 0's clock.
            self.time_offset_s = time_offset(connections.port, self.rank, self.num_ranks)
        end_in_children(self)
        self._receives_at_exit = False
        self._receive_at_exit()
        _LOG.info("rank %d of %d is connected", self.rank, self.num_ranks)

    def _receive_at_exit(self) -> None:
        """Let this process receive the broadcast in transit before it exits, if there are several replicas."""
        if len(self.grid.rows) > 1 and not self._receives_at_exit:
            self._receives_at_exit = True
            at_exit = partial(_call, WeakMethod(self._finish_broadcast_at_exit))
            atexit.register(at_exit)
            finalize(self, atexit.unregister, at_exit).atexit = False

    def reconnected(self) -> "ConnectedRank":
        """Connect the same rank once more, for example after ``close``. Collective."""
        return ConnectedRank(self._group, self.grid, transport=self._transport, encoding=self.encoding)

    def connect_beside(self, name: str, encoding: Encoding) -> Channels:
        """Connect the ranks once more, for a thread beside the one that runs the rank. Collective.

        Args:
            name: the name of the connections.
            encoding: encodes values other than tensors.

        """
        store = distributed.PrefixStore(name, self.store)  # type: ignore[attr-defined]
        beside = HostTransport(self.alarm.settled).connect(store, self.rank, self.num_ranks, self.timeout_s)
        self._ends_beside.append(finalize(self, beside.close))
        self.alarm.on_fault(beside.hang_up)
        self.hang_ups_beside.append(beside.hang_up)
        return beside.channels(_IDENTITY, encoding)

    def regroup(self, grid: RankGrid) -> None:
        """Arrange the same ranks as another grid states. All ranks must call this between the same two calls."""
        self.grid = grid
        self.bound.clear()
        self.alarm.rename(grid.names)
        self._receive_at_exit()

    def end_in_child(self) -> None:
        """Disable the rank in a forked child process, without closing the connections of the parent process."""
        self._forked.here = True
        for end in (self._end_connections, self._courier.end):
            forget(end)

    @property
    def closed(self) -> bool:
        """Whether the connections are closed."""
        return self._wire is None or self._forked.here

    @property
    def busy(self) -> bool:
        """Whether a run or another call is in progress."""
        return self._busy.locked()

    def check_open(self, call: str) -> None:
        """Raise ExecutionError after ``close``. ``call`` describes the call in the error message."""
        self._forked.check()
        if self._wire is None:
            why = self._fault or f"it was closed before {call}"
            raise ExecutionError(f"a closed pipeline cannot run; {why}; make a new pipeline")

    def wire(self) -> Channels:
        """Return the channels to the other ranks. Raises ExecutionError after ``close``."""
        if self._wire is None or self._forked.here:
            self.check_open("this step")
        assert self._wire is not None
        return self._wire

    def check_outside(self, method: str) -> None:
        """Raise ExecutionError if a step is running. ``method`` is the method's name in the message."""
        self._forked.check()
        if self._busy.locked():
            raise ExecutionError(
                f"{method}() was called from inside a running step (by a layer or a hook); "
                f"call it after the step has returned"
            )

    def check_peers(self) -> None:
        """Raise Stopped if another rank has failed."""
        if self.alarm.bell.rung:
            raise Stopped

    # ---- exchanges ------------------------------------------------------------------------------------------------

    def in_replica(self) -> Exchange:
        """Return what exchanges values between the ranks of this replica, in pipeline order."""
        return Exchange(self.wire(), self.rank, self.grid.pipeline, self.device)

    def in_all(self) -> Exchange:
        """Return what exchanges values between all ranks, in the order of the group."""
        return Exchange(self.wire(), self.rank, range(self.num_ranks), self.device)

    def with_peers(self) -> Exchange:
        """Return what exchanges values between the ranks at this position in all replicas, in replica order."""
        return Exchange(self.wire(), self.rank, self.grid.peers, self.device)

    def with_tensor_peers(self) -> Exchange:
        """Return what exchanges values between the ranks at this rank's place in all planes, by tensor rank."""
        return Exchange(self.wire(), self.rank, self.grid.tensor_peers, self.device)

    def compare_planes(self, identity: bytes, batch: str) -> None:
        """Raise ExecutionError unless the ranks at this rank's place in all planes begin the same run.

        Args:
            identity: the digests of the run, one for each of the names in ``_IDENTITY``.
            batch: describes the batch, for the error message.

        """
        if self.grid.planes:
            every = self.with_tensor_peers().all_values((identity, batch))
            for peer, theirs in zip(self.grid.tensor_peers, every, strict=True):
                check_run(_IDENTITY, peer, theirs, (identity, batch))

    def compare(self, name: str, own: bytes) -> None:
        """Raise ExecutionError in every rank if the digest ``own`` differs. The error contains ``name``."""
        digests = self.in_all().all_values(own)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise DifferentError(
                f"all ranks must have the same {name}; rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} of "
                f"{self.num_ranks} {'has' if len(others) == 1 else 'have'} a different {name} than rank 0; pass the "
                f"same arguments on every rank"
            )

    def broadcast(self, value: Any, send: Callable[[Any], None]) -> None:
        """Call ``send`` with the value of a broadcast, without waiting for the device that computes it."""
        self._courier.give(value, send)

    def finish_broadcast(self) -> None:
        """Wait for the broadcast of another rank that is in transit, if there is one."""
        if self._shared is not None:
            self._shared()
            self._shared = None

    def receive_later(self, take: Callable[[], Any]) -> Callable[[], Any]:
        """Let a broadcast of other ranks be in transit. Return a function that waits for it with ``take``.

        The returned function raises ExecutionError if a rank failed before the value arrived.
        """
        shared = self._shared = Shared(take)
        return lambda: self._read(shared)

    def _finish_broadcast_at_exit(self) -> None:
        """Receive the broadcast in transit when a script exits without having closed the pipeline.

        Another replica may not have sent the broadcast yet, and would fail to send it if this process exited first.
        """
        shared = self._shared
        if shared is not None and not self.closed and not self.alarm.bell.rung:
            with suppress(Exception):
                shared()

    def _read(self, shared: Shared) -> Any:
        if not shared.arrived:
            self._forked.check()
        if self.closed and not shared.arrived:
            raise ExecutionError(
                f"a loss must be received before the pipeline is closed; this loss was not received: "
                f"{self._fault or 'the rank that computed it stopped without sending it'}; read the loss right after "
                f"its step"
            )
        with self.stopping_all("receiving a broadcast"):
            return shared()

    # ---- failure and closing --------------------------------------------------------------------------------------

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise ``error`` in this rank, and stop all ranks. ``what`` names the call in error messages."""
        with self.alone(what):
            raise error

    @contextmanager
    def alone(self, call: str, *, by_heartbeat: bool = False) -> Iterator[None]:
        """A context for one call, named ``call`` in error messages. An error inside the context stops all ranks.

        ``by_heartbeat`` states whether the heartbeat's thread makes the call while the rank's own thread works. Raises
        ExecutionError if another call is running, and after ``close``.
        """
        if EXIT.begun:
            EXIT.check()
        self.wire()
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "a pipeline may run only one call at a time; another call is still running; call again after it has "
                "returned"
            )
        self.activity.begin(call, by_heartbeat=by_heartbeat)
        try:
            with self.stopping_all(call):
                yield
        finally:
            self.activity.end()
            self._busy.release()

    @contextmanager
    def waiting(self, call: str) -> Iterator[None]:
        """A context as ``stopping_all``, in which the alarm knows that this rank may wait for others."""
        self.activity.begin(call)
        try:
            with self.stopping_all(call):
                yield
        finally:
            self.activity.end()

    @contextmanager
    def stopping_all(self, call: str) -> Iterator[None]:
        """A context in which an exception stops all ranks.

        An exception of this rank is raised unchanged; a failure of another rank is raised as an ExecutionError that
        names the failed rank.
        """
        try:
            yield
        except DifferentError as error:
            raise ExecutionError(*error.args) from None  # raised in every rank, so the pipeline remains usable
        except BaseException as error:
            doing, text = account(error)
            place = "".join(f", {note}" for note in getattr(error, "__notes__", []))
            text += place or f", in {call}"
            first = self.alarm.ring(text, doing, getattr(error, "ended", None))
            self._fault = str(first)
            _LOG.error("rank %d of %d stopped: %s", self.rank, self.num_ranks, first)
            self._drop()
            if doing == "raised" or (doing == COLLECTIVE and first.who == self.alarm.name):
                raise
            kind, remedy = ExecutionError, "fix the cause and make a new pipeline"
            if self.survives:
                kind, remedy = RankLost, "call pipe.recover() to go on without it"
            raise kind(
                f"a failed rank stops all ranks; {first}; rank {self.rank} of {self.num_ranks} stopped{place}; {remedy}"
            ) from (None if doing == "waits" else error)

    def leave(self, why: str) -> None:
        """Stop all ranks, unless the connections are closed. ``why`` is the reason that the other ranks report."""
        if not self.closed:
            self._fault = str(self.alarm.ring(why, "raised"))
            self._drop()

    def abandon(self, what: str, error: BaseException) -> None:
        """Stop all ranks because of an error in the call ``what``, unless the connections are closed.

        Raises ``error``. If another rank's failure caused ``error``, raises an ExecutionError that names the failed
        rank.
        """
        if not self.closed:
            with self.stopping_all(what):
                raise error

    def give_up(self) -> None:
        """Close the connections and the alarm, without a message to the other ranks."""
        self.survives = False
        self._drop()

    def _drop(self) -> None:
        if self._forked.here:
            return
        wire = self._wire
        self._wire = None
        self._shared = None
        self.bound.clear()
        if not self.survives:
            self.alarm.end()
        if wire is not None:
            self._end_connections()
            for end in self._ends_beside:
                end()
            self._courier.end()

    def close(self) -> None:
        """Wait until all sends are complete, then close the connections. Raises ExecutionError if a call is running."""
        if not self._busy.acquire(blocking=False):
            raise ExecutionError("close() was called from inside a running step; call it after the step has returned")
        try:
            with suppress(ConnectionLostError):
                if self._wire is not None and not self._forked.here and not self.alarm.bell.rung:
                    self.finish_broadcast()
                    self._courier.drain()
                    self._wire.drain()
                    if self.links is not None:
                        self.links.close()
            self.survives = False
            self._drop()
        finally:
            self._busy.release()


def account(error: BaseException) -> tuple[Doing, str]:
    """Return the activity in which an error occurred, and a description of the error."""
    if isinstance(error, Stopped | ConnectionLostError):
        return "waits", str(error)
    return doing_at(error), said(error)


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    """Call a method if the method's object still exists."""
    own = method()
    if own is not None:
        own()
