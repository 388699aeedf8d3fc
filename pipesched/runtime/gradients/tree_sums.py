"""Tree sums: adds gradients of micro-batches as a binary tree. The sum's bits do not depend on the number of replicas.

`program.tree_groups` defines the tree. If 8 micro-batches are divided among 1, 2 or 4 replicas, each micro-batch always
belongs to the same subtree. The sums of the replicas are then added in the upper part of the tree (see `tree_sum` and
`runtime.reductions.replica_sum`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.program.tree_groups import num_tree_groups

__all__ = ["ReductionOrder", "TreeSums", "tree_sum"]

#: The order in which gradients and losses of micro-batches are added: "sequential" adds those of a replica one after
#: the other, then the sums of the replicas in replica order; "tree" adds them as a binary tree.
ReductionOrder = Literal["sequential", "tree"]


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """Sum the values of all micro-batches or replicas as a binary tree, on the first value's device."""
    size = len(values) // num_tree_groups(len(values))
    sums = [_in_a_row(values[start : start + size]) for start in range(0, len(values), size)]
    while len(sums) > 1:
        sums = [_in_a_row(pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _in_a_row(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value.to(total.device)
    return total


class TreeSums:
    """Adds the gradients of one stage's micro-batches as a binary tree.

    A group consists of consecutive micro-batches (see `program.tree_groups`). Autograd adds the gradients of a group
    to ``.grad``. When a gradient of the next group arrives, the sum of the previous group is set aside. Each parameter
    has a current group of its own, because a split backward computes the gradients of some weights later than those of
    others.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._size = 1
        self._group: dict[Tensor, int] = {}  # the group whose gradients are in .grad
        self._sums: dict[Tensor, list[tuple[int, Tensor]]] = {}  # the first group of each subtree, and the sum
        self._before: dict[Tensor, Tensor] = {}

    def begin(self, parameters: Iterable[Tensor], num_microbatches: int) -> None:
        """Start a step. Sums of a failed step are discarded.

        Args:
            parameters: the parameters. No other stage may add to their gradients.
            num_microbatches: the number of micro-batches in this replica.

        """
        self._parameters = [*dict.fromkeys(parameters)]
        self._size = max(1, num_microbatches // num_tree_groups(num_microbatches))
        self._group.clear()
        self._sums.clear()
        self._before.clear()

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """A context for a backward pass that adds gradients of a micro-batch to ``.grad``."""
        group = microbatch // self._size
        aside: dict[Tensor, Tensor] = {}
        for parameter in self._parameters:
            if parameter.grad is not None and self._group.get(parameter) != group:
                aside[parameter] = parameter.grad
                parameter.grad = None
        yield
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = aside.get(parameter)
            elif self._group.get(parameter) != group:
                if parameter in aside:
                    self._set_aside(parameter, aside.pop(parameter))
                self._group[parameter] = group

    def _set_aside(self, parameter: Tensor, grad: Tensor) -> None:
        """Store the sum of a complete group, or the gradient that existed before the step."""
        group = self._group.get(parameter)
        if group is None:
            self._before[parameter] = grad
            return
        if grad.is_sparse:
            raise ExecutionError(
                f"reduction_order='tree' supports only dense gradients; a parameter of shape {tuple(parameter.shape)} "
                f"has a sparse gradient; make its layer with sparse=False, or leave reduction_order= out"
            )
        sums = self._sums.setdefault(parameter, [])
        _merge(sums, group)
        sums.append((group, grad))
        _merge(sums, group + 1)

    def finish(self) -> None:
        """Store the sum of all groups in ``.grad``. A second call does nothing.

        Called after the last backward pass. The sum is added to the gradient that the parameter had before the step.
        """
        for parameter, group in self._group.items():
            sums = self._sums.pop(parameter, [])
            if parameter.grad is not None:
                sums.append((group, parameter.grad))
                _merge(sums, None)
                ((_, parameter.grad),) = sums
            before = self._before.pop(parameter, None)
            if before is not None:
                parameter.grad = before if parameter.grad is None else _add(before, parameter.grad)
        self._group.clear()


def _merge(sums: list[tuple[int, Tensor]], begun: int | None) -> None:
    """Replace the last two sums with their total, repeatedly, while no further group belongs to their common subtree.

    ``begun`` is the lowest number that a further group can have; None if there are no further groups. Groups without a
    gradient are left out of the tree.
    """
    while len(sums) > 1:
        (first, total), (second, grad) = sums[-2:]
        level = (first ^ second).bit_length()
        if begun is not None and begun < (first >> level) + 1 << level:
            return
        sums[-2:] = [(first, _add(total, grad))]


@torch.no_grad()
def _add(total: Tensor, grad: Tensor) -> Tensor:
    return total.add_(grad)
