"""Tree groups: the groups of micro-batches whose gradients are added first if gradients are added as a binary tree.

The number of groups is the largest power of two that divides the number of micro-batches of all replicas. A group holds
as many consecutive micro-batches as any other, and its gradients are added in ascending order. Then neighbouring groups
are added, then neighbouring pairs of groups, and so on. Each of a power of two of replicas holds whole groups, which
form a subtree, so the bits of a sum do not depend on the number of replicas.
"""

__all__ = ["copies_held", "num_tree_groups"]


def num_tree_groups(num_microbatches: int) -> int:
    """Return the number of groups of this many micro-batches; 1 for none.

    >>> [num_tree_groups(number) for number in (1, 6, 8, 12)]
    [1, 2, 8, 4]
    """
    return max(1, num_microbatches & -num_microbatches)


def copies_held(group: int) -> int:
    """Return the number of sums that are held, apart from the running one, while the gradients of a group are added.

    These are the sums of the largest subtrees that the earlier groups fill. The most before the last of n groups are
    log2(n).

    >>> [copies_held(group) for group in range(8)]
    [0, 1, 1, 2, 1, 2, 2, 3]
    """
    return group.bit_count()
