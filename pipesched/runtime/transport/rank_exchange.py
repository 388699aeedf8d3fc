"""Rank exchange: exchanges values between ranks, separately from a program's messages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesched.runtime.transport.channels import COLLECT, Channels
from pipesched.tensors.payload import Payload

__all__ = ["DEALT", "Exchange"]

DEALT = "values from rank 0"
_TRADES = (
    "weights",
    "gradients",
    "losses and outputs",
    "tied weights",
    "gradients of tied weights",
    "statistics",
    DEALT,
    "the state of a run",
    "copies of states",
    "kept batches",
)
_FIRST_TRADE = 30  # the first tag; each kind of trade uses two tags


@dataclass(frozen=True)
class Exchange:
    """Exchanges values within a group of ranks. Values are pytrees of tensors and plain values.

    Args:
        wire: the channels to all ranks.
        rank: this rank.
        members: the ranks that take part. Methods refer to a member by its position in this sequence.
        device: the device of received tensors.

    """

    wire: Channels
    rank: int
    members: Sequence[int]
    device: torch.device

    def all_values(self, value: Any) -> list[Any]:
        """All-gather: return every member's value, in member order. Received tensors are on this rank's device."""
        first, *others = self.members
        if self.rank != first:
            self.wire.tell(first, COLLECT, Payload.of(value))
            values: list[Any] = self._moved(self.wire.ask(first, COLLECT)())
            return values
        values = [value, *(self._moved(take()) for take in [self.wire.ask(rank, COLLECT) for rank in others])]
        given = Payload.of(values)
        for rank in others:
            self.wire.tell(rank, COLLECT, given)
        return values

    def _moved(self, arrived: Payload) -> Any:
        """Return a value with its tensors copied to this rank's device; a tensor that occurs twice is copied once."""
        own: dict[Any, Tensor] = {}

        def moved(tensor: Tensor) -> Tensor:
            key = tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride()
            if key not in own:
                own[key] = tensor.to(self.device, copy=True)
            return own[key]

        return arrived.map_tensors(moved).value

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send ``given[member]`` to each member in ``given``, then wait for a value from each member in ``sources``.

        Returns the received values, keyed by sender. ``what`` is the kind of exchange, one of _TRADES.
        """
        tag = _FIRST_TRADE + 2 * _TRADES.index(what)
        takes = {source: self.wire.ask(self.members[source], tag) for source in sorted(sources)}
        payloads = {id(value): Payload.of(value) for value in {id(own): own for own in given.values()}.values()}
        for member, value in given.items():
            self.wire.tell(self.members[member], tag, payloads[id(value)])
        return {source: take().value for source, take in takes.items()}

    def trade_once(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Like ``trade``, and then wait until the values are sent. The memory of the messages is freed."""
        arrived = self.trade(what, given, sources)
        self.wire.free(_FIRST_TRADE + 2 * _TRADES.index(what))
        return arrived
