"""Sample layout: finds a batch that would be split along another dimension than the one that has its rows.

A sample is one micro-batch. If the sample is longer than a micro-batch along the dimension that is split, and exactly
as long as a micro-batch along another dimension, then the rows are in that other dimension. For example, the sample of
a recurrent model has shape (35, 2), for time and rows, and the batch has shape (35, 8). Sequences of any length
are accepted, because a sample shows no length.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.tensors.payload import pytree
from pipesched.tensors.row_evidence import Evidence
from pipesched.tensors.rows import ROWS_PAGE, Argument

__all__ = ["check_layout"]


def check_layout(given: Sequence[Argument], evidence: Evidence, rows: int, sizes: Sequence[int]) -> None:
    """Raise InputError if the sample shows that the batch's rows are in another dimension than 0.

    Nothing is checked for batches after the first one that has other shapes than the sample, and for arguments that the
    user has named in ``split_dims``.

    Args:
        given: the arguments of the batch, and the target.
        evidence: the sample.
        rows: the size of the batch along the dimension that is split.
        sizes: the sizes of the micro-batches along this dimension.

    """
    if evidence.layout_known or len(sizes) == 1:
        return
    if evidence.rows is None or evidence.rows <= max(sizes) or any(one.dim.explicit or one.dim.given for one in given):
        evidence.layout_known = True
        return
    pairs = list(_pairs(given, evidence))
    if all(tensor.shape == example.shape for _, tensor, example in pairs):
        return  # the batch shows nothing new
    evidence.layout_known = True
    dims = set.intersection(*(_other_dims(tensor, example, len(sizes)) for _, tensor, example in pairs))
    if len(dims) != 1:
        return
    evidence.layout_known = False
    dim = dims.pop()
    argument, tensor, example = pairs[0]
    in_dim = [one.key for one in given if _has_dim(one.value, dim, tensor.shape[dim])]
    found = dim if len(in_dim) == len(given) else dict.fromkeys(in_dim, dim)
    raise InputError(
        f"a batch is split along dim 0, unless split_dims names another dim; {argument.name} has shape "
        f"{list(tensor.shape)} and would be split into micro-batches of {max(sizes)} rows along dim 0, but the sample "
        f"has shape {list(example.shape)}, so its rows are in dim {dim}; pass numerics=Numerics(split_dims={found}), "
        f"or split_dims={{{argument.key!r}: 0}} if the rows are in dim 0 ({ROWS_PAGE})"
    )


def _pairs(given: Sequence[Argument], evidence: Evidence) -> Iterator[tuple[Argument, Tensor, Tensor]]:
    """Yield each tensor of the batch that is not a scalar, with the tensor in the same place of the sample."""
    for argument in given:
        leaves, spec = pytree.tree_flatten(argument.value)
        examples, form = pytree.tree_flatten(evidence.sample.get(argument.key))
        for leaf, example in zip(leaves, examples, strict=False) if spec == form else ():
            if isinstance(leaf, Tensor) and isinstance(example, Tensor) and leaf.dim():
                yield argument, leaf, example


def _has_dim(value: Any, dim: int, size: int) -> bool:
    """Return whether a value contains tensors, and all of them have this size along a dim."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()]
    return bool(tensors) and all(leaf.dim() > dim and leaf.shape[dim] == size for leaf in tensors)


def _other_dims(tensor: Tensor, example: Tensor, num_parts: int) -> set[int]:
    """Return the dims above 0 in which the sample has the size of a micro-batch, and not that of the batch."""
    if tensor.dim() != example.dim():
        return set()
    differ = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] != example.shape[dim]]
    if len(differ) != 1:
        return set()
    (dim,) = differ
    size, part = tensor.shape[dim], example.shape[dim]
    if part in (size // num_parts, -(-size // num_parts)) or _is_slice(tensor, example, dim):
        return {dim}
    return set()


def _is_slice(tensor: Tensor, example: Tensor, dim: int) -> bool:
    """Return whether the sample is the beginning of the batch along a dim, such as ``x[:, :2]``."""
    if example.is_meta or tensor.is_meta or example.shape[dim] > tensor.shape[dim] or len(example) != len(tensor):
        return False
    begin = tensor.detach().narrow(dim, 0, example.shape[dim])
    return begin.device == example.device and begin.dtype == example.dtype and torch.equal(begin, example.detach())
