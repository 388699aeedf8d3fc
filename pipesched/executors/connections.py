"""Connections: all that one rank of an executor has to reach the others by, made and ended together."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pipesched.executors.device_wire import Links, links_for
from pipesched.executors.ports import ConnectionLostError
from pipesched.executors.rendezvous import Rendezvous
from pipesched.executors.sockets import SocketPort, own_host
from pipesched.executors.stores import Store, asked

__all__ = ["Connections"]

_HANG_UP = 21  # a tag
_PATIENCE_S = 2.0  # beyond the timeout, for a store that does not answer


class Connections:
    """A rank's sockets and gloo port, and the links of its device where that is none of the host's own.

    group: only its store is used. Making one is collective. Raises ConnectionLostError where ranks do not connect.
    """

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._group_store = group.get_group_store()
        self.host = own_host(self._group_store)
        self.store: Any = None
        self._device, self._timeout_s = device, timeout_s

    def meet(self) -> Store:
        """Wait for the other ranks. Returns a store that they alone use. Raises ExecutionError where not all come."""
        rendezvous = Rendezvous(self._group_store, self.rank, self.num_ranks)
        store: Store = asked(lambda: rendezvous.meet(self._timeout_s), self._timeout_s + _PATIENCE_S)
        self.store = store
        return store

    def connect(self) -> None:
        """Make them, once all ranks are known to have come."""
        limit = timedelta(seconds=self._timeout_s)
        try:
            self.port: Any = asked(
                lambda: distributed.ProcessGroupGloo(self.store, self.rank, self.num_ranks, limit), self._timeout_s + 1
            )
        except RuntimeError as error:
            raise ConnectionLostError(f"ranks were not connected within {self._timeout_s:g} s ({error})") from None
        maker = links_for(self._device, self._timeout_s)
        self.links = None if maker is None else Links(maker, self.store, self.rank)
        self.sockets = SocketPort(self.store, self.rank, self.host, self._timeout_s)

    def hang_up(self) -> None:
        """End every wait of this rank. In gloo, a receive that times out closes all connections."""
        self.sockets.hang_up()
        if self.num_ranks > 1:
            with suppress(RuntimeError):
                self.port.recv([torch.empty(1)], (self.rank + 1) % self.num_ranks, _HANG_UP).wait(
                    timedelta(milliseconds=1)
                )
        if self.links is not None:
            self.links.abort()  # last: it may take a while, and no host waits for it

    def close(self) -> None:
        """End them; what was sent by the host still arrives."""
        if self.links is not None:
            self.links.abort()
        self.sockets.close()
