"""Order ideals: enumerates all sets of blocks that contain the producers of all their blocks.

The blocks before a cut form an order ideal. Level k consists of the ideals with k blocks. Each ideal of level k is an
ideal of level k - 1 plus one block. During the enumeration, ideals are bit masks. Afterwards, only the steps from the
ideals of one level to the ideals of the next level are kept.
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
    """The order ideals of a graph, sorted by level, and the steps between them.

    A step adds a block to an ideal, which gives an ideal of the next level. Steps are sorted by the resulting ideal.
    """

    #: The total costs of the blocks in each ideal.
    cuts: Cuts
    #: The index of the first ideal of each level. The last entry is the number of ideals.
    levels: list[int]
    #: The ideal to which each step adds a block.
    parents: Ints
    #: The ideal that results from each step.
    children: Ints
    #: The block that each step adds.
    added: Ints
    #: For each ideal, the index of the first step that results in it. The last entry is the number of steps.
    steps: Ints
    #: For each set in the argument ``asked`` of `enumerate_ideals`, the number of blocks of this set in each ideal.
    contains: list[Ints]

    def __len__(self) -> int:
        return self.levels[-1]


@dataclass(kw_only=True)
class _Level:
    """One level: all ideals with the same number of blocks."""

    #: The blocks of each ideal, as bits.
    members: Masks
    #: The blocks that can be added to each ideal, as bits.
    ready: Masks
    #: A hash of each ideal: the sum of its blocks' random keys.
    keys: Masks
    #: The sums over the blocks of each ideal, in the row order that `_Growth` defines. The shape is (sums, ideals).
    sums: Ints


def enumerate_ideals(blocks: Blocks, asked: Collection[Collection[int]], at_most: int) -> Ideals | None:
    """Enumerate the order ideals. Returns None if the graph has more than ``at_most`` ideals.

    ``asked`` contains sets of blocks. `Ideals.contains` counts how many blocks of each set are in each ideal.
    """
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
    """Creates each level of ideals from the previous level.

    The rows of `_Level.sums` are work, state bytes, activation bytes and bytes sent, then the number of blocks from
    each set in ``asked``.
    """

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
        """Create the next level, and the steps that lead to it.

        Returns:
            For each step, the index in ``level`` of the ideal that the step extends; for each step, the block that it
            adds; for each new ideal, the number of steps that result in it; and the next level.

        """
        rows, new = self._ready(level)
        keys = level.keys[rows] + self._keys[new]
        _, first, child = np.unique(keys, return_index=True, return_inverse=True)
        by_first = np.argsort(first)  # so that the order of the ideals does not depend on the keys
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
        """Return all pairs of an ideal of the level and a block that can be added to it.

        Returns two arrays: the index of the ideal in the level, and the block.
        """
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
        """Return whether ideals with the same key are identical, that is, no keys have collided."""
        return bool((_with(level.members[rows], new) == members[child]).all())

    def _again(self, level: _Level) -> tuple[Ints, Ints, Ints, _Level]:
        """Create the next level again with new keys, because two ideals got the same key (about 1 in 10^8 graphs)."""
        self._seed += 1
        self._new_keys(len(self._keys))
        level.keys = np.array(
            [sum(int(self._keys[64 * word + bit]) for word, mask in enumerate(row) for bit in _bits(mask)) % 2**64
             for row in level.members.tolist()], np.uint64,
        )  # fmt: skip
        return self.next(level)

    def _update(self, level: _Level, new: Ints) -> None:
        """Update the ready blocks and the bytes sent after a block has been added to each ideal."""
        for block in np.unique(new).tolist():
            rows = np.flatnonzero(new == block)
            members = level.members[rows]
            for consumer in self._consumers[block]:
                now = rows[_contains(members, self._needs[consumer])]
                level.ready[now, consumer // 64] |= np.uint64(1 << consumer % 64)
            for tensor, needed in self._used[block]:
                level.sums[3, rows[_contains(members, needed)]] -= tensor.size


def _used(blocks: Blocks) -> list[list[tuple[Tensor, Mapping[int, np.uint64]]]]:
    """Return, for each block, the tensors that it uses and, for each tensor, the bit mask of all blocks that use it."""
    used: list[list[tuple[Tensor, Mapping[int, np.uint64]]]] = [[] for _ in range(len(blocks))]
    for tensor in blocks.tensors:
        for consumer in tensor.consumers:
            used[consumer].append((tensor, _words(tensor.consumers)))
    return used


def _words(members: Collection[int]) -> dict[int, np.uint64]:
    """Return a set of blocks as a bit mask of 64-bit words: {index of the word: word}, without words that are 0."""
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
