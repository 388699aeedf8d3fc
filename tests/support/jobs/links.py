"""Jobs of the tests that measure links between ranks."""

import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipesched import Distributed, Pipeline, Search, probe_links
from pipesched.profiling.link_probe import measure_links
from pipesched.profiling.overhead_probe import probe_overheads
from pipesched.program.actions import Kind
from pipesched.runtime.rank_grid import RankGrid, SumRanks
from pipesched.runtime.rank_host import host_of_group
from pipesched.runtime.reductions import replica_sum
from pipesched.runtime.transport.ports import Ports
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import Overheads
from tests.support import rank_processes


class Delivery:
    """A message that waits for its delivery at ``due_s``."""

    def __init__(self, due_s: float, send: Any, message: Any) -> None:
        self.due_s, self.send, self.message = due_s, send, message
        self.made = threading.Event()

    def wait(self) -> None:
        self.made.wait()


class Delayed:
    """A port that delays all messages to some ranks. The messages of a channel stay in order."""

    def __init__(self, port: Any, delay_s: dict[int, float]) -> None:
        self._port, self._delay_s = port, delay_s
        self._under_way: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()
        if hasattr(port, "reader"):
            self.reader = port.reader
        else:
            self.recv = port.recv

    def sender(self, to: int, tag: int, /) -> Any:
        send = self._port.sender(to, tag)
        if to not in self._delay_s:
            return send
        return lambda parts, nbytes: self._put(to, send, [b"".join(parts)], nbytes)

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        if to not in self._delay_s:
            return self._port.send(tensors, to, tag)
        return self._put(to, self._port.send, [one.clone() for one in tensors], to, tag)

    def _put(self, to: int, send: Any, *message: Any) -> "Delivery":
        delivery = Delivery(time.monotonic() + self._delay_s[to], send, message)
        self._under_way.put(delivery)
        return delivery

    def _deliver(self) -> None:
        while (delivery := self._under_way.get()) is not None:
            time.sleep(max(0, delivery.due_s - time.monotonic()))
            if (work := delivery.send(*delivery.message)) is not None:
                work.wait()
            delivery.made.set()

    def close(self) -> None:
        self._under_way.put(None)
        self._thread.join()


def probe(group: Any, slow: dict[tuple[int, int], float]) -> Links:
    """Return the measured links if messages are delayed. ``slow``: (sender, receiver) -> seconds of delay."""
    host = host_of_group(group, RankGrid.single(group, timeout_s=20), SumRanks([], []))
    executor: Any = host.executor
    delay_s = {receiver: seconds for (sender, receiver), seconds in slow.items() if sender == group.rank()}
    ports = executor.connected.wire()._ports
    delayed = [Delayed(port, delay_s) for port in (ports.short, ports.long)]
    executor.connected.wire()._ports = Ports(*delayed)
    links = measure_links(host)
    for port in delayed:
        port.close()
    executor.close()
    return links


def overheads(group: Any) -> Overheads:
    """Measure the overheads of the ranks of this group."""
    return probe_overheads(mesh=DeviceMesh.from_group(group, "cpu"), timeout=20, rounds=1)


def collectives(group: Any, slow_s: float) -> tuple[Links, dict[str, float]]:
    """Measure links of 2 x 2 ranks with slowed all-gathers. Return the links and the predicted times of the REDUCEs."""
    mesh = rank_processes.mesh_of((2, 2), ("dp", "pp"))
    gather = replica_sum._all_gather

    def slowly(*given: Any, **options: Any) -> None:
        time.sleep(slow_s)
        gather(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_sum, "_all_gather", slowly)
        links = probe_links(mesh, timeout=20)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64))
    x = torch.zeros(2, 8)
    options: dict[str, Any] = {"schedule": "1f1b", "boundaries": [1], "num_microbatches": 2}
    options |= {"search": Search(links=links), "distributed": Distributed(timeout=20)}
    with Pipeline(model, x, loss_fn=lambda output, _: output.sum(), mesh=mesh, **options) as pipe:
        spans = [span for span in pipe.predicted.spans if span.action.kind is Kind.REDUCE]
        return links, {str(span.action): float(span.end_s - span.start_s) for span in spans}
