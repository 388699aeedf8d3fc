"""Strangers: connects rogue clients to the ranks of a job, and checks whether the job survives.

    python benchmarks/strangers.py [--only flood drip] [--ranks 3] [--steps 5] [--timeout 6]

Each kind of client attacks one job. The job builds a pipeline over spawned ranks while the clients are connected, runs
steps with different batch sizes and an evaluation, and collects the weights. Every loss must be bit-identical to the
loss of a plain loop. The exit code is the number of failed jobs.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any

import torch
from measure import in_ranks, machine
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from pipesched import Distributed, Pipeline
from pipesched.runtime.coordination.strangers import STRANGERS
from pipesched.runtime.transport import sockets
from pipesched.runtime.transport.sockets import SocketPort
from pipesched.testing import reference_step

PATIENCE_S = 20.0  # the time for clients to connect
GREETING_BYTES = 32
GIVEN: dict[str, Any] = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 3}
CROWD, PIPELINES, DESCRIPTORS = 2_000, 8, 1_024
NOBODY = 65534

Address = str | tuple[str, int]
Say = Callable[[int], bytes]


# ---- rogue clients ------------------------------------------------------------------------------------------------


def dial(address: Address, *, receive_bytes: int = 0) -> socket.socket | None:
    """Connect to a rank and return the socket; None if the rank's backlog is full or the rank has ended."""
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(0.2)
    with suppress(OSError):
        connection.connect(address)
        return connection
    connection.close()
    return None


def holding(
    addresses: list[Address], say: Say = lambda _: b"", *, many: int = 100, receive_bytes: int = 0
) -> Iterator[int]:
    """Open ``many`` connections to each address, send ``say``, and keep them open. Retry refused connections."""
    held: list[socket.socket] = []
    for number in count():
        if number < many * len(addresses):
            connection = dial(addresses[number % len(addresses)], receive_bytes=receive_bytes)
            if connection is not None:
                with suppress(OSError):
                    connection.sendall(say(number))
                held.append(connection)
        else:
            time.sleep(0.01)
        yield len(held)


def passing(addresses: list[Address], say: Say, *, hold: int = 0, reset: bool = False) -> Iterator[int]:
    """Connect, send and disconnect in a loop. The last ``hold`` connections stay open. ``reset``: use a TCP reset."""
    held: list[socket.socket] = []
    for number in count():
        saying = say(number)
        connection = dial(addresses[number % len(addresses)])
        if connection is not None:
            with suppress(OSError):
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(saying)
            held.append(connection)
            for one in held[: len(held) - hold]:
                one.close()
            del held[: len(held) - hold]
        yield number


def crowding(addresses: list[Address]) -> Iterator[int]:
    """Open connections to all listeners in turn, and keep the last 2,000 of them open."""
    setrlimit(RLIMIT_NOFILE, (CROWD + 500, getrlimit(RLIMIT_NOFILE)[1]))
    return passing(addresses, lambda _: b"", hold=CROWD)


def dripping(addresses: list[Address]) -> Iterator[int]:
    """Send single bytes of a greeting over ten connections to each address."""
    held = [connection for address in addresses * 10 if (connection := dial(address)) is not None]
    for _ in count():
        for connection in held:
            with suppress(OSError):
                connection.sendall(b"\0")
        time.sleep(0.2)
        yield len(held)


def as_nobody(addresses: list[Address]) -> Iterator[int]:
    """Connect to the abstract Unix sockets as another user, if this process is root."""
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    yield from passing(in_memory(addresses), lambda _: bytes(GREETING_BYTES), hold=300)


def in_memory(addresses: list[Address]) -> list[Address]:
    """Return the addresses that belong to Unix sockets."""
    return [address for address in addresses if isinstance(address, str)]


def greeting(number: int) -> bytes:
    """Return the greeting of a rank, with a wrong secret word."""
    return struct.pack("<qq16s", number % 3, number // 3 % 12, b"not the word")


def replaying(addresses: list[Address], folder: Path) -> Iterator[int]:
    """Send greetings of the ranks again, as if a client had recorded them on the network."""

    def overheard(number: int) -> bytes:
        with suppress(OSError):
            said = (folder / "overheard").read_bytes()
            at = number // len(addresses) * GREETING_BYTES % max(1, len(said))
            return said[at : at + GREETING_BYTES]
        return b""

    yield from passing(addresses, overheard, hold=50)


def garbage(number: int) -> bytes:
    """Return random bytes."""
    return random.Random(number).randbytes(1 << 16)


KINDS: dict[str, tuple[str, Callable[[list[Address], Path], Iterator[int]]]] = {
    "half-open": ("opens 100 silent connections to each listener", lambda to, _: holding(to)),
    "drip": ("sends one byte of a greeting every 0.2 s", lambda to, _: dripping(to)),
    "flood": ("connects endlessly, and keeps 500 connections open", lambda to, _: passing(to, lambda _: b"", hold=500)),
    "unfinished": (
        "sends 31 of the 32 bytes of a greeting",
        lambda to, _: holding(to, lambda _: bytes(GREETING_BYTES - 1)),
    ),
    "wrong-word": (
        "sends greetings in the name of each rank, without the key",
        lambda to, _: passing(to, greeting, hold=50),
    ),
    "garbage": ("sends blocks of 64 KiB of noise endlessly", lambda to, _: passing(to, garbage)),
    "leaving": ("connects and closes immediately", lambda to, _: passing(to, lambda _: b"", reset=True)),
    "huge": (
        "sends message lengths of 2**63 - 1",
        lambda to, _: passing(to, lambda _: (b"\xff" * 7 + b"\x7f") * 64, hold=50),
    ),
    "memory": ("opens 300 silent connections to each abstract socket", lambda to, _: holding(in_memory(to), many=300)),
    "other-user": ("floods abstract sockets as another user", lambda to, _: as_nobody(to)),
    "replayed": ("repeats recorded greetings of the ranks", replaying),
    "slow-reader": (
        "sends half a greeting and reads nothing",
        lambda to, _: holding(to, lambda _: bytes(16), receive_bytes=1),
    ),
    "crowd": ("opens 2,000 silent connections to 8 pipelines with 1,024 file descriptors", lambda to, _: crowding(to)),
    "later": ("connects after the first step, and stays connected", lambda to, _: holding(to, greeting)),
}


def attack(kind: str, folder: Path, num_ranks: int) -> None:
    """Wait for the ranks' addresses, and attack them until this process is stopped."""
    paths = [folder / f"address-{rank}" for rank in range(num_ranks)]
    if kind == "later":
        paths.append(folder / "started")
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    addresses: list[Address] = []
    for path in paths[:num_ranks]:
        for *network, memory in json.loads(path.read_text()):
            addresses += [(network[0], network[1]), *([memory] if memory and sys.platform == "linux" else [])]
    begin_s = time.monotonic()
    for _ in KINDS[kind][1](addresses, folder):
        if time.monotonic() - begin_s > 0.5:
            write(folder / "here", "")


# ---- the job --------------------------------------------------------------------------------------------------------


def until(done: Callable[[], bool]) -> None:
    """Wait until ``done()`` is true, for at most PATIENCE_S."""
    end_s = time.monotonic() + PATIENCE_S
    while not done() and time.monotonic() < end_s:
        time.sleep(0.01)


def write(path: Path, text: str) -> None:
    """Write a file atomically, unless it exists."""
    if not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text)
        part.rename(path)


class Overheard:
    """Records the greetings that this rank sends to other ranks."""

    def __init__(self, form: struct.Struct) -> None:
        self.form, self.path, self.said = form, Path(os.devnull), b""
        self.size, self.unpack = form.size, form.unpack

    def pack(self, *values: Any) -> bytes:
        self.said = self.form.pack(*values)
        return self.said

    def connected(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``connect`` so that it records the greeting it has sent."""

        def connect_and_tell(*args: Any) -> Any:
            connection = connect(*args)
            with self.path.open("ab") as file:
                file.write(self.said)
            return connection

        return connect_and_tell


def meeting(
    rank: int, kinds: list[str], folders: list[Path], num_steps: int, timeout_s: float
) -> list[tuple[float, str]]:
    """Run one job for each kind of client; return the seconds and the error of each job. Runs on each rank."""
    heard = sockets._GREETING = Overheard(sockets._GREETING)
    make, SocketPort._connect = SocketPort.__init__, heard.connected(SocketPort._connect)
    results = []
    for kind, folder in zip(kinds, folders, strict=True):
        ports: list[Any] = []

        def made(
            port: SocketPort, *args: Any, kind: str = kind, folder: Path = folder, made_ports: list[Any] = ports
        ) -> None:
            make(port, *args)
            made_ports.append([*port._listeners[0].getsockname()[:2], port._name])
            if kind == "crowd":  # the clients come once all pipelines are there
                return
            write(folder / f"address-{rank}", json.dumps(made_ports))
            if kind != "later":
                until((folder / "here").exists)

        SocketPort.__init__ = made
        heard.path = folder / "overheard"
        distributed.barrier()
        begin_s, died = time.perf_counter(), ""
        try:
            if kind == "crowd":
                crowded_job(rank, ports, folder, num_steps, timeout_s)
            else:
                job(rank, kind, folder, num_steps, timeout_s)
        except Exception as error:
            died = f"{type(error).__name__}: {error}"
        results.append((time.perf_counter() - begin_s, died))
        write(folder / "over", "")
    return results


def model() -> nn.Module:
    """A sequence of small layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(5)), nn.Linear(32, 4))


def plain_run(num_steps: int) -> tuple[Any, Any, list[Any], Any]:
    """Return a batch, its targets, the loss of each step of a plain loop, and the trained model.

    Each step has one row less than the one before, so that its messages have another size.
    """
    x, y = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 4
    plain = model()
    losses = [
        reference_step(plain, x[: 24 - step], target=y[: 24 - step], step=step, **GIVEN) for step in range(num_steps)
    ]
    return x, y, losses, plain


def job(rank: int, kind: str, folder: Path, num_steps: int, timeout_s: float) -> None:
    """Run a job. Raise an error if it fails or if a loss differs from that of the plain loop."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    x, y, expected, plain = plain_run(num_steps)
    with Pipeline(
        model(), x[:2], mesh=mesh, schedule="1f1b", distributed=Distributed(timeout=timeout_s), **GIVEN
    ) as pipe:
        for step, loss in enumerate(expected):
            rows = 24 - step
            if not torch.equal(pipe.step(x[:rows], target=y[:rows]), loss):
                raise AssertionError(f"the loss of step {step} differs from the loop's")
            if kind == "later" and not step:
                if not rank:
                    write(folder / "started", "")
                until((folder / "here").exists)
        pipe.evaluate(x, target=y)
        if len(pipe.full_state_dict()) != len(plain.state_dict()):
            raise AssertionError("weights are missing")


def crowded_job(rank: int, ports: list[Any], folder: Path, num_steps: int, timeout_s: float) -> None:
    """Run steps on several pipelines while all their listeners are crowded, with few file descriptors."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (DESCRIPTORS, hard))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    x, y, expected, _ = plain_run(num_steps)
    options = {"mesh": mesh, "schedule": "1f1b", "distributed": Distributed(timeout=timeout_s), **GIVEN}
    with ExitStack() as stack:
        pipes = [stack.enter_context(Pipeline(model(), x[:2], **options)) for _ in range(PIPELINES)]
        alarms = [pipe._running.host.executor.connected.alarm._listener.server.getsockname()[:2] for pipe in pipes]
        write(folder / f"address-{rank}", json.dumps([*ports, *([*alarm, ""] for alarm in alarms)]))
        until((folder / "here").exists)
        most = 0
        for step, loss in enumerate(expected):
            for pipe in pipes:
                if not torch.equal(pipe.step(x[: 24 - step], target=y[: 24 - step]), loss):
                    raise AssertionError(f"the loss of step {step} differs from the loop's")
            time.sleep(1.0)  # more clients come
            most = max(most, len(STRANGERS))
            if len(STRANGERS) > DESCRIPTORS // 4:
                raise AssertionError(f"{len(STRANGERS)} strangers are held")
        print(f"rank {rank}: at most {most} strangers, {len(os.listdir('/proc/self/fd'))} descriptors", flush=True)
    setrlimit(RLIMIT_NOFILE, (soft, hard))


def main() -> int:
    """Print a row for each kind of client; returns the number of failed jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=6.0, help="timeout of the pipelines, in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        folders = [Path(place) / kind for kind in options.only]
        for folder in folders:
            folder.mkdir()
            folder.chmod(0o777)  # so that the client with another user can write
        context = multiprocessing.get_context("fork")
        guard = context.Process(target=one_by_one, args=(options.only, folders, options.ranks), daemon=False)
        guard.start()
        try:
            results = in_ranks(options.ranks, meeting, options.only, folders, options.steps, options.timeout)
        finally:
            guard.terminate()
            guard.join()
    print(f"{machine()}; {options.ranks} ranks, timeout={options.timeout:g}\n")
    print("| client | behaviour | job | s |\n|---|---|---|---|")
    died = 0
    for kind, *own in zip(options.only, *results, strict=True):
        texts = [text for _, text in own if text]
        died += bool(texts)
        said = f"failed: {texts[0].splitlines()[0][:120]}" if texts else "all bits right"
        print(f"| {kind} | {KINDS[kind][0]} | {said} | {max(seconds for seconds, _ in own):.1f} |")
    print(f"\n{died} of {len(options.only)} jobs failed")
    return died


def one_by_one(kinds: list[str], folders: list[Path], num_ranks: int) -> None:
    """Start each kind of client in turn, and stop it after its job. Runs in a process without torch's threads."""
    for kind, folder in zip(kinds, folders, strict=True):
        stranger = multiprocessing.get_context("fork").Process(target=attack, args=(kind, folder, num_ranks))
        stranger.start()
        while not (folder / "over").exists():
            time.sleep(0.02)
        stranger.kill()
        stranger.join()


if __name__ == "__main__":
    sys.exit(main())
