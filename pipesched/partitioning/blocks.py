"""Blocks: groups of layers that must share a stage, and the total costs of the layers before each possible cut."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import networkx as nx
import numpy as np

from pipesched.partitioning.layer_arrays import Layers
from pipesched.program.action_arrays import Ints

__all__ = ["Blocks", "Cuts", "Tensor", "contract", "cuts_of", "reduce_blocks"]


@dataclass(frozen=True)
class Tensor:
    """A tensor that a block produces for later blocks. It crosses a cut only once, even if several blocks use it."""

    producer: int
    consumers: tuple[int, ...]
    #: The size of the tensor in bytes.
    size: int


@dataclass(frozen=True)
class Blocks:
    """Layers grouped into blocks. Blocks are numbered in topological order."""

    layers: Layers
    #: The block of each layer.
    block_of: Ints

    def __len__(self) -> int:
        return int(self.block_of.max()) + 1

    def total(self, of_layers: Ints) -> Ints:
        """Return, for each block, the sum of ``of_layers`` (one number per layer) over the block's layers."""
        sums = np.zeros(len(self), np.int64)
        np.add.at(sums, self.block_of, of_layers)
        return sums

    @cached_property
    def members(self) -> list[list[int]]:
        """The layers of each block, in topological order."""
        members: list[list[int]] = [[] for _ in range(len(self))]
        for layer, block in enumerate(self.block_of.tolist()):
            members[block].append(layer)
        return members

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The distinct (producer, consumer) pairs of blocks, in ascending order."""
        tails = self.block_of[self.layers.tails]
        heads = self.block_of[self.layers.heads]
        keys = np.unique(tails[tails != heads] * len(self) + heads[tails != heads])
        return list(zip((keys // len(self)).tolist(), (keys % len(self)).tolist(), strict=True))

    @cached_property
    def producers(self) -> list[list[int]]:
        """For each block, the blocks that produce its inputs."""
        producers: list[list[int]] = [[] for _ in range(len(self))]
        for tail, head in self.edges:
            producers[head].append(tail)
        return producers

    @cached_property
    def consumers(self) -> list[list[int]]:
        """For each block, the blocks that use its outputs."""
        consumers: list[list[int]] = [[] for _ in range(len(self))]
        for tail, head in self.edges:
            consumers[tail].append(head)
        return consumers

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that pass between blocks."""
        tensors = self.layers.tensors
        makers = self.block_of[tensors.makers]
        users: dict[int, set[int]] = {}
        for tensor, block in zip(tensors.used.tolist(), self.block_of[tensors.users].tolist(), strict=True):
            if makers[tensor] != block:
                users.setdefault(tensor, set()).add(block)
        return [Tensor(int(makers[t]), tuple(sorted(users[t])), int(tensors.sizes[t])) for t in sorted(users)]

    @property
    def is_chain(self) -> bool:
        """Whether each block depends on the previous block, so that only one order of the blocks is possible."""
        return sum(head == tail + 1 for tail, head in self.edges) == len(self) - 1


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """For each possible cut, the total costs of the layers before the cut.

    A cut is a position in an order of the blocks, or an order ideal of the graph (see `order_ideals`). No layers are
    before the first cut, and all layers are before the last cut.
    """

    #: The time that the layers before each cut take for forward and backward, in ticks.
    work: Ints
    #: The size in bytes of the tensors that cross each cut.
    sent_bytes: Ints
    #: The size in bytes of the parameters, gradients and optimizer state of the layers before each cut.
    state_bytes: Ints
    #: The size in bytes of the activations of the layers before each cut, for one micro-batch.
    activation_bytes: Ints

    def __len__(self) -> int:
        return len(self.work)


def contract(layers: Layers, groups: Iterable[Collection[int]]) -> Blocks:
    """Merge each group of layers into one block, together with all layers on paths between layers of the group."""
    leader = np.arange(len(layers))
    for group in groups:
        for member in group:
            leader[leader == leader[member]] = leader[min(group)]
    if (leader != np.arange(len(layers))).any():
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(np.unique(leader).tolist())
        graph.add_edges_from(zip(leader[layers.tails].tolist(), leader[layers.heads].tolist(), strict=True))
        for cycle in map(sorted, nx.strongly_connected_components(graph)):
            leader[np.isin(leader, cycle)] = cycle[0]
    return Blocks(layers, _renumbered(layers, leader))


def _renumbered(layers: Layers, leader: Ints) -> Ints:
    """Return the block of each layer. Blocks are numbered in topological order.

    If several blocks can be next in this order, the block with the earliest layer is next.
    """
    firsts, block_of = np.unique(leader, return_inverse=True)
    if (block_of[layers.tails] <= block_of[layers.heads]).all():
        return np.asarray(block_of)
    blocks = Blocks(layers, block_of)
    waiting = [len(producers) for producers in blocks.producers]
    ready = [block for block, count in enumerate(waiting) if not count]
    heapify(ready)
    number = np.empty(len(firsts), np.int64)
    for position in range(len(firsts)):
        block = heappop(ready)
        number[block] = position
        for consumer in blocks.consumers[block]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heappush(ready, consumer)
    return np.asarray(number[block_of])


def reduce_blocks(blocks: Blocks, *, by_size: bool, by_memory: bool) -> Blocks:
    """Merge blocks without cost into a neighbouring block where this does not change the smallest bottleneck.

    A block without cost is merged into its only producer if a cut between the two blocks never sends fewer bytes than a
    cut after both. It is merged into its only consumer if a cut between the two blocks never sends fewer bytes than a
    cut before both.

    Args:
        blocks: the blocks to merge.
        by_size: whether the bytes sent across cuts are a cost.
        by_memory: whether the bytes that layers occupy are a cost.

    """
    while True:
        costs = blocks.layers.ticks
        if by_memory:
            costs = costs + blocks.layers.state_bytes + blocks.layers.activation_bytes
        free = np.flatnonzero(blocks.total(costs) == 0).tolist()
        size = _BlockSizes(blocks) if by_size else None
        joined = _joined(blocks, free, size) or _joined_forward(blocks, free, size)
        if not joined:
            return blocks
        first = [members[0] for members in blocks.members]
        leader = [[first[a], first[b]] for a, b in joined]
        whole = [members for members in blocks.members if len(members) > 1]
        blocks = contract(blocks.layers, [*whole, *leader])


class _BlockSizes:
    """For each block, the bytes that it produces for other blocks, and the tensors of other blocks that it uses."""

    def __init__(self, blocks: Blocks) -> None:
        self.out = [0] * len(blocks)
        self.used: list[list[Tensor]] = [[] for _ in range(len(blocks))]
        for tensor in blocks.tensors:
            self.out[tensor.producer] += tensor.size
            for consumer in tensor.consumers:
                self.used[consumer].append(tensor)


def _joined(blocks: Blocks, free: list[int], sizes: _BlockSizes | None) -> list[tuple[int, int]]:
    joined = []
    for block in free:
        producers = blocks.producers[block]
        if len(producers) == 1:
            saved = 0 if sizes is None else sum(t.size for t in sizes.used[block] if t.consumers == (block,))
            if sizes is None or sizes.out[block] <= saved:
                joined.append((producers[0], block))
    return joined


def _joined_forward(blocks: Blocks, free: list[int], sizes: _BlockSizes | None) -> list[tuple[int, int]]:
    joined = []
    for block in free:
        consumers = blocks.consumers[block]
        if len(consumers) == 1:
            kept = 0 if sizes is None else sum(t.size for t in sizes.used[block] if consumers[0] not in t.consumers)
            if sizes is None or kept <= sizes.out[block]:
                joined.append((block, consumers[0]))
    return joined


def cuts_of(blocks: Blocks, order: Sequence[int]) -> Cuts:
    """Return the total costs of the layers before each cut of one order of the blocks.

    There is a cut before each block, and a cut after the last block.
    """
    layers = blocks.layers
    count = len(blocks)
    place = np.empty(count, np.int64)
    place[np.asarray(order)] = np.arange(count)
    at = place[blocks.block_of]
    tensors = layers.tensors
    made = at[tensors.makers]
    last = made.copy()  # the position of each tensor's last use
    np.maximum.at(last, tensors.used, at[tensors.users])
    crossing = np.zeros(count + 1, np.int64)
    np.add.at(crossing, made + 1, tensors.sizes)
    np.subtract.at(crossing, last + 1, tensors.sizes)

    def before(of_layers: Ints) -> Ints:
        sums = np.zeros(count + 1, np.int64)
        np.add.at(sums, at + 1, of_layers)
        return np.asarray(np.cumsum(sums))

    return Cuts(
        work=before(layers.ticks),
        sent_bytes=np.cumsum(crossing),
        state_bytes=before(layers.state_bytes),
        activation_bytes=before(layers.activation_bytes),
    )
