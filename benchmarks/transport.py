"""Transport: compares a message through pipesched's channels with one through raw gloo, and times empty stages.

    python benchmarks/transport.py [--rounds 25] [--messages 200]

The time of a message is half of a round trip between two processes, with the receive posted before the send; the
message is one tensor that requires a gradient. A round has --messages round trips; raw gloo and the channels take
turns. The time of empty stages is the wall time of a step with 64 micro-batches on 2 ranks in separate processes,
divided by the number of compute actions of a rank.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from measure import machine, paired, ratio
from overhead import real_stages
from torch import distributed

from pipesched import lower, schedules
from pipesched.program.actions import Lane
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.transport.channels import Channels
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.ports import Ports
from pipesched.runtime.transport.sockets import SocketPort, own_host
from pipesched.tensors.payload import Payload

SIZES = (64, 256 * 1024, 4 << 20)  # bytes
NUM_MICROBATCHES = 64


def rounds_raw(group: Any, nbytes: int, messages: int) -> Callable[[], float]:
    """Return a function that runs one round through gloo alone and returns the seconds that a message takes."""
    rank, out, into = group.rank(), torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    def run() -> float:
        start_s = time.perf_counter()
        work = group.recv([into], 1 - rank, 0)
        for number in range(messages):
            if rank:
                work.wait()
            sent = group.send([out], 1 - rank, 0)
            if not rank:
                work.wait()
            if number < messages - 1:
                work = group.recv([into], 1 - rank, 0)
            sent.wait()
        return (time.perf_counter() - start_s) / messages / 2

    return run


def rounds_wire(group: Any, wire: Channels, nbytes: int, messages: int) -> Callable[[], float]:
    """Return a function that runs a round through pipesched's channels and returns the seconds that a message takes."""
    rank, value = group.rank(), Payload.of(torch.zeros(nbytes // 4, requires_grad=True))
    ends = {(True, bool(rank)): [nbytes] * messages, (False, not rank): [nbytes] * messages}

    def run() -> float:
        wire.open({1 - rank: ends}, b"")
        send, receive = wire.sender(1 - rank, bool(rank)), wire.receiver(1 - rank, not rank)
        start_s = time.perf_counter()
        for _ in range(messages):
            if rank:
                receive()
                send(value)
            else:
                send(value)
                receive()
        return (time.perf_counter() - start_s) / messages / 2

    return run


def empty_steps(executor: ProcessExecutor, name: str) -> Callable[[], float]:
    """Return a function that runs one step of empty stages and returns the seconds per compute action."""
    program = lower(schedules.get(name).program(2, NUM_MICROBATCHES))
    computes = sum(action.lane is Lane.COMPUTE for action in program.orders[executor.connected.rank])
    stages = real_stages(program.num_stages)

    def begin(*_: Any) -> None:
        x = torch.zeros(4, requires_grad=True)
        step_data = StepData(0, 0, [((x,), {})] * NUM_MICROBATCHES, output_grads=[(torch.ones(4),)] * NUM_MICROBATCHES)
        for stage in stages.values():
            stage.begin(step_data)

    def run() -> float:
        start_s = time.perf_counter()
        executor.run(RunSpec(program, stages, prepare=begin), grad=True)
        return (time.perf_counter() - start_s) / computes

    return run


def serve(rank: int, port: int, rounds: int, messages: int) -> None:
    """Run all measurements in one of the two processes; rank 0 prints the results."""
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, None, False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = distributed.group.WORLD
    sockets = SocketPort(distributed.PrefixStore("transport", store), rank, own_host(store), 60)
    wire = Channels(Ports(sockets, group), (), Encoding())
    for nbytes in SIZES:
        raw, ours = rounds_raw(group, nbytes, messages), rounds_wire(group, wire, nbytes, messages)
        for run in (ours, raw):  # warm-up: the channels predict message layouts from the second round on
            run()
        say(rank, f"one way, {nbytes} bytes", *paired(raw, ours, rounds))
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group)))
    steps = [empty_steps(executor, name) for name in ("1f1b", "interleaved-1f1b")]
    for step in steps:
        step()
    first, second = paired(*steps, rounds)
    for name, times in (("1f1b", first), ("interleaved-1f1b", second)):
        say(rank, f"empty stages, {name}, a compute action", times)
    executor.close()


def say(rank: int, what: str, *columns: list[float]) -> None:
    """Print the median and quartiles of each list of times.

    If there are two lists, also prints the ratio of the second to the first.
    """
    if rank:
        return
    cells = []
    for times in columns:
        low, _, high = quantiles(times)
        cells.append(f"{median(times) * 1e6:8.1f} us ({low * 1e6:.1f} to {high * 1e6:.1f})")
    ending = f"   wire / raw {ratio(columns[1], columns[0])}" if len(columns) > 1 else ""
    print(f"{what:44}" + "   ".join(cells) + ending, flush=True)


def main() -> None:
    """Start both processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--messages", type=int, default=200)
    options = parser.parse_args()
    print(machine())
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=serve, args=(rank, store.port, options.rounds, options.messages)) for rank in range(2)
    ]
    for process in others:
        process.start()
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
