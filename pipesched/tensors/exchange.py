"""Exchange: what ranks give each other beside a program's messages, all that one has for another in one message."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from pipesched.tensors.meta_tensors import is_expanded

__all__ = ["Move", "RankDevices", "Trade", "copy_into", "moved"]

#: (rank that has a value, rank that gets it, what makes it)
Move = tuple[int, int, Callable[[], Any]]


class Trade(Protocol):
    """How ranks in different processes exchange values beside a program's."""

    def holds(self, rank: int) -> bool:
        """Whether the rank runs in this process."""

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Give values to other ranks, and take what those in ``sources`` give to this one."""


class RankDevices(Protocol):
    """Which device each rank has, and which ranks run in this process."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """One a rank."""

    def holds(self, rank: int) -> bool:
        """Whether the rank runs in this process."""

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise the error, and tell the ranks of other processes."""


def moved(trade: Trade, what: str, moves: Sequence[Move]) -> Iterator[Any]:
    """For each move what its source made, where its target is here; else None. Collective over processes."""
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
    """Not counted as a modification: passes that are open still see the values that they saw, or the home tells."""
    if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and not is_expanded(mine):
        mine.data.copy_(theirs)
    else:
        mine.data = theirs.detach().to(mine.device, copy=True)
