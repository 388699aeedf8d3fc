"""Order ideals: all sets of blocks that contain what they need, level by level, as arrays.

An ideal is what may lie before a cut. Level k holds those of k blocks; each comes from ideals of the level above by
one block more. Sets are bit masks while the lattice is built; later the levels and the steps between them suffice.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.blocks import Blocks, Cuts, Tensor
from pipesched.program.action_arrays import Ints

__all__ = ["Ideals", "enumerate_ideals"]

Masks = NDArray[np.uint64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Ideals:
    """Ideals in the order of their levels.

    A step adds ``added`` to the ideal ``parents`` and gives the ideal ``children``; steps are in the order of their
    children.
    """

    cuts: Cuts
    #: Where each level begins, and at last the number of ideals.
    levels: list[int]
    parents: Ints
    children: Ints
    added: Ints
    #: Where the steps to each ideal begin.
    steps: Ints
    #: For each set of blocks that was asked for, how many of them each ideal contains.
    contains: list[Ints]

    def __len__(self) -> int:
        return self.levels[-1]


@dataclass(kw_only=True)
class _Level:
    """The ideals of one size."""

    members: Masks
    #: The blocks that may be added.
    ready: Masks
    keys: Masks
    #: What the ideals sum up to; a row a column.
    sums: Ints


def enumerate_ideals(blocks: Blocks, asked: Collection[Collection[int]], at_most: int) -> Ideals | None:
    """All ideals, or None where there are more than ``at_most``. asked: sets of blocks to be counted in each."""
    growth = _Growth(blocks, asked)
    level = growth.first()
    levels = [0, 1]
    sums = [level.sums]
    parents: list[Ints] = []
    added: list[Ints] = []
    counts: list[Ints] = [np.zeros(1, np.int64)]
    for _ in range(len(blocks)):
        rows, new, count, level = growth.next(level)
        parents.append(rows + levels[-2])
        added.append(new)
        counts.append(count)
        sums.append(level.sums)
        levels.append(levels[-1] + len(count))
        if levels[-1] > at_most:
            return None
    work, state_bytes, activation_bytes, sent_bytes, *contains = np.concatenate(sums, axis=1)
    per_ideal = np.concatenate(counts)
    return Ideals(
        cuts=Cuts(work=work, sent_bytes=sent_bytes, state_bytes=state_bytes, activation_bytes=activation_bytes),
        levels=levels,
        parents=_joined(parents),
        children=np.repeat(np.arange(levels[-1]), per_ideal),
        added=_joined(added),
        steps=np.concatenate([[0], np.cumsum(per_ideal)]),
        contains=contains,
    )


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class _Growth:
    """One block more. Sums are rows: work, state bytes, activation bytes, bytes sent, then the sets asked for."""

    def __init__(self, blocks: Blocks, asked: Collection[Collection[int]]) -> None:
        layers = blocks.layers
        self._words = -(-len(blocks) // 64)
        self._consumers = blocks.consumers
        self._needs = [_words(producers) for producers in blocks.producers]
        self._sources = [block for block, producers in enumerate(blocks.producers) if not producers]
        additive = [blocks.total(column) for column in (layers.ticks, layers.state_bytes, layers.activation_bytes)]
        members = [np.isin(np.arange(len(blocks)), list(group)).astype(np.int64) for group in asked]
        made = np.zeros(len(blocks), np.int64)
        self._used = _used(blocks)
        for tensor in blocks.tensors:
            made[tensor.producer] += tensor.size
        self._gain = np.stack([*additive, made, *members])
        self._seed = 0
        self._new_keys(len(blocks))

    def _new_keys(self, count: int) -> None:
        self._keys = np.random.default_rng(self._seed).integers(0, 2**64, count, np.uint64)

    def first(self) -> _Level:
        ready = np.zeros((1, self._words), np.uint64)
        for word, mask in _words(self._sources).items():
            ready[0, word] = mask
        return _Level(
            members=np.zeros((1, self._words), np.uint64),
            ready=ready,
            keys=np.zeros(1, np.uint64),
            sums=np.zeros((len(self._gain), 1), np.int64),
        )

    def next(self, level: _Level) -> tuple[Ints, Ints, Ints, _Level]:
        """The steps to the next level: from which row, which block; how many lead to each ideal; and the level."""
        rows, new = self._ready(level)
        keys = level.keys[rows] + self._keys[new]
        _, first, child = np.unique(keys, return_index=True, return_inverse=True)
        by_first = np.argsort(first)  # so that nothing depends on the keys
        rank = np.empty(len(first), np.int64)
        rank[by_first] = np.arange(len(first))
        child = rank[child]
        first = first[by_first]
        order = np.argsort(child, kind="stable")
        members = _with(level.members[rows[first]], new[first])
        if not self._same(level, rows, new, child, members):
            return self._again(level)
        grown = _Level(
            members=members,
            ready=_without(level.ready[rows[first]], new[first]),
            keys=keys[first],
            sums=level.sums[:, rows[first]] + self._gain[:, new[first]],
        )
        self._update(grown, new[first])
        return rows[order], new[order], np.bincount(child), grown

    def _ready(self, level: _Level) -> tuple[Ints, Ints]:
        """All pairs of an ideal of the level and a block that may be added to it."""
        some = np.bitwise_or.reduce(level.ready, axis=0)
        rows = []
        new = []
        for word, mask in enumerate(some.tolist()):
            for bit in _bits(mask):
                chosen = np.flatnonzero(level.ready[:, word] & np.uint64(1 << bit))
                rows.append(chosen)
                new.append(np.full(len(chosen), 64 * word + bit))
        return np.concatenate(rows), np.concatenate(new)

    def _same(self, level: _Level, rows: Ints, new: Ints, child: Ints, members: Masks) -> bool:
        """Whether equal keys were equal sets."""
        return bool((_with(level.members[rows], new) == members[child]).all())

    def _again(self, level: _Level) -> tuple[Ints, Ints, Ints, _Level]:
        """With other keys: two sets had the same, which one in 10^8 lattices has."""
        self._seed += 1
        self._new_keys(len(self._keys))
        level.keys = np.array(
            [sum(int(self._keys[64 * word + bit]) for word, mask in enumerate(row) for bit in _bits(mask)) % 2**64
             for row in level.members.tolist()], np.uint64,
        )  # fmt: skip
        return self.next(level)

    def _update(self, level: _Level, new: Ints) -> None:
        """What is ready, and what need not be sent any more, once blocks were added."""
        for block in np.unique(new).tolist():
            rows = np.flatnonzero(new == block)
            members = level.members[rows]
            for consumer in self._consumers[block]:
                now = rows[_contains(members, self._needs[consumer])]
                level.ready[now, consumer // 64] |= np.uint64(1 << consumer % 64)
            for tensor, needed in self._used[block]:
                level.sums[3, rows[_contains(members, needed)]] -= tensor.size


def _used(blocks: Blocks) -> list[list[tuple[Tensor, Mapping[int, np.uint64]]]]:
    """The tensors that each block uses, each with all that use it."""
    used: list[list[tuple[Tensor, Mapping[int, np.uint64]]]] = [[] for _ in range(len(blocks))]
    for tensor in blocks.tensors:
        for consumer in tensor.consumers:
            used[consumer].append((tensor, _words(tensor.consumers)))
    return used


def _words(members: Collection[int]) -> dict[int, np.uint64]:
    """A set of blocks as bits of words of 64, without those that are 0."""
    words: dict[int, int] = {}
    for member in members:
        words[member // 64] = words.get(member // 64, 0) | 1 << member % 64
    return {word: np.uint64(mask) for word, mask in words.items()}


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _contains(masks: Masks, needed: Mapping[int, np.uint64]) -> Bools:
    contained = np.ones(len(masks), bool)
    for word, mask in needed.items():
        contained &= masks[:, word] & mask == mask
    return contained


def _with(masks: Masks, blocks: Ints) -> Masks:
    masks[np.arange(len(masks)), blocks // 64] |= np.uint64(1) << (blocks % 64).astype(np.uint64)
    return masks


def _without(masks: Masks, blocks: Ints) -> Masks:
    masks[np.arange(len(masks)), blocks // 64] &= ~(np.uint64(1) << (blocks % 64).astype(np.uint64))
    return masks
