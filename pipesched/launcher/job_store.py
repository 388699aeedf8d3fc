"""The job's store: torch's key-value store, hosted by the launcher, so that no rank's death takes it away."""

import errno
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipesched.errors import InputError

__all__ = ["JobStore"]


class JobStore:
    """A port on which the launcher listens at once, and later a store at this port.

    Ranks that connect before the store answers wait in the port's queue. So the launcher can start the ranks first, and
    import torch, which takes seconds, while they import it, too.
    """

    def __init__(self, host: str, port: int, *, num_ranks: int, all_addresses: bool) -> None:
        """Listen.

        Args:
            host: the address of this host; ranks connect to it.
            port: the port, or 0 for a free one.
            num_ranks: the number of ranks that will connect.
            all_addresses: whether to listen at all addresses of this host, for ranks on other hosts.

        """
        queue = max(128, 4 * num_ranks)
        try:
            if not all_addresses:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                self._socket = socket.create_server((host, port), family=family, backlog=queue)
            elif socket.has_dualstack_ipv6():
                both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
                self._socket = socket.create_server(("", port), backlog=queue, **both)  # type: ignore[arg-type]
            else:
                self._socket = socket.create_server(("", port), backlog=queue)
        except OSError as error:
            raise InputError(_refusal(error, host, port)) from error
        _drop_lost_hosts(self._socket)  # at once, because a connection inherits it when it is made
        self.address: tuple[str, int] = host, self._socket.getsockname()[1]
        self._server: Any = None

    def serve(self) -> None:
        """Answer the ranks from now on."""
        from torch import distributed

        host, port = self.address
        self._server = distributed.TCPStore(  # type: ignore[attr-defined]  # public in torch, but not exported
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def has_ranks(self) -> bool:
        """Whether a rank is still connected, as Linux says; elsewhere False."""
        own = 0 if self._server is None else 1  # the store is its own client
        return _connections(self.address[1]) > own

    def close(self) -> None:
        """Stop answering."""
        self._server = None
        self._socket.close()


def _refusal(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the port of --address must be free; port {port} is in use on this host; pass another port"
    return (
        f"--address must be an address of the host of rank 0; cannot listen at {host}:{port}: "
        f"{error.strerror or error}; pass an address of this host, or --first-rank on other hosts"
    )


def _drop_lost_hosts(listener: socket.socket) -> None:
    """Close connections to hosts that do not answer for 30 s. On Linux, connections inherit this from the listener.

    The kernel asks a silent host whether it is alive, after 15 s. If it has sent data, it waits for an answer to these
    instead, by default for a quarter of an hour.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        with suppress(AttributeError, OSError):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connections(port: int) -> int:
    """Count the established connections to a port of this host."""
    found = 0
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                found += state == "01" and int(local.rpartition(":")[2], 16) == port
    return found
