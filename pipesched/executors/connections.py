"""Connections: all that one rank of an executor has to reach the others by, made and ended together."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pipesched.errors import ExecutionError
from pipesched.executors.device_wire import Links, links_for
from pipesched.executors.rendezvous import Rendezvous
from pipesched.executors.sockets import SocketPort, own_host

__all__ = ["Connections"]

_HANG_UP = 21  # a tag


class Connections:
    """A rank's sockets and gloo port, and the links of its device where that is none of the host's own.

    group: only its store is used. Making one is collective. Raises ExecutionError where not all ranks come.
    """

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self.store = Rendezvous(group.get_group_store(), self.rank, self.num_ranks).meet(timeout_s)
        try:
            self.port: Any = distributed.ProcessGroupGloo(
                self.store, self.rank, self.num_ranks, timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise ExecutionError(
                f"all {self.num_ranks} ranks make their pipeline together; rank {self.rank} waited {timeout_s:g} s; "
                f"make it on every rank, or raise the timeout ({error})"
            ) from None
        maker = links_for(device, timeout_s)
        self.links = None if maker is None else Links(maker, self.store, self.rank)
        self.sockets = SocketPort(self.store, self.rank, own_host(self.store), timeout_s)

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
