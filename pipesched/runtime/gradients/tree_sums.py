"""Tree sums: adds gradients in a binary tree, so that the result does not depend on the number of replicas.

`program.tree_groups` defines the tree. Whether 8 micro-batches are divided among 1, 2 or 4 replicas, each micro-batch
belongs to the same subtree, so the sum is bit-identical. Each replica adds the gradients in its own subtree. `tree_sum`
and `runtime.reductions.replica_sum` then add the sums of the replicas.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.program.tree_groups import num_tree_groups

__all__ = ["ReductionOrder", "TreeSums", "tree_sum"]

#: The order in which gradients and losses of micro-batches are added: "sequential" adds the values of a replica one
#: after the other, then the sums of the replicas in replica order; "tree" adds all values in a binary tree.
ReductionOrder = Literal["sequential", "tree"]


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """Add the values of all micro-batches or replicas in a binary tree. The sum is on the first value's device."""
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
    """Adds the gradients of one stage's micro-batches in a binary tree.

    A group consists of consecutive micro-batches (see `program.tree_groups`). Autograd adds the gradients of a group
    to ``.grad``. When a gradient of the next group arrives, the sum of the previous group is set aside. The current
    group is tracked separately for each parameter, because a split backward computes some weight gradients later than
    others.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._size = 1
        self._group: dict[Tensor, int] = {}  # the group whose gradients are in .grad
        self._sums: dict[Tensor, list[tuple[int, Tensor]]] = {}  # the first group of each added subtree, and its sum
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
        """A context in which the backward pass of a micro-batch adds gradients to ``.grad``."""
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
        """Store ``grad``, which is the sum of a complete group or the parameter's gradient from before the step."""
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
        """Set ``.grad`` to the sum of all groups, plus the gradient that the parameter had before the step.

        Called after the last backward pass. A second call does nothing.
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
    """Repeatedly add the last two sums, as long as no later group belongs to their common subtree.

    ``begun`` is the lowest number that a later group can have, or None if there are no more groups. Groups without a
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
