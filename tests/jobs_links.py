"""What ranks run for the tests of links."""

import threading
import time
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from pipesched.executors.distributed import DistributedExecutor
from pipesched.executors.wire import Port, Ports
from pipesched.link_probe import measure_links
from pipesched.links import Links


class Delayed:
    """A port whose messages to some ranks stay on the way for a while; each channel keeps its order."""

    def __init__(self, port: Port, delay_s: dict[int, float]) -> None:
        self._port, self._delay_s = port, delay_s
        self._under_way: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        if to not in self._delay_s:
            return self._port.send(tensors, to, tag)
        self._under_way.put((time.monotonic() + self._delay_s[to], [one.clone() for one in tensors], to, tag))
        return None

    def recv(self, tensors: list[Tensor], from_: int, tag: int, /) -> Any:
        return self._port.recv(tensors, from_, tag)

    def _deliver(self) -> None:
        while (message := self._under_way.get()) is not None:
            due_s, *sent = message
            time.sleep(max(0, due_s - time.monotonic()))
            if (work := self._port.send(*sent)) is not None:
                work.wait()

    def close(self) -> None:
        self._under_way.put(None)
        self._thread.join()


def probe(group: Any, slow: dict[tuple[int, int], float]) -> Links:
    """The links as measured, where messages from one rank to another take so many seconds more."""
    executor = DistributedExecutor(group, timeout_s=20)
    delay_s = {receiver: seconds for (sender, receiver), seconds in slow.items() if sender == group.rank()}
    ports = executor._wire._ports
    delayed = [Delayed(port, delay_s) for port in (ports.short, ports.long)]
    executor._wire._ports = Ports(*delayed)
    links = measure_links(executor)
    for port in delayed:
        port.close()
    executor.close()
    return links
