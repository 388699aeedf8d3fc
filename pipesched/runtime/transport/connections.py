"""Connections: all connections of one rank to the other ranks, created and closed together."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.coordination.rendezvous import AbsentError, Rendezvous
from pipesched.runtime.coordination.stores import StoreLostError, asked
from pipesched.runtime.transport.device_channels import Links, links_for
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.runtime.transport.sockets import SocketPort, own_host

__all__ = ["Connections", "met"]

_HANG_UP = 21  # the tag of the receive in hang_up()
_PATIENCE_S = 2.0  # added to the timeout, for a store that does not answer


class Connections:
    """A rank's sockets, its gloo port and, on an accelerator, its device links.

    The constructor and ``connect`` are collective. ``group`` is the ranks' process group; only its ranks and its store
    are used. The constructor raises ExecutionError if a rank does not join, and StoreLostError if the store does not
    reply.
    """

    def __init__(self, group: Any, names: Sequence[str], device: torch.device, timeout_s: float) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        rendezvous = Rendezvous(group.get_group_store(), self.rank, names)
        self.store = asked(lambda: rendezvous.meet(timeout_s), timeout_s + _PATIENCE_S)
        self._device = device
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Create the connections. Raises ConnectionLostError if the ranks are not connected within the timeout."""
        limit = timedelta(seconds=self._timeout_s)
        try:
            self.port: Any = asked(
                lambda: distributed.ProcessGroupGloo(self.store, self.rank, self.num_ranks, limit), self._timeout_s + 1
            )
        except RuntimeError as error:
            raise ConnectionLostError(f"ranks were not connected within {self._timeout_s:g} s ({error})") from None
        maker = links_for(self._device, self._timeout_s)
        self.links = None if maker is None else Links(maker, self.store, self.rank)
        self.sockets = SocketPort(self.store, self.rank, own_host(self.store), self._timeout_s)

    def hang_up(self) -> None:
        """Interrupt every operation in which this rank waits for another rank.

        gloo's operations are interrupted by a receive with a short timeout, because gloo closes all connections when a
        receive times out.
        """
        self.sockets.hang_up()
        if self.num_ranks > 1:
            with suppress(RuntimeError):
                self.port.recv([torch.empty(1, device="cpu")], (self.rank + 1) % self.num_ranks, _HANG_UP).wait(
                    timedelta(milliseconds=1)
                )
        if self.links is not None:
            self.links.abort()  # last, because aborting may take a while and no host waits for a link

    def close(self) -> None:
        """Close the connections; bytes already sent by the host still arrive."""
        if self.links is not None:
            self.links.abort()
        self.sockets.close()


def met(group: Any, names: Sequence[str], device: torch.device, timeout_s: float) -> tuple[Alarm, Connections]:
    """Wait until all ranks of the group have joined. Return this rank's `Alarm`, and `Connections` not yet connected.

    ``names`` lists the names of the group's ranks.

    If a rank does not join or the store does not reply, notifies the ranks of other pipelines and raises
    ExecutionError.
    """
    try:
        alarm = Alarm(group, names, own_host(group.get_group_store()), timeout_s)
        try:
            connections = Connections(group, names, device, timeout_s)
            alarm.meet(connections.store)
        except BaseException as error:
            if isinstance(error, AbsentError | StoreLostError):
                alarm.ring(str(error), "waits")
            alarm.end()
            raise
    except AbsentError as error:
        raise ExecutionError(*error.args) from None
    except StoreLostError as error:
        raise ExecutionError(
            f"all {group.size()} ranks must construct the pipeline at the same time; {error}; "
            f"rank {group.rank()} stopped; fix the cause and restart the job"
        ) from None
    return alarm, connections
