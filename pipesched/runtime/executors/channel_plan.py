"""Channel plan: groups the messages of a rank's order by channel, and computes a layout key for each message.

Messages with equal layout keys are predicted to have equal layouts.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pipesched.program.actions import BACKWARD_MESSAGES, SENDS, Action
from pipesched.program.program import Program
from pipesched.runtime.executors.interpreter import BoundRank
from pipesched.runtime.transport.channels import NORMS, Channels, Messages
from pipesched.runtime.transport.device_channels import Channel
from pipesched.runtime.transport.layout_predictor import digest
from pipesched.tensors.payload import Payload, flatten

__all__ = ["ChannelEnds", "OrderMessages", "channels_of", "digest_of", "look"]

_LOG = logging.getLogger(__name__)


def look(value: Any) -> Hashable:
    """Return a key that describes the shapes of a micro-batch, for predicting the layouts of its messages.

    The key contains the dtype and the shape of each tensor, and the type name of each other leaf.
    """
    leaves = flatten(value)[0]
    return tuple(
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__qualname__ for leaf in leaves
    )


def _described(looks: Sequence[Hashable]) -> str:
    """Describe the shapes of micro-batches from their ``look``, as in "3 x float32[2, 8] and 1 x float32[1, 8]"."""
    return " and ".join(f"{len([*same])} x {', '.join(_shapes(one))}" for one, same in groupby(looks))


def _shapes(looked: Any) -> Iterator[str]:
    """Return the tensors in a ``look``, or in a pair of a ``look`` and a path."""
    for part in looked if isinstance(looked, tuple) else ():
        if isinstance(part, tuple) and part and isinstance(part[0], torch.dtype):
            yield f"{str(part[0]).removeprefix('torch.')}{[*part[1]]}"
        else:
            yield from _shapes(part)


class OrderMessages:
    """Groups the messages of one rank's order by channel, and lists the messages of each channel in order.

    Args:
        program: the lowered program.
        order: the rank's order.
        ranks: the group rank of each rank of the program.

    """

    def __init__(self, program: Program, order: tuple[Action, ...], ranks: Sequence[int]) -> None:
        self.order = order
        #: The Rank bound to this order, if later runs may reuse it; otherwise None.
        self.rank: BoundRank | None = None
        self._edges: dict[int, dict[tuple[bool, bool], list[tuple[int, int, int]]]] = {}
        self._last: tuple[Any, tuple[Messages, bytes, str]] | None = None
        for stage, kind, microbatch, peer in order:
            if peer is not None:
                channels = self._edges.setdefault(ranks[program.placement[peer]], {})
                edge = channels.setdefault((kind in SENDS, kind in BACKWARD_MESSAGES), [])
                ends = (stage, peer) if kind in SENDS else (peer, stage)
                edge.append((*ends, microbatch))

    def repeated(self, period: int) -> Messages:
        """Return layout keys for a stream, in which messages of the k-th micro-batch have the same key in every step.

        The layouts of one step therefore predict the layouts of the next step. ``period`` is the number of
        micro-batches in a step.
        """
        return {
            peer: {
                channel: [(giver, taker, "stream", microbatch % period) for giver, taker, microbatch in edge]
                for channel, edge in channels.items()
            }
            for peer, channels in self._edges.items()
        }

    @property
    def none(self) -> Messages:
        """Return all channels of the order, each with an empty list of layout keys."""
        return {peer: dict.fromkeys(channels, ()) for peer, channels in self._edges.items()}

    def keys(self, looks: Sequence[Hashable], grad: bool) -> tuple[Messages, bytes, str]:
        """Return the layout keys of a step's messages, a digest of the arguments, and a description of the batch.

        Repeated calls with the same arguments return the same objects.

        Args:
            looks: the key of each micro-batch, from ``look``; empty if unknown.
            grad: whether grad mode is enabled.

        """
        asked = tuple(looks), grad
        if self._last is None or self._last[0] != asked:
            if self._last is not None:
                _LOG.debug("the micro-batches have different shapes than in the previous step: %s", looks)
            keys: dict[int, dict[tuple[bool, bool], list[Hashable]]] = {
                peer: {
                    channel: [
                        (giver, taker, grad, looks[microbatch] if looks else None) for giver, taker, microbatch in edge
                    ]
                    for channel, edge in channels.items()
                }
                for peer, channels in self._edges.items()
            }
            self._last = asked, (keys, digest(repr(asked).encode()), _described(looks))
        return self._last[1]


class ChannelEnds:
    """Returns the functions with which the interpreter sends and receives on one rank's channels.

    Args:
        program: the lowered program.
        wire: the channels to all ranks of the group.
        ranks: the group rank of each rank of the program.

    """

    def __init__(self, program: Program, wire: Channels, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._placement = [ranks[rank] for rank in program.placement]
        self._wire = wire

    def sender(self, action: Action) -> Callable[[Any], None]:
        return self._wire.sender(self._placement[action.peer or 0], action.kind in BACKWARD_MESSAGES)

    def receiver(self, action: Action) -> Callable[[], Any]:
        return self._wire.receiver(self._placement[action.peer or 0], action.kind in BACKWARD_MESSAGES)

    def exchange(self, rank: int) -> tuple[Callable[[list[Any]], None], Callable[[], list[Any]]]:
        wire = self._wire
        others = sorted({*self._placement} - {self._ranks[rank]})

        def send(values: list[Any]) -> None:
            wire.tell_all(others, NORMS, Payload.of(values))

        def receive() -> list[Any]:
            takes = [wire.ask(other, NORMS) for other in others]
            return [value for take in takes for value in take().value]

        return send, receive


def channels_of(program: Program, ranks: Sequence[int]) -> set[Channel]:
    """Return the channels that a lowered program uses. ``ranks`` maps each rank of the program to its group rank."""
    sends = program.columns[program.columns.are(*SENDS)]
    return {
        Channel(ranks[program.placement[stage]], ranks[program.placement[peer]], kind in BACKWARD_MESSAGES)
        for stage, kind, _, peer in sends
        if peer is not None
    }


def digest_of(program: Program) -> bytes:
    """Return a digest of a program. Ranks compare digests to check that they run the same program."""
    columns = program.columns
    arrays = (columns.stage, columns.kind, columns.microbatch, columns.peer, columns.joined, program.orders.offsets)
    others = program.placement, program.graph.edges, program.forward_only, program.num_microbatches, program.versions
    return digest(b"".join(array.tobytes() for array in arrays) + repr(others).encode())
