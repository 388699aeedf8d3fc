"""GPU messages: which groups of processes can train on this machine's accelerators, and what the others raise.

    python benchmarks/gpu_messages.py [--device cuda] [--limit 60]

Each attempt starts new processes, which train a small model for three steps under 1f1b and zb-h1:

- one rank, over the library of messages that torch uses for this type of device (NCCL for CUDA devices, gloo if torch
  knows none);
- two ranks on one device, over this library, and with a gloo group; NCCL refuses two ranks on one device, and the
  error must arrive in time and name the cause;
- two ranks on two devices, if the machine has two.

An attempt succeeds if losses and gradients have the bits of pipesched.testing.reference_step on the same device. An
attempt without an end is stopped after the limit, and counts as a hang. The script fails if one rank does not train, or
if an attempt hangs.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from block_models import Shape, pipeline
from measure import machine
from on_device import Figures, add_options, all_devices, backend_of, begun
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed
from pipesched.devices.streams import is_accelerator
from pipesched.testing import reference_step

SHAPE = Shape(4, 64, 16, 2, 4)
SAME_BITS = "trained; losses and gradients have the bits of a plain loop"


@dataclass(frozen=True)
class Attempt:
    """One group of processes to try under some schedules, and whether it must train."""

    name: str
    backend: str
    devices: tuple[torch.device, ...]
    must_train: bool = False
    schedules: tuple[str, ...] = ("1f1b", "zb-h1")


def attempts(device: torch.device) -> Iterator[Attempt]:
    """Yield the attempts for which the machine has enough devices."""
    own = backend_of(device) or "gloo"
    devices = all_devices(device)
    yield Attempt(f"one rank, {own}", own, (device,), must_train=True)
    for backend in dict.fromkeys((own, "gloo")):
        yield Attempt(f"two ranks on {device}, {backend}", backend, (device, device), not is_accelerator(device))
    if len(devices) > 1:
        yield Attempt(f"two ranks on two devices, {own}", own, (devices[0], devices[1]), must_train=True)


def train(rank: int, one: Attempt, port: int, limit_s: float, outcomes: "SimpleQueue[tuple[int, str]]") -> None:
    """Run one rank of an attempt; put what happened into the queue."""
    torch.set_num_threads(1)
    device, ranks = one.devices[rank], len(one.devices)
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    try:
        store = distributed.TCPStore("127.0.0.1", port, None, False)
        distributed.init_process_group(one.backend, store=store, rank=rank, world_size=ranks)
        mesh = DeviceMesh.from_group(distributed.group.WORLD, device.type)
        for name in one.schedules:
            check(name, mesh, device, limit_s)
        outcomes.put((rank, SAME_BITS))
        distributed.destroy_process_group()
    except Exception as error:  # whatever the library raises is the result
        lines = [line for line in str(error).splitlines() if line.strip()]
        outcomes.put((rank, f"{type(error).__name__}: {' '.join(lines[:2])}"))
        sys.exit(1)


def check(name: str, mesh: DeviceMesh, device: torch.device, limit_s: float) -> None:
    """Train under a schedule. Raises ArithmeticError if a loss or a gradient differs from the loop's in a bit."""
    x, y = SHAPE.batch(device)
    loop = SHAPE.model(device)
    own: dict[str, Any] = {"mesh": mesh, "seed": 5, "distributed": Distributed(timeout=limit_s / 3)}
    with pipeline(SHAPE, SHAPE.model(device), name, x, mesh.size(), **own) as pipe:
        for step in range(3):
            loss = float(pipe.step(x, target=y))
            options: dict[str, Any] = {"num_microbatches": SHAPE.microbatches, "seed": 5, "step": step}
            due = float(reference_step(loop, x, target=y, loss_fn=functional.mse_loss, **options))
            if loss != due:
                raise ArithmeticError(f"{name}: the loss of step {step} is {loss!r} instead of {due!r}")
        grads = {name: parameter.grad for name, parameter in loop.named_parameters()}
        for parameter_name, own_parameter in pipe.named_parameters():
            if own_parameter.grad is not None and not torch.equal(own_parameter.grad, grads[parameter_name]):
                raise ArithmeticError(f"{name}: the gradient of {parameter_name} differs from the loop's")


def outcome(one: Attempt, limit_s: float) -> tuple[list[str], bool]:
    """Run an attempt; return what happened on each rank, and whether no rank had to be stopped."""
    context = get_context("spawn")
    outcomes: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # port 0: any free port
    shared = one, store.port, limit_s, outcomes
    ranks = [context.Process(target=train, args=(rank, *shared)) for rank in range(len(one.devices))]
    for rank in ranks:
        rank.start()
    end_s = time.monotonic() + limit_s
    for rank in ranks:
        rank.join(max(0.1, end_s - time.monotonic()))
    hung = [rank.is_alive() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    said = {}
    while not outcomes.empty():
        index, text = outcomes.get()
        said[index] = text
    ends = [f"did not end within {limit_s:g} s" if one else "" for one in hung]
    codes = [f"ended with exit code {rank.exitcode}" for rank in ranks]
    return [said.get(index, ends[index] or codes[index]) for index in range(len(ranks))], not any(hung)


def main() -> None:
    """Run all attempts; print what happened on each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60, help="seconds for each attempt (default: 60)")
    add_options(parser)
    args = parser.parse_args()
    device = begun(args.device)
    print(f"{machine()}; torch's library of messages for {device.type}: {backend_of(device) or 'none'}")
    failed = False
    for found in attempts(device):
        one = replace(found, schedules=found.schedules[:1]) if args.tiny else found
        begin_s = time.monotonic()
        said, ended = outcome(one, args.limit)
        trained = all(text == SAME_BITS for text in said)
        failed |= not ended or (one.must_train and not trained)
        seconds = time.monotonic() - begin_s
        print(f"\n{one.name} ({seconds:.1f} s)")
        for rank, text in enumerate(said):
            print(f"  rank {rank}: {text}", flush=True)
        Figures(args.figures).add("messages", attempt=one.name, trained=trained, ended=ended, said=said, s=seconds)
    if is_accelerator(device) and len(all_devices(device)) == 1:
        print(f"\nnever run: ranks on several devices of type {device.type}; this machine has one")
    sys.exit(failed)


if __name__ == "__main__":
    main()
