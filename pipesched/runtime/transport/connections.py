"""Connections: connects one rank to the other ranks, over the transport that its executor was given."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import distributed

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.coordination.rendezvous import AbsentError, Rendezvous
from pipesched.runtime.coordination.stores import StoreLostError, asked
from pipesched.runtime.transport.channels import Channels
from pipesched.runtime.transport.device_channels import DeviceLinks, LinkMaker, PairLinks, ends_over
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.ports import ConnectionLostError, Ports
from pipesched.runtime.transport.sockets import SocketPort, own_host

__all__ = ["Connections", "DeviceTransport", "HostTransport", "MessageTransport", "met", "transport_for"]

_HANG_UP = 21  # the tag of the receive in hang_up()
_PATIENCE_S = 2.0  # added to the timeout, for a store that does not answer


class Connections:
    """All connections of one rank to the other ranks, created by a `MessageTransport` and closed together.

    Args:
        rank: this rank.
        num_ranks: the number of ranks.
        port: a gloo process group of all ranks, for long messages.
        sockets: carries short messages from host to host.
        links: carry tensors from device to device. Default: None (all messages travel from host to host).

    """

    def __init__(
        self, rank: int, num_ranks: int, *, port: Any, sockets: SocketPort, links: DeviceLinks | None = None
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.port = port
        self.sockets = sockets
        self.links = links

    def channels(self, names: Sequence[str], encoding: Encoding) -> Channels:
        """Return the channels over these connections. ``names`` and ``encoding`` are as for `Channels`."""
        ends = None if self.links is None else ends_over(self.links, self.sockets, self.rank, encoding)
        return Channels(Ports(self.sockets, self.port), names, encoding, ends)

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


class MessageTransport(Protocol):
    """Creates the connections that carry the messages of a rank. An executor gets its transport as an argument."""

    def connect(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> Connections:
        """Connect this rank to all other ranks of the store. Collective.

        Raises ConnectionLostError if the ranks are not connected within the timeout.
        """


class HostTransport:
    """Sends all messages from host to host: short ones through sockets, and long ones through gloo.

    Args:
        given_up: an event that ends the wait for other ranks early. Default: None (they may take until the timeout).

    """

    def __init__(self, given_up: threading.Event | None = None) -> None:
        self._given_up = given_up

    def connect(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> Connections:
        limit = timedelta(seconds=timeout_s)
        try:
            make = partial(distributed.ProcessGroupGloo, store, rank, num_ranks, limit)
            port = asked(make, timeout_s + 1, self._given_up)
        except RuntimeError as error:
            raise ConnectionLostError(f"ranks were not connected within {timeout_s:g} s ({error})") from None
        return Connections(rank, num_ranks, port=port, sockets=SocketPort(store, rank, own_host(store), timeout_s))


class DeviceTransport:
    """Sends the tensors of a program's messages from device to device, and everything else from host to host.

    Args:
        device: the device of this rank.
        maker: creates the factory of links from the device and the timeout in seconds.

    """

    def __init__(self, device: torch.device, maker: Callable[[torch.device, float], LinkMaker] = PairLinks) -> None:
        self._device = device
        self._maker = maker

    def connect(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> Connections:
        maker = self._maker(self._device, timeout_s)
        connections = HostTransport().connect(store, rank, num_ranks, timeout_s)
        connections.links = DeviceLinks(maker, store, rank)
        return connections


def transport_for(device: torch.device) -> MessageTransport:
    """Return the transport for the messages of a device."""
    return HostTransport() if device.type == "cpu" else DeviceTransport(device)


def met(group: Any, names: Sequence[str], timeout_s: float) -> tuple[Alarm, Any]:
    """Wait until all ranks of the group have joined. Return this rank's `Alarm`, and the store to connect over.

    ``names`` lists the names of the group's ranks.

    If a rank does not join or the store does not reply, notifies the ranks of other pipelines and raises
    ExecutionError.
    """
    try:
        alarm = Alarm(group, names, own_host(group.get_group_store()), timeout_s)
        try:
            rendezvous = Rendezvous(group.get_group_store(), group.rank(), names)
            store = asked(lambda: rendezvous.meet(timeout_s), timeout_s + _PATIENCE_S)
            alarm.meet(store)
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
    return alarm, store
