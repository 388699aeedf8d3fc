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


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One stage: the ``stage``-th, on a rank, or on one like it, between two states."""

    source: int
    target: int
    stage: int
    rank: int
    speed: Fraction
    limit: int | None
    #: Micro-batches that it holds.
    in_flight: int

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


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """All slots in the order of their targets."""

    ranks: tuple[Rank, ...]
    slots: tuple[Slot, ...]
    num_states: int
    #: The states in which a partition may end, those of fewer stages first.
    accepted: tuple[int, ...]
    #: Stages from this one on may be left out.
    skippable: int
    #: States follow each other; then what is left out is a slot without layers.
    in_line: bool
    #: No stage is left out.
    exactly: bool

    def on_ranks(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots of a partition, where any order will do with a rank each: of those alike the first first."""
        if self.in_line:
            return list(slots)
        kinds = [Rank(slot.speed, slot.limit) for slot in slots]
        places = [[at for at, rank in enumerate(self.ranks) if rank == kind] for kind in kinds]
        return [replace(slot, rank=places[at][kinds[:at].count(kinds[at])]) for at, slot in enumerate(slots)]

    @property
    def without_limits(self) -> "LineUp":
        """The same ranks without limits of memory."""
        ranks = tuple(replace(rank, limit=None) for rank in self.ranks)
        return replace(self, ranks=ranks, slots=tuple(replace(slot, limit=None) for slot in self.slots))

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
    slots = tuple(
        Slot(source=k, target=k + 1, stage=k, rank=k, speed=rank.speed, limit=rank.limit, in_flight=in_flight[k])
        for k, rank in enumerate(ranks)
    )
    return LineUp(
        ranks=tuple(ranks),
        slots=slots,
        num_states=len(ranks) + 1,
        accepted=(len(ranks),),
        skippable=len(ranks) if exactly else pinned,
        in_line=True,
        exactly=exactly,
    )


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
                stage = sum(used) - 1
                slots.append(
                    Slot(
                        source=number[(*used[:place], used[place] - 1, *used[place + 1 :])],
                        target=target,
                        stage=stage,
                        rank=place,
                        speed=kind.speed,
                        limit=kind.limit,
                        in_flight=in_flight[stage],
                    )
                )
    return LineUp(
        ranks=tuple(ranks),
        slots=tuple(slots),
        num_states=len(states),
        accepted=(len(states) - 1,) if exactly else tuple(range(len(states))),
        skippable=len(ranks) if exactly else 0,
        in_line=False,
        exactly=exactly,
    )
