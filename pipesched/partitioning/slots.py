"""Slots: what the stages of a partition may be, one after the other, and what the user has pinned.

A slot is one stage on one rank. Slots lead from state to state: state k says that k stages are closed, or, where
ranks may come in any order, how many ranks of each kind are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np

from pipesched.partitioning.blocks import Cuts
from pipesched.program.action_arrays import Ints

__all__ = ["LineUp", "Rank", "Slot", "Toll", "fixed_order", "free_order", "placed"]


@dataclass(frozen=True)
class Rank:
    """speed: how many times as fast as the rank that was measured. limit: bytes it has, None for no limit."""

    speed: Fraction = Fraction(1)
    limit: int | None = None


@dataclass(frozen=True)
class Toll:
    """What crossing a cut costs in ticks, one a cut, each way. blocking: the stages at both of its sides wait."""

    ticks: Ints
    blocking: bool


@dataclass(frozen=True)
class Slot:
    """One stage: the ``stage``-th, on a rank, or on one like it, between two states.

    in_flight: micro-batches it holds.
    """

    source: int
    target: int
    stage: int
    rank: int
    speed: Fraction = Fraction(1)
    limit: int | None = None
    in_flight: int = 1

    def weighed(self, cuts: Cuts, toll: Toll) -> tuple[Ints, Ints]:
        """What a stage costs, as (at its end, at its begin): their difference is its time x the numerator of speed."""
        work = cuts.work * self.speed.denominator
        paid = toll.ticks * self.speed.numerator if toll.blocking else np.zeros(1, np.int64)
        return work + paid, work - paid

    def memory(self, cuts: Cuts) -> Ints:
        """Bytes held for all layers before each cut."""
        return np.asarray(cuts.state_bytes + self.in_flight * cuts.activation_bytes)

    def time(self, difference: int) -> int:
        """The ticks of a stage from a difference of what it costs."""
        return -(-difference // self.speed.numerator)


@dataclass(frozen=True)
class LineUp:
    """All slots in the order of their targets.

    skippable: stages from this one on may be left out. in_line: states follow each other; then what is left out is a
    slot without layers. exactly: none is. accepted: states in which a partition may end, those of fewer stages first.
    """

    ranks: tuple[Rank, ...]
    slots: tuple[Slot, ...]
    num_states: int
    accepted: tuple[int, ...]
    skippable: int
    in_line: bool
    exactly: bool

    def on_ranks(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots of a partition, where any order will do with a rank each: of those alike the first first."""
        if self.in_line:
            return list(slots)
        kinds = [Rank(slot.speed, slot.limit) for slot in slots]
        places = [[at for at, rank in enumerate(self.ranks) if rank == kind] for kind in kinds]
        return [replace(slot, rank=places[at][kinds[:at].count(kinds[at])]) for at, slot in enumerate(slots)]

    @property
    def alike(self) -> bool:
        """Whether every stage may be on every rank: as fast as the one that was measured, without a limit."""
        return set(self.ranks) == {Rank()}

    @property
    def shares_ranks(self) -> bool:
        """Whether some rank has several stages."""
        return self.in_line and len(self.slots) > len({slot.rank for slot in self.slots})

    @property
    def capped(self) -> bool:
        """Whether some rank has a limit."""
        return any(rank.limit is not None for rank in self.ranks)


def fixed_order(ranks: Sequence[Rank], in_flight: Sequence[int], *, exactly: bool, pinned: int) -> LineUp:
    """Stage k on rank k. exactly: each has a layer. pinned: this many of the first stages have one."""
    slots = tuple(Slot(k, k + 1, k, k, rank.speed, rank.limit, in_flight[k]) for k, rank in enumerate(ranks))
    skippable = len(ranks) if exactly else pinned
    return LineUp(tuple(ranks), slots, len(ranks) + 1, (len(ranks),), skippable, in_line=True, exactly=exactly)


def placed(ranks: Sequence[Rank], in_flight: Sequence[int], placement: Sequence[int]) -> LineUp:
    """Each stage on the rank that the placement says; none is left out."""
    line_up = fixed_order([ranks[rank] for rank in placement], in_flight, exactly=True, pinned=0)
    slots = tuple(replace(slot, rank=rank) for slot, rank in zip(line_up.slots, placement, strict=True))
    return replace(line_up, ranks=tuple(ranks), slots=slots)


def free_order(ranks: Sequence[Rank], in_flight: Sequence[int], *, exactly: bool) -> LineUp:
    """Stages on ranks in any order: a state says how many ranks of each kind are used."""
    kinds = sorted(set(ranks), key=lambda kind: (-kind.speed, -1 if kind.limit is None else -kind.limit))
    counts = [ranks.count(kind) for kind in kinds]
    states = sorted(product(*(range(count + 1) for count in counts)), key=lambda used: (sum(used), used))
    number = {used: state for state, used in enumerate(states)}
    slots = []
    for target, used in enumerate(states):
        for place, kind in enumerate(kinds):
            if used[place]:
                source = number[(*used[:place], used[place] - 1, *used[place + 1 :])]
                stage = sum(used) - 1
                slots.append(Slot(source, target, stage, place, kind.speed, kind.limit, in_flight[stage]))
    accepted = (len(states) - 1,) if exactly else tuple(range(len(states)))
    return LineUp(
        tuple(ranks), tuple(slots), len(states), accepted, len(ranks) if exactly else 0, in_line=False, exactly=exactly
    )
