"""Batch: a mini-batch cut into micro-batches, and how much each counts for the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.payload import pytree, rows_of, split

__all__ = ["Batch", "LossReduction", "SplitDims", "Splitter"]

LossReduction = Literal["mean", "sum"]
#: One dim for all arguments, or one for each: by position, or by keyword.
SplitDims = int | None | Sequence[int | None] | Mapping[str, int | None]


@dataclass(frozen=True)
class Batch:
    """Micro-batches: (args, kwargs) of the model, targets (empty without), and the rows of each."""

    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    targets: list[Any]
    rows: list[int]

    def __len__(self) -> int:
        return len(self.inputs)

    def wanted_inputs(self) -> list[list[Tensor]]:
        """The input tensors that require a gradient, by micro-batch."""
        return [
            [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for value in self.inputs
        ]


@dataclass(frozen=True)
class Splitter:
    """How batches are cut, and how losses are weighted.

    loss_weight: (target, or the model's inputs without one) -> what a micro-batch counts; its rows unless given.
    """

    num_microbatches: int
    fixed: bool
    split_dims: SplitDims = 0
    loss_weight: Callable[..., Any] | None = None
    loss_reduction: LossReduction = "mean"

    def __post_init__(self) -> None:
        if self.loss_reduction not in get_args(LossReduction):
            raise InputError(
                f"loss_reduction is one of {', '.join(get_args(LossReduction))}; got {self.loss_reduction!r}; "
                f"say how loss_fn reduces over rows"
            )
        for dim in self._given_dims():
            if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
                raise InputError(
                    f"split_dims is a dim, one for all arguments or one for each; got {self.split_dims!r}; "
                    f"pass whole numbers, None for an argument that is not split"
                )

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Batch:
        """Cut a mini-batch. Fewer rows than micro-batches make fewer micro-batches.

        Raises InputError for no rows, unequal rows, a target that does not match, or too few rows for a program
        whose number of micro-batches is fixed.
        """
        if isinstance(self.split_dims, Sequence) and len(self.split_dims) < len(args):
            raise InputError(
                f"split_dims has one dim for each argument; it has {len(self.split_dims)}, but {len(args)} arguments "
                f"were given; give as many"
            )
        dims = [self._dim(index) for index in range(len(args))]
        names = {name: self._dim(name) for name in kwargs}
        rows = self._rows(args, kwargs, dims, names, target)
        count = min(self.num_microbatches, rows)
        if self.fixed and count < self.num_microbatches:
            raise InputError(
                f"this program is written for {self.num_microbatches} micro-batches; the batch has {rows} rows; "
                f"give it at least as many (drop_last=True in the data loader), or a schedule that makes programs"
            )
        with torch.enable_grad():  # the cut of an input that requires a gradient is part of the user's graph
            columns = [split(value, dim, count) for value, dim in zip(args, dims, strict=True)]
            named = {name: split(value, names[name], count) for name, value in kwargs.items()}
        inputs = [
            (tuple(column[part] for column in columns), {name: column[part] for name, column in named.items()})
            for part in range(count)
        ]
        targets = [] if target is None else split(target, 0, count)
        return Batch(inputs, targets, [rows // count + (part < rows % count) for part in range(count)])

    def _given_dims(self) -> list[Any]:
        dims: Any = self.split_dims
        if isinstance(dims, Mapping):
            return list(dims.values())
        return list(dims) if isinstance(dims, Sequence) and not isinstance(dims, str) else [dims]

    def _dim(self, argument: int | str) -> int | None:
        dims = self.split_dims
        if dims is None or isinstance(dims, int):
            return dims
        if isinstance(dims, Mapping):
            return dims.get(argument, 0) if isinstance(argument, str) else 0
        return dims[argument] if isinstance(argument, int) and argument < len(dims) else 0

    def _rows(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[int | None],
        names: dict[str, int | None],
        target: Any,
    ) -> int:
        counts = {f"argument {i}": rows_of(value, dims[i], f"argument {i}") for i, value in enumerate(args)}
        counts |= {f"{name}=": rows_of(value, names[name], f"{name}=") for name, value in kwargs.items()}
        counts["target"] = rows_of(target, 0, "the target")
        known = {what: rows for what, rows in counts.items() if rows is not None}
        if not known:
            raise InputError("a batch has a tensor whose rows are split into micro-batches; found none; pass a tensor")
        first, rows = next(iter(known.items()))
        for what, other in known.items():
            if other != rows:
                raise InputError(
                    f"all tensors of a batch have as many rows; {first} has {rows}, {what} has {other}; "
                    f"make them match, or set split_dims=None for an argument that is not split"
                )
        if rows == 0:
            raise InputError(f"a batch has at least one row; {first} has none; leave the empty batch out")
        return rows

    def factors(self, batch: Batch) -> list[float | None]:
        """What the loss of each micro-batch is multiplied by, so that gradients are those of the whole batch."""
        if self.loss_reduction == "sum":
            return [None] * len(batch)
        weights: list[Any] = list(batch.rows)
        if self.loss_weight is not None:
            given = [(target,) for target in batch.targets] or [args for args, _ in batch.inputs]
            weights = [float(self.loss_weight(*values)) for values in given]
        total = sum(weights)
        if not 0 < total < inf:
            raise InputError(
                f"loss weights add up to a finite number above 0; got {total}; check loss_weight, or skip this batch"
            )
        return [weight / total for weight in weights]
