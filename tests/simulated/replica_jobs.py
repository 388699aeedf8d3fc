"""Jobs that use the collective lane or memory as a stage does, in the order in which a missing mark shows.

The lane runs its jobs when it likes. So a job here holds the lane at a gate, or waits on the host until the lane has
run, before it allocates memory again. Four ranks are two replicas of two stages.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.devices.streams import current_stream, new_stream, on_stream
from pipesched.runtime.gradients.divided_copies import DividedCopies
from pipesched.runtime.gradients.shards import Shards
from pipesched.runtime.reductions.collective_lane import CollectiveLane
from pipesched.runtime.reductions.replica_sum import ReplicaGroup, ReplicaSums
from pipesched.tensors.meta_tensors import put_away

__all__ = [
    "delivered_sum_is_dropped",
    "rows_are_dropped",
    "scatter_is_dropped",
    "sum_is_dropped",
    "weights_are_put_away",
]

_COUNT = 64
_LIMIT_S = 20.0


class _Replicas:
    """Two replicas of this rank's stage: the sums over them, and the lane that runs the sums."""

    def __init__(self) -> None:
        self.device = torch.device("sim", torch.accelerator.current_device_index())
        self.lane = CollectiveLane(self.device)
        self._group = ReplicaGroup([[0, 1], [2, 3]], _LIMIT_S)
        self.sums = ReplicaSums(self._group, self._group, self.lane, lambda: None)

    def memory(self) -> Tensor:
        return torch.ones(_COUNT, device=self.device)

    def ends(self) -> None:
        """Wait on the host until the lane has run all jobs so far."""
        ended = threading.Event()
        self.lane.start(ended.set)
        assert ended.wait(_LIMIT_S)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lane at a gate meanwhile."""
        gate = threading.Event()
        self.lane.start(partial(_pass, gate))
        try:
            yield
        finally:
            gate.set()

    def close(self) -> None:
        self.lane.close()
        self._group.close()


@contextmanager
def _replicas() -> Iterator[_Replicas]:
    replicas = _Replicas()
    compute = new_stream(replicas.device)
    compute.wait_stream(current_stream(replicas.device))
    with on_stream(compute):
        yield replicas
    replicas.close()


def _pass(gate: threading.Event) -> None:
    assert gate.wait(_LIMIT_S)


def _abandon(start: Callable[[_Replicas], Any]) -> None:
    """Start a collective, let a failed step drop its tensors, and use their memory again on the compute stream."""
    with _replicas() as replicas:
        start(replicas)
        replicas.ends()
        for _ in range(4):
            replicas.memory()


def sum_is_dropped(group: Any) -> None:
    _abandon(lambda replicas: replicas.sums.start([replicas.memory()]))


def scatter_is_dropped(group: Any) -> None:
    _abandon(lambda replicas: replicas.sums.scatter([replicas.memory().view(2, -1)]))


def rows_are_dropped(group: Any) -> None:
    """Each replica sends a tensor of its own and receives the other one."""
    _abandon(lambda replicas: replicas.sums.spread([[[replicas.memory()], [replicas.memory()]]]))


class _Ignores:
    """Takes gradients, and drops them."""

    def __init__(self, shards: Shards) -> None:
        self.shape, self.parts, self.own = shards.shape, shards.parts, shards.own

    def take(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        if grad is not None:
            grad.mul_(2)


def delivered_sum_is_dropped(group: Any) -> None:
    """A later job of the lane allocates the memory of a sum that the compute stream still reads."""
    with _replicas() as replicas:
        parameter = nn.Parameter(torch.ones(_COUNT, 4, device=replicas.device))
        parameter.grad = torch.ones_like(parameter)
        shards = Shards([parameter], group.rank() % 2, 2, cuts=True)
        copies = DividedCopies({parameter: _Ignores(shards)})
        ticket = replicas.sums.scatter(copies.buffers)
        like = copies.buffers[0].new_zeros
        length = copies.buffers[0].shape[1]
        ticket.wait(lambda: None)
        with replicas.held():
            replicas.lane.start(lambda: [like(length) for _ in range(4)])
            copies.deliver({})
            del copies, ticket
        replicas.ends()


def weights_are_put_away(group: Any) -> None:
    """A layer leaves the device on a stream of the caller, and its memory is used again on another stream."""
    device = torch.device("sim", torch.accelerator.current_device_index())
    layer = nn.Linear(_COUNT, _COUNT).to(device)
    caller = new_stream(device)
    caller.wait_stream(current_stream(device))
    with on_stream(caller):
        layer.weight.detach().mul_(2)
        put_away(layer, dict.fromkeys(layer.parameters(), torch.device("meta")))
    for _ in range(4):
        torch.ones(_COUNT, _COUNT, device=device)
