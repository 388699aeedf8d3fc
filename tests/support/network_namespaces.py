"""Network namespaces of this machine that act as hosts, with a virtual cable between every two of them."""

import contextlib
import ctypes
import importlib
import io
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, permutations
from typing import Any

from tests.support.rank_processes import FORKED

_NETWORK = 0x40000000  # CLONE_NEWNET
PORT = 29500  # a fixed port is free, because no other program runs in the first host's namespace


class Hosts:
    """A number of hosts. Each has one address and, for every other host k, an interface ``to<k>`` with a route."""

    def __init__(self, count: int) -> None:
        self.names = [f"pipesched-{os.getpid()}-{host}" for host in range(count)]

    def make(self) -> None:
        """Make the hosts and their cables. Raises CalledProcessError if this is not permitted."""
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for a, b in combinations(range(len(self.names)), 2):
            cable = f"to{b} netns {self.names[a]} type veth peer name to{a} netns {self.names[b]}"
            run("ip", "link", "add", *cable.split())
        for here, there in permutations(range(len(self.names)), 2):
            inside = ("ip", "-n", self.names[here])
            run(*inside, "address", "add", f"{self.address(here)}/32", "dev", f"to{there}")
            run(*inside, "link", "set", f"to{there}", "up")
            run(*inside, "route", "add", self.address(there), "dev", f"to{there}")

    def remove(self) -> None:
        """Remove the existing hosts and their cables."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def slow(self, a: int, b: int, bits_per_s: int) -> None:
        """Limit the bandwidth of a cable in both directions."""
        for here, there in ((a, b), (b, a)):
            shaper = f"root tbf rate {bits_per_s}bit burst 32kb latency 400ms"
            run("tc", "-n", self.names[here], "qdisc", "add", "dev", f"to{there}", *shaper.split())

    def run(self, module: str, timeout_s: float) -> list[str]:
        """Run a module as one rank on each host, in torchrun's environment; return the printed text of each rank."""
        end_s = time.monotonic() + timeout_s
        ranks = [self._start(host, module) for host in range(len(self.names))]
        try:
            said = [pipe.recv() if pipe.poll(max(0, end_s - time.monotonic())) else "no answer" for _, pipe in ranks]
        except EOFError as error:
            raise AssertionError("a rank has ended without an answer") from error
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if isinstance(text, str)]
        assert not failed, "\n".join(failed)
        return [printed for (printed,) in said]

    def _start(self, host: int, module: str) -> tuple[Any, Any]:
        count = len(self.names)
        torchrun = {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(PORT), "WORLD_SIZE": str(count)}
        own = {"RANK": str(host), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": f"to{(host + 1) % count}"}
        here, there = FORKED.Pipe()
        args = (there, self.names[host], {**torchrun, **own}, module)
        process = FORKED.Process(target=_run_on_host, args=args, daemon=True)
        process.start()
        there.close()
        return process, here


def _run_on_host(pipe: Any, name: str, environment: dict[str, str], module: str) -> None:
    """Move this process to a host and run the module's main.

    Send the printed text in a tuple or, if main raises an error, the traceback as a string.
    """
    enter(name)
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            importlib.import_module(module).main()
        pipe.send((printed.getvalue(),))
    except BaseException:
        pipe.send(traceback.format_exc())


def enter(name: str) -> None:
    """Move this process to a host."""
    with open(f"/run/netns/{name}") as host:
        if ctypes.CDLL(None, use_errno=True).setns(host.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"{name} cannot be entered")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def why_not() -> str:
    """Return the reason why this machine cannot create such hosts; "" if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"hosts need Linux with iproute2; missing: {', '.join(missing) or 'Linux'}"
    if os.geteuid() != 0:
        return "hosts need root, to make network namespaces"
    probe = Hosts(2)
    try:
        probe.make()
        probe.slow(0, 1, 10**6)
    except subprocess.CalledProcessError as error:
        return f"hosts need a kernel that allows network namespaces, veth and tbf: {error.stderr.strip()}"
    finally:
        probe.remove()
    return ""


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make hosts for a ``with`` block, and remove them afterwards."""
    made = Hosts(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()
