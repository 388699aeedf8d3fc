"""Problem: the input of the search for a partition: blocks, slots, the costs of cuts, and pins."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.blocks import Blocks, Cuts, cuts_of
from pipesched.partitioning.chain import ChainSearch
from pipesched.partitioning.checkpointed_chain import CheckpointedChain
from pipesched.partitioning.lattice import Lattice
from pipesched.partitioning.order_ideals import Ideals
from pipesched.partitioning.slots import RankLayout, TransferCost
from pipesched.simulation.links import Link

__all__ = ["Communication", "CutProblem", "Pin"]

Communication = Literal["none", "overlap", "serial"]


@dataclass(frozen=True)
class Pin:
    """A layer that must begin a stage. All layers on which it depends (``ancestors``) must be in earlier stages."""

    stage: int
    layer: int
    ancestors: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A partitioning problem: the blocks to divide, and the slots (``layout``) for the resulting stages."""

    blocks: Blocks
    layout: RankLayout
    communication: Communication
    link: Link
    pins: Sequence[Pin]
    #: The activation options of each layer; empty if all activations must stay on the device.
    options: Sequence[Sequence[ActivationOption]] = ()

    @property
    def fills_up(self) -> bool:
        """Whether an additional stage never makes a partition slower. If so, as many stages as possible are used."""
        return self.communication == "none" and self.layout.alike and self.layout.in_line and not self.pins

    @cached_property
    def heaviest(self) -> int:
        """The block whose forward and backward together take longest."""
        return int(self.blocks.total(self.blocks.layers.ticks).argmax())

    @cached_property
    def lower(self) -> int:
        """A lower bound on the bottleneck, in ticks.

        The bound is the larger of two times: the time of a rank if all work could be divided perfectly evenly, and the
        time of the heaviest block on the fastest rank.
        """
        work = self.blocks.total(self.blocks.layers.ticks)
        speeds = [rank.speed for rank in self.layout.ranks]
        return max(-(-int(work.sum()) // sum(speeds)), -(-int(work.max()) // max(speeds)))

    def transfer(self, cuts: Cuts) -> TransferCost:
        """Return the transfer time at each cut; a single 0 if communication is not modelled.

        If the stages on both sides wait for a transfer, the result is the time of one transfer. Otherwise transfers
        keep only the link busy, and the result is the time of two transfers: activations in one direction, gradients in
        the other.
        """
        if self.communication == "none":
            return TransferCost(np.zeros(1, np.int64), blocking=False)
        per_s = self.blocks.layers.ticks_per_s
        byte_ticks = 0 if self.link.bytes_per_s is None else per_s / self.link.bytes_per_s
        ticks = np.rint(cuts.sent_bytes * byte_ticks + self.link.latency_s * per_s).astype(np.int64)
        ticks[cuts.sent_bytes == 0] = 0
        return (
            TransferCost(ticks, blocking=True)
            if self.communication == "serial"
            else TransferCost(2 * ticks, blocking=False)
        )

    def chain(self, order: Sequence[int]) -> ChainSearch:
        """Return a Chain, which searches one order of the blocks. All activations stay on the device."""
        cuts = cuts_of(self.blocks, order)
        return ChainSearch(list(order), cuts, self.transfer(cuts), self.layout, self.spans(order))

    def checkpointed_chain(self, order: Sequence[int]) -> CheckpointedChain:
        """Return a CheckpointedChain, which searches one order and also chooses each layer's activation option."""
        return CheckpointedChain(
            order=list(order),
            members=self.blocks.members,
            options=self.options,
            transfer=self.transfer(cuts_of(self.blocks, order)),
            layout=self.layout,
            spans=self.spans(order),
        )

    def spans(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first and the last cut at which the pins allow each stage to end. Entry k is for stage k - 1."""
        place = {block: position for position, block in enumerate(order)}
        spans = [(0, len(order)) for _ in range(max(slot.stage for slot in self.layout.slots) + 2)]
        for pin in self.pins:
            at = place[int(self.blocks.block_of[pin.layer])]
            behind = max((1 + place[int(self.blocks.block_of[layer])] for layer in pin.ancestors), default=0)
            _narrow(spans, pin.stage, behind, at)
            _narrow(spans, pin.stage + 1, at + 1, len(order))
        return spans

    @property
    def counted(self) -> list[set[int]]:
        """For each pin, two sets: the block of the pinned layer, and the blocks of the layer's ancestors.

        The search over ideals counts how many blocks of each set an ideal contains.
        """
        groups = [group for pin in self.pins for group in ([pin.layer], pin.ancestors)]
        return [{int(self.blocks.block_of[layer]) for layer in group} for group in groups]

    def lattice(self, ideals: Ideals, ceiling: int) -> Lattice:
        """Return a Lattice, which searches the partitions over all orders of the blocks.

        Args:
            ideals: all order ideals of the blocks, with the number of blocks of each set in `counted`.
            ceiling: the bottleneck of a partition that is already known, an upper bound on the result.

        """
        allowed: dict[int, NDArray[np.bool_]] = {}
        counts = ideals.contains
        for pin, itself, needed, blocks in zip(self.pins, counts[::2], counts[1::2], self.counted[1::2], strict=True):
            before = (itself == 0) & (needed == len(blocks))
            allowed[pin.stage] = allowed.get(pin.stage, True) & before
            allowed[pin.stage + 1] = allowed.get(pin.stage + 1, True) & (itself == 1)
        return Lattice(ideals, self.transfer(ideals.cuts), self.layout, allowed, ceiling)


def _narrow(spans: list[tuple[int, int]], stage: int, low: int, high: int) -> None:
    if stage < len(spans):
        spans[stage] = (max(spans[stage][0], low), min(spans[stage][1], high))
