"""Linear orders: yields orders of the blocks of a graph that has too many order ideals for an exact search.

The search treats each of these orders as a chain.
"""

import random
from collections.abc import Iterator

from pipesched.partitioning.blocks import Blocks

__all__ = ["linear_orders"]


def linear_orders(blocks: Blocks, restarts: int) -> Iterator[list[int]]:
    """Yield several orders of the blocks, the last ``restarts`` of them random.

    The orders are the order of the graph, a depth-first order, the order of `_least_live`, and random depth-first
    orders.
    """
    yield list(range(len(blocks)))
    yield _depth_first(blocks, list(range(len(blocks))))
    yield _least_live(blocks)
    generator = random.Random(0)
    for _ in range(restarts):
        rank = list(range(len(blocks)))
        generator.shuffle(rank)
        yield _depth_first(blocks, rank)


def _depth_first(blocks: Blocks, rank: list[int]) -> list[int]:
    """Return a depth-first order: the next block is the block that became ready last.

    On ties, the block with the lowest number in ``rank`` is next.
    """
    waiting = [len(producers) for producers in blocks.producers]
    ready = sorted((block for block, count in enumerate(waiting) if not count), key=lambda block: -rank[block])
    order = []
    while ready:
        block = ready.pop()
        order.append(block)
        fresh = []
        for consumer in blocks.consumers[block]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                fresh.append(consumer)
        ready += sorted(fresh, key=lambda consumer: -rank[consumer])
    return order


def _least_live(blocks: Blocks) -> list[int]:
    """Return a greedy order: the next block is the ready block that adds the fewest live bytes.

    The bytes of a tensor are live until its last consumer.
    """
    made = [0] * len(blocks)
    users = [len(tensor.consumers) for tensor in blocks.tensors]
    used: list[list[int]] = [[] for _ in range(len(blocks))]
    for index, tensor in enumerate(blocks.tensors):
        made[tensor.producer] += tensor.size
        for consumer in tensor.consumers:
            used[consumer].append(index)
    waiting = [len(producers) for producers in blocks.producers]
    ready = {block for block, count in enumerate(waiting) if not count}

    def growth(block: int) -> tuple[int, int]:
        freed = sum(blocks.tensors[index].size for index in used[block] if users[index] == 1)
        return made[block] - freed, block

    order = []
    while ready:
        block = min(ready, key=growth)
        ready.remove(block)
        order.append(block)
        for index in used[block]:
            users[index] -= 1
        for consumer in blocks.consumers[block]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.add(consumer)
    return order
