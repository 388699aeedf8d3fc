"""Exchange: sends values between ranks outside the schedule, such as gradients of tied weights."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipesched.tensors.meta_tensors import is_expanded

__all__ = ["Move", "RankDevices", "Trade", "copy_into", "moved"]

#: (rank that sends a value, rank that receives it, function that returns the value on the sender)
Move = tuple[int, int, Callable[[], Any]]


class Trade(Protocol):
    """Exchanges values between ranks of different processes, outside the schedule."""

    def holds(self, rank: int) -> bool:
        """Return whether the rank runs in this process."""

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send ``given[rank]`` to each rank in ``given``. Return the values from ``sources``, keyed by rank."""

    def gather_over_replicas(self, value: Any) -> list[Any]:
        """All-gather ``value`` among the ranks that hold the same stages. Return all values in replica order."""


class RankDevices(Protocol):
    """The device of each rank, and the ranks that run in this process."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The device of each rank."""

    def holds(self, rank: int) -> bool:
        """Return whether the rank runs in this process."""


def moved(trade: Trade, what: str, moves: Sequence[Move]) -> Iterator[Any]:
    """Carry out all moves. For each move, yield the value if the receiver is in this process, else None.

    All processes must call this function. All values from one rank to another are sent in one message.
    """
    holds = trade.holds
    given: dict[int, list[Any]] = {}
    for source, target, make in moves:
        if holds(source) and not holds(target):
            given.setdefault(target, []).append(make())
    sources = {source for source, target, _ in moves if holds(target) and not holds(source)}
    arrived = {source: iter(values) for source, values in trade.trade(what, given, sources).items()}
    for source, target, make in moves:
        if not holds(target):
            yield None
        else:
            yield make() if holds(source) else next(arrived[source])


@torch.no_grad()
def copy_into(mine: Tensor, theirs: Tensor) -> None:
    """Copy ``theirs`` to ``mine``.

    The version counter of ``mine`` does not change, so a backward that uses ``mine`` does not fail.
    """
    if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and not is_expanded(mine):
        mine.data.copy_(theirs)
    else:
        mine.data = theirs.detach().to(mine.device, copy=True)
