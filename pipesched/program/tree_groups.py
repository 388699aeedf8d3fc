"""Tree groups: the groups of micro-batches at the leaves of the binary tree in which gradients are added.

The number of groups is the largest power of two that divides the number of micro-batches of all replicas. Each group
holds the same number of consecutive micro-batches, and its gradients are added in ascending order. Then the sums of
neighbouring groups are added, then the sums of neighbouring pairs of groups, and so on. If the number of replicas is a
power of two, each replica holds whole groups that form a subtree. The bits of a sum then do not depend on the number of
replicas.
"""

__all__ = ["copies_held", "num_tree_groups"]


def num_tree_groups(num_microbatches: int) -> int:
    """Return the number of groups into which this many micro-batches are divided; 1 for 0 micro-batches.

    >>> [num_tree_groups(number) for number in (1, 6, 8, 12)]
    [1, 2, 8, 4]
    """
    return max(1, num_microbatches & -num_microbatches)


def copies_held(group: int) -> int:
    """Return how many sums of earlier groups are held while the gradients of a group are added.

    One sum is held for each of the largest subtrees that the earlier groups fill. With n groups, at most log2(n) sums
    are held.

    >>> [copies_held(group) for group in range(8)]
    [0, 1, 1, 2, 1, 2, 2, 3]
    """
    return group.bit_count()
