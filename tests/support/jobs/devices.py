"""Jobs of test_device_wire: they run the jobs of other files, with stand-ins for the NCCL links between devices.

Like an NCCL communicator of two ranks, a StandIn runs its operations one after the other, in a thread of its own. A
send reads its memory only after the peer has posted the matching receive.
"""

import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from pipesched import Costs, schedules
from pipesched.program.lowering import lower
from pipesched.runtime import connected_rank
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.channel_plan import channels_of
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.transport.connections import DeviceTransport
from pipesched.runtime.transport.device_channels import DeviceLinks
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.tensors.payload import Payload
from tests.support.jobs.messages import Carries
from tests.support.jobs.programs import Checks, checked_run, run_spec

DATA, POSTED, HANG_UP = 0, 1, 2  # tags
made: Counter[str] = Counter()


class Posted:
    """A posted send or receive, and an event that is set when the operation has ended."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.ended = threading.Event()
        self.failed = False

    def is_completed(self) -> bool:
        return self.ended.is_set()


class StandIn:
    """One end of a link: a thread that runs the posted operations over gloo."""

    def __init__(self, store: Any, sends: bool, timeout_s: float) -> None:
        self._sends, self._peer = sends, int(sends)
        self._group = distributed.ProcessGroupGloo(store, int(not sends), 2, timedelta(seconds=timeout_s))
        self._posts: SimpleQueue[Posted | None] = SimpleQueue()
        self._last: Posted | None = None
        threading.Thread(target=self._run_spec, name="stand-in", daemon=True).start()

    def _run_spec(self) -> None:
        token = torch.zeros(1)
        while (posted := self._posts.get()) is not None:
            with suppress(RuntimeError):
                if self._sends:
                    self._group.recv([token], self._peer, POSTED).wait()
                    self._group.send([posted.memory], self._peer, DATA).wait()
                else:
                    self._group.send([token], self._peer, POSTED).wait()
                    self._group.recv([posted.memory], self._peer, DATA).wait()
                posted.ended.set()
                continue
            posted.failed = True
            posted.ended.set()

    def _post(self, memory: Tensor) -> Posted:
        self._last = posted = Posted(memory)
        self._posts.put(posted)
        made["posted"] += 1
        return posted

    def connect(self) -> None:
        made["links"] += 1
        if self._sends:
            self.send(torch.zeros(1, dtype=torch.uint8))
        else:
            self.receive(1)
        self.drain()

    def send(self, memory: Tensor) -> Posted:
        return self._post(memory)

    def receive(self, nbytes: int) -> Tensor:
        posted = self._post(torch.empty(nbytes, dtype=torch.uint8))
        posted.ended.wait()  # on a CPU no stream can wait for the message, so the host's thread waits
        if posted.failed:
            raise ConnectionLostError("the link ended")
        return posted.memory

    def drain(self) -> None:
        if self._last is not None:
            self._last.ended.wait()

    def abort(self) -> None:
        self._posts.put(None)
        with suppress(RuntimeError):  # a receive that times out ends all waits of a gloo group
            self._group.recv([torch.empty(1)], self._peer, HANG_UP).wait(timedelta(milliseconds=1))


class StandIns:
    """Replaces the factory of NCCL links: makes a StandIn for each link."""

    device = torch.device("cpu")

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def link(self, store: Any, *, sends: bool) -> StandIn:
        return StandIn(store, sends, self._timeout_s)

    def begin(self) -> None:
        made["begun"] += 1


def over_links(group: Any, job: Any, *args: Any) -> Any:
    """Run a job of another file with StandIns. Check that the job has posted operations on them."""
    before = made["posted"]
    with mock.patch.object(connected_rank, "transport_for", partial(DeviceTransport, maker=StandIns)):
        result = job(group, *args)
    assert group.size() == 1 or made["posted"] > before
    return result


def memory_of_messages(group: Any, num_microbatches: int) -> int:
    """Count, for each layout, the messages whose memory this rank holds. Return the largest count."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    program = lower(schedules.get("1f1b").program(group.size(), num_microbatches))
    outputs = [Payload.of(torch.ones(100, 256))] * num_microbatches
    for _ in range(3):
        stages = {index: Carries(index, outputs, [one.leaves for one in outputs]) for index in range(2)}
        executor.run(run_spec(program, stages), grad=False)
    made = max(
        sum(sent.spare is form.spare for sent in channel._sent) + len(form.spare)
        for one in executor.connected.wire()._neighbours.values()
        for channel in one.outgoing
        for form in channel.predictor.foreseen
    )
    executor.close()
    return made


class Fails(Checks):
    """A fake stage. Stage 1 fails in its third forward, while other ranks send messages to its rank."""

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        if (self.index, microbatch) == (1, 2):
            time.sleep(0.1)
            raise ZeroDivisionError("a layer's own error")
        return super().forward(microbatch, *arrived, split=split, checkpointed=checkpointed)


def fail_with_messages_posted(group: Any) -> tuple[float, str, list[str]]:
    """Run a step in which rank 1 fails. Return the seconds, this rank's error, and the names of threads still alive."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    program = lower(schedules.get("gpipe").program(group.size(), 8))
    checked_run(executor, program)
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    start_s = time.perf_counter()
    try:
        executor.run(run_spec(program, {index: Fails(index, free) for index in range(3)}), grad=False, looks=[0] * 8)
        text = "it ran"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start_s
    for thread in threading.enumerate():
        if thread.name == "stand-in":
            thread.join(5)
    return seconds, text, [thread.name for thread in threading.enumerate() if thread.name == "stand-in"]


def links_of_programs(group: Any, names: list[str]) -> list[list[tuple[int, ...]]]:
    """Run several programs on one executor. Return the links that this rank has after each program."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    links = []
    for name in names:
        checked_run(executor, lower(schedules.get(name).program(group.size(), 4)))
        links.append(sorted(tuple(map(int, channel)) for channel in executor.connected.links._links))
    executor.close()
    return links


def too_many_links(group: Any) -> str:
    links = DeviceLinks(StandIns(torch.device("cpu"), 10), None, 0)
    program = lower(schedules.get("1f1b").program(2, 2))
    (one, *_) = channels_of(program, range(2))
    try:
        links.connect(one._replace(giver=0, taker=peer) for peer in range(1, 34))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "made"
