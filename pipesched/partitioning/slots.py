"""Slots: the stages that a partition can have, as transitions between states.

A slot is one stage on one rank. If ranks have a fixed order, state k means that the layers of the first k stages have
been chosen. If ranks can be used in any order, a state is the number of used ranks of each kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np

from pipesched.partitioning.blocks import Cuts
from pipesched.program.action_arrays import Ints

__all__ = ["RankCapacity", "RankLayout", "StageSlot", "TransferCost", "fixed_order", "free_order", "placed"]


@dataclass(frozen=True)
class RankCapacity:
    """The speed and the memory of a rank."""

    #: The speed relative to the rank on which the layers were measured.
    speed: Fraction = Fraction(1)
    #: The memory in bytes, or None if there is no limit.
    limit: int | None = None


@dataclass(frozen=True)
class TransferCost:
    """The transfer time at each cut."""

    #: The transfer time at each cut in ticks; a single 0 if communication is not modelled.
    ticks: Ints
    #: Whether the stages on both sides wait for the transfer. Otherwise only the link is busy.
    blocking: bool


@dataclass(frozen=True, kw_only=True)
class StageSlot:
    """A transition between two states: one stage on one rank or, if ranks can have any order, on one kind of rank."""

    source: int
    target: int
    stage: int
    rank: int
    speed: Fraction
    limit: int | None
    #: The number of micro-batches in flight.
    in_flight: int

    def weighed(self, cuts: Cuts, transfer: TransferCost) -> tuple[Ints, Ints]:
        """Return two cost terms for each cut: the end term and the start term.

        The end term at the cut where a stage ends, minus the start term at the cut where the stage starts, is the
        stage's time in ticks, multiplied by ``speed.numerator``.
        """
        work = cuts.work * self.speed.denominator
        paid = transfer.ticks * self.speed.numerator if transfer.blocking else np.zeros(1, np.int64)
        return work + paid, work - paid

    def memory(self, cuts: Cuts) -> Ints:
        """Return, for each cut, the memory in bytes of all layers before the cut."""
        return np.asarray(cuts.state_bytes + self.in_flight * cuts.activation_bytes)

    def time(self, difference: int) -> int:
        """Return the time of a stage in ticks. ``difference`` is the end term minus the start term of `weighed`."""
        return -(-difference // self.speed.numerator)


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks, and all possible slots on these ranks, sorted by target state."""

    ranks: tuple[RankCapacity, ...]
    slots: tuple[StageSlot, ...]
    num_states: int
    #: The states in which a partition is complete. States with fewer stages come first.
    accepted: tuple[int, ...]
    #: The first stage that can be left out.
    skippable: int
    #: Whether ranks have a fixed order, so that each state leads only to the next state.
    in_line: bool
    #: Whether every stage must have a layer.
    exactly: bool

    def on_ranks(self, slots: Sequence[StageSlot]) -> list[StageSlot]:
        """Assign a rank to each slot of a partition. If the order of the ranks is fixed, return the slots unchanged.

        Identical ranks are assigned in ascending order.
        """
        if self.in_line:
            return list(slots)
        kinds = [RankCapacity(slot.speed, slot.limit) for slot in slots]
        places = [[at for at, rank in enumerate(self.ranks) if rank == kind] for kind in kinds]
        return [replace(slot, rank=places[at][kinds[:at].count(kinds[at])]) for at, slot in enumerate(slots)]

    @property
    def without_limits(self) -> "RankLayout":
        """The same ranks and slots without memory limits."""
        ranks = tuple(replace(rank, limit=None) for rank in self.ranks)
        return replace(self, ranks=ranks, slots=tuple(replace(slot, limit=None) for slot in self.slots))

    @property
    def alike(self) -> bool:
        """Whether all ranks are as fast as the rank on which the layers were measured, and have no memory limit."""
        return set(self.ranks) == {RankCapacity()}

    @property
    def shares_ranks(self) -> bool:
        """Whether any rank has several stages."""
        return self.in_line and len(self.slots) > len({slot.rank for slot in self.slots})

    @property
    def capped(self) -> bool:
        """Whether any rank has a memory limit."""
        return any(rank.limit is not None for rank in self.ranks)


def fixed_order(ranks: Sequence[RankCapacity], in_flight: Sequence[int], *, exactly: bool, pinned: int) -> RankLayout:
    """Return the slots for ranks in a fixed order: stage k runs on rank k.

    Args:
        ranks: the ranks in stage order.
        in_flight: the number of micro-batches in flight on each stage.
        exactly: whether every stage must have a layer.
        pinned: stages 0 to ``pinned - 1`` must have a layer.

    """
    slots = tuple(
        StageSlot(source=k, target=k + 1, stage=k, rank=k, speed=rank.speed, limit=rank.limit, in_flight=in_flight[k])
        for k, rank in enumerate(ranks)
    )
    return RankLayout(
        ranks=tuple(ranks),
        slots=slots,
        num_states=len(ranks) + 1,
        accepted=(len(ranks),),
        skippable=len(ranks) if exactly else pinned,
        in_line=True,
        exactly=exactly,
    )


def placed(ranks: Sequence[RankCapacity], in_flight: Sequence[int], placement: Sequence[int]) -> RankLayout:
    """Return the slots for stages on the ranks of a placement. Every stage must have a layer."""
    layout = fixed_order([ranks[rank] for rank in placement], in_flight, exactly=True, pinned=0)
    slots = tuple(replace(slot, rank=rank) for slot, rank in zip(layout.slots, placement, strict=True))
    return replace(layout, ranks=tuple(ranks), slots=slots)


def free_order(ranks: Sequence[RankCapacity], in_flight: Sequence[int], *, exactly: bool) -> RankLayout:
    """Return the slots for ranks in any order. A state counts the ranks of each kind that are already used."""
    kinds = sorted(set(ranks), key=lambda kind: (-kind.speed, -1 if kind.limit is None else -kind.limit))
    counts = [ranks.count(kind) for kind in kinds]
    states = sorted(product(*(range(count + 1) for count in counts)), key=lambda used: (sum(used), used))
    number = {used: state for state, used in enumerate(states)}
    slots = []
    for target, used in enumerate(states):
        for place, kind in enumerate(kinds):
            if used[place]:
                stage = sum(used) - 1
                slots.append(
                    StageSlot(
                        source=number[(*used[:place], used[place] - 1, *used[place + 1 :])],
                        target=target,
                        stage=stage,
                        rank=place,
                        speed=kind.speed,
                        limit=kind.limit,
                        in_flight=in_flight[stage],
                    )
                )
    return RankLayout(
        ranks=tuple(ranks),
        slots=tuple(slots),
        num_states=len(states),
        accepted=(len(states) - 1,) if exactly else tuple(range(len(states))),
        skippable=len(ranks) if exactly else 0,
        in_line=False,
        exactly=exactly,
    )
