"""Problem: the blocks, the slots, what crossing a cut costs, and what is pinned."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.blocks import Blocks, Cuts, cuts_of
from pipesched.partitioning.chain import Chain
from pipesched.partitioning.checkpointed_chain import CheckpointedChain
from pipesched.partitioning.lattice import Lattice
from pipesched.partitioning.order_ideals import Ideals
from pipesched.partitioning.slots import LineUp, Toll
from pipesched.simulation.links import Link

__all__ = ["Communication", "Pin", "Problem"]

Communication = Literal["none", "overlap", "serial"]


@dataclass(frozen=True)
class Pin:
    """A layer that a stage begins with: all that it needs, its ``ancestors``, lies in earlier stages."""

    stage: int
    layer: int
    ancestors: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be cut, and into what."""

    blocks: Blocks
    line_up: LineUp
    communication: Communication
    link: Link
    pins: Sequence[Pin]
    #: Of each layer, what may be done with its activations; none where all are held.
    options: Sequence[Sequence[ActivationOption]] = ()

    @property
    def fills_up(self) -> bool:
        """Whether more stages never cost anything: then as many are made as there may be."""
        return self.communication == "none" and self.line_up.alike and self.line_up.in_line and not self.pins

    @cached_property
    def heaviest(self) -> int:
        """The block with the most work."""
        return int(self.blocks.total(self.blocks.layers.ticks).argmax())

    @cached_property
    def lower(self) -> int:
        """Ticks that no partition can beat: all work in even shares, or the heaviest block on the fastest rank."""
        work = self.blocks.total(self.blocks.layers.ticks)
        speeds = [rank.speed for rank in self.line_up.ranks]
        return max(-(-int(work.sum()) // sum(speeds)), -(-int(work.max()) // max(speeds)))

    def toll(self, cuts: Cuts) -> Toll:
        """What crossing each cut costs: one way where the stages beside it wait, both ways where only the link does."""
        if self.communication == "none":
            return Toll(np.zeros(1, np.int64), blocking=False)
        per_s = self.blocks.layers.ticks_per_s
        byte_ticks = 0 if self.link.bytes_per_s is None else per_s / self.link.bytes_per_s
        ticks = np.rint(cuts.sent_bytes * byte_ticks + self.link.latency_s * per_s).astype(np.int64)
        ticks[cuts.sent_bytes == 0] = 0
        return Toll(ticks, blocking=True) if self.communication == "serial" else Toll(2 * ticks, blocking=False)

    def chain(self, order: Sequence[int]) -> Chain:
        """The search along one order of the blocks."""
        cuts = cuts_of(self.blocks, order)
        return Chain(list(order), cuts, self.toll(cuts), self.line_up, self.spans(order))

    def checkpointed_chain(self, order: Sequence[int]) -> CheckpointedChain:
        """The same where choices are made for layers."""
        return CheckpointedChain(
            order=list(order),
            members=self.blocks.members,
            options=self.options,
            toll=self.toll(cuts_of(self.blocks, order)),
            line_up=self.line_up,
            spans=self.spans(order),
        )

    def spans(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """For each number of stages, the first and the last cut of an order where pins let that many be closed."""
        place = {block: position for position, block in enumerate(order)}
        spans = [(0, len(order)) for _ in range(max(slot.stage for slot in self.line_up.slots) + 2)]
        for pin in self.pins:
            at = place[int(self.blocks.block_of[pin.layer])]
            behind = max((1 + place[int(self.blocks.block_of[layer])] for layer in pin.ancestors), default=0)
            _narrow(spans, pin.stage, behind, at)
            _narrow(spans, pin.stage + 1, at + 1, len(order))
        return spans

    @property
    def counted(self) -> list[set[int]]:
        """The sets of blocks that pins ask about: the layer's own, and what it needs."""
        groups = [group for pin in self.pins for group in ([pin.layer], pin.ancestors)]
        return [{int(self.blocks.block_of[layer]) for layer in group} for group in groups]

    def lattice(self, ideals: Ideals, ceiling: int) -> Lattice:
        """The search through all orders; ``ideals`` with the sets of ``counted``; ceiling: a known bottleneck."""
        allowed: dict[int, NDArray[np.bool_]] = {}
        counts = ideals.contains
        for pin, own, needed, blocks in zip(self.pins, counts[::2], counts[1::2], self.counted[1::2], strict=True):
            before = (own == 0) & (needed == len(blocks))
            allowed[pin.stage] = allowed.get(pin.stage, True) & before
            allowed[pin.stage + 1] = allowed.get(pin.stage + 1, True) & (own == 1)
        return Lattice(ideals, self.toll(ideals.cuts), self.line_up, allowed, ceiling)


def _narrow(spans: list[tuple[int, int]], stage: int, low: int, high: int) -> None:
    if stage < len(spans):
        spans[stage] = (max(spans[stage][0], low), min(spans[stage][1], high))
