"""Jobs of the tests of links."""

import threading
import time
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pipesched.profiling.link_probe import measure_links
from pipesched.profiling.overhead_probe import probe_overheads
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.transport.ports import Ports
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import Overheads


class Delivery:
    """A message that is being delivered."""

    def __init__(self, due_s: float, send: Any, message: Any) -> None:
        self.due_s, self.send, self.message = due_s, send, message
        self.made = threading.Event()

    def wait(self) -> None:
        self.made.wait()


class Delayed:
    """A port that delivers messages to some ranks late; each channel keeps its order."""

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
    """Return the measured links if messages from one rank to another take some more seconds."""
    executor = ProcessExecutor(group, timeout_s=20)
    delay_s = {receiver: seconds for (sender, receiver), seconds in slow.items() if sender == group.rank()}
    ports = executor._wire._ports
    delayed = [Delayed(port, delay_s) for port in (ports.short, ports.long)]
    executor._wire._ports = Ports(*delayed)
    links = measure_links(executor)
    for port in delayed:
        port.close()
    executor.close()
    return links


def overheads(group: Any) -> Overheads:
    """Return the overheads of ranks."""
    return probe_overheads(mesh=DeviceMesh.from_group(group, "cpu"), timeout=20, rounds=1)
