"""Microbatches: a mini-batch cut into micro-batches, and how much each counts for the loss."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.capture.loss_reduction import LossReduction
from pipesched.capture.stage_body import loss_entry
from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.program.near_equal_parts import near_equal_parts
from pipesched.tensors.payload import choose_rows, gather, opened, pytree, rows_of, split, trainable_leaves

__all__ = ["Batch", "SplitDims", "Splitter", "Weighting", "loss_places"]

#: One dim for all; or one for each argument by position; or by name: positions, keywords, "target" and "output".
#: What is not named is split along dim 0, and so are target and outputs without the batch's rows along the dim.
SplitDims = int | None | Sequence[int | None] | Mapping[int | str, int | None]


@dataclass(frozen=True)
class Batch:
    """Micro-batches: (args, kwargs) of the model, targets (empty without), and the rows of each.

    looks: what each looks like, where this process does not hold all of it.
    """

    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    targets: list[Any]
    rows: list[int]
    _: KW_ONLY
    output_dim: int = 0
    looks: list[Hashable] = field(default_factory=list)

    def looking(self, look: Callable[[Any], Hashable]) -> list[Hashable]:
        """What each micro-batch looks like; those of as many rows look alike, as ``Splitter`` cuts them."""
        looks = {rows: look(value) for rows, value in dict(zip(self.rows, self.inputs, strict=True)).items()}
        return [looks[rows] for rows in self.rows]

    def wanted_inputs(self) -> list[list[Tensor]]:
        """The input tensors that require a gradient, by micro-batch."""
        return [trainable_leaves(value) for value in self.inputs]

    def gathered(self, outputs: Sequence[Any], weighting: "Weighting | None") -> Any:
        """The outputs of all micro-batches as one. weighting: of the loss that is in them, None where there is none."""
        whole = gather(outputs, self.rows, self.output_dim)
        places = [] if weighting is None else loss_places(outputs[0])
        if weighting is None or not places:
            return whole
        leaves, spec = pytree.tree_flatten(opened(whole))
        losses = [pytree.tree_leaves(opened(output))[places[0]] for output in outputs]
        total = weighting.total(weighting.weighted(losses))
        return pytree.tree_unflatten([total if at in places else leaf for at, leaf in enumerate(leaves)], spec)


def loss_places(output: Any) -> list[int]:
    """At which leaves of an output its own loss, a scalar, stands."""
    loss = loss_entry(output)
    if not isinstance(loss, Tensor) or loss.dim():
        return []
    return [place for place, leaf in enumerate(pytree.tree_leaves(opened(output))) if leaf is loss]


class Weighting(NamedTuple):
    """What the loss of each micro-batch is multiplied by before its backward, and once more in the batch's loss.

    None leaves a loss as it is; 0 leaves out one that counts nothing, whatever it is.
    """

    factors: list[float | None]
    shares: list[float | None]

    def weighted(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """The losses of micro-batches, multiplied by their factors."""
        return [
            loss if factor is None else loss * factor if factor else torch.zeros_like(loss)
            for loss, factor in zip(losses, self.factors, strict=True)
        ]

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """The batch's loss. losses: of the micro-batches, multiplied by their factors."""
        parts = [loss if share is None else loss * share for loss, share in zip(losses, self.shares, strict=True)]
        total = parts[0]
        for part in parts[1:]:  # one order of sums, whatever the schedule
            total = total + part.to(total.device)
        return total


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
        if not isinstance(self.split_dims, int):
            self._check_names(len(args), kwargs)
        dims = [self._dim(index) for index in range(len(args))]
        names = {name: self._dim(name) for name in kwargs}
        given = {f"argument {index}": (value, dims[index]) for index, value in enumerate(args)}
        given |= {f"{name}=": (value, names[name]) for name, value in kwargs.items()}
        target_dim = self._target_dim(target, given)
        rows = _common_rows({**given, "the target": (target, target_dim)})
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
        targets = [] if target is None else split(target, target_dim, count)
        sizes = near_equal_parts(rows, count)
        return Batch(inputs, targets, sizes, output_dim=self._dim("output") or 0)

    def resized(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, rows: int) -> Batch:
        """A micro-batch of so many rows, of a sample's: fewer of them, or some again. Raises as ``batch``."""
        whole = replace(self, num_microbatches=1).batch(args, kwargs, target)
        has = whole.rows[0]

        def chosen(value: Any, dim: int | None) -> Any:
            if dim is None:
                return value

            def choose(tensor: Tensor) -> Tensor:
                if not tensor.dim() or rows == has:
                    return tensor
                picked = tensor.detach().index_select(dim, torch.arange(rows, device=tensor.device) % has)
                return picked.requires_grad_(tensor.requires_grad)

            return choose_rows(value, choose, [row % has for row in range(rows)])

        given = {f"argument {index}": (value, self._dim(index)) for index, value in enumerate(args)}
        target_dim = self._target_dim(target, given | {f"{name}=": (v, self._dim(name)) for name, v in kwargs.items()})
        own = tuple(chosen(value, self._dim(index)) for index, value in enumerate(args))
        named = {name: chosen(value, self._dim(name)) for name, value in kwargs.items()}
        return Batch([(own, named)], [] if target is None else [chosen(target, target_dim)], [rows])

    def _check_names(self, num_args: int, kwargs: Mapping[str, Any]) -> None:
        dims = self.split_dims
        if isinstance(dims, Mapping):
            known = {*range(num_args), *kwargs, "target", "output"}
            strange = [name for name in dims if name not in known]
            if strange:
                raise InputError(
                    f"split_dims names arguments by position or keyword, 'target' and 'output'; {strange[0]!r} is none "
                    f"of this call's; correct it"
                )
        elif isinstance(dims, Sequence) and len(dims) < num_args:
            raise InputError(
                f"split_dims has one dim for each argument; it has {len(dims)}, but {num_args} arguments were given; "
                f"give as many"
            )

    def _target_dim(self, target: Any, given: "_Given") -> int | None:
        """As named; with one dim for all, that dim where the target has the batch's rows there, else 0."""
        dim = self._dim("target")
        if not isinstance(self.split_dims, int) or not self.split_dims:
            return dim
        rows = next((r for what, (value, d) in given.items() if (r := rows_of(value, d, what)) is not None), None)
        tensors = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        return (
            dim if all(leaf.dim() > self.split_dims and leaf.shape[self.split_dims] == rows for leaf in tensors) else 0
        )

    def _given_dims(self) -> list[Any]:
        dims: Any = self.split_dims
        if isinstance(dims, Mapping):
            return list(dims.values())
        return list(dims) if isinstance(dims, Sequence) and not isinstance(dims, str | bytes) else [dims]

    def _dim(self, argument: int | str) -> int | None:
        dims = self.split_dims
        if dims is None or isinstance(dims, int):
            return dims
        if isinstance(dims, Mapping):
            return dims.get(argument, 0)
        return dims[argument] if isinstance(argument, int) and argument < len(dims) else 0

    def factors(self, batch: Batch) -> list[float | None]:
        """What the loss of each micro-batch is multiplied by, so that gradients are those of the whole batch."""
        return self.weighting(batch).factors

    def weighting(self, batch: Batch, groups: Sequence[Sequence[int]] = ()) -> "Weighting":
        """How losses count, where the gradients of each group of micro-batches are applied by themselves: a group's
        gradient is that of its rows; all are one group unless given.
        """
        if self.loss_reduction == "sum":
            return Weighting([None] * len(batch.rows), [None] * len(batch.rows))
        weights = batch.rows if self.loss_weight is None else _weights(batch, self.loss_weight)
        total = sum(weights)
        if not 0 < total < inf:
            remedy = getattr(self.loss_weight, "remedy", "check loss_weight, or skip this batch")
            raise InputError(f"loss weights add up to a finite number above 0; got {total}; {remedy}")
        if len(groups) < 2:
            return Weighting([weight / total for weight in weights], [None] * len(batch.rows))
        factors = [0.0] * len(batch.rows)
        shares = [0.0] * len(batch.rows)
        for group in groups:
            own = sum(weights[microbatch] for microbatch in group)
            for microbatch in group:
                factors[microbatch] = weights[microbatch] / own if own else 0.0
                shares[microbatch] = own / total
        return Weighting(list(factors), list(shares))

    def weighting_of_outputs(self, batch: Batch) -> Weighting | None:
        """How the losses in a model's outputs count, which nobody asked for; None where that cannot be told."""
        if self.loss_reduction == "sum":
            return self.weighting(batch)
        try:
            weights = batch.rows if self.loss_weight is None else _weights(batch, self.loss_weight)
        except Exception:  # whatever loss_weight raises of inputs without labels: the outputs have no loss then
            return None
        total = sum(weights) or nan  # as plain PyTorch does
        return Weighting([weight / total for weight in weights], [None] * len(batch.rows))


def _weights(batch: Batch, loss_weight: Callable[..., Any]) -> list[float]:
    """What loss_weight returns for each micro-batch; a device is waited for once. Raises InputError."""
    given: list[Any] = [((target,), {}) for target in batch.targets] or batch.inputs
    weights = [loss_weight(*args, **kwargs) for args, kwargs in given]
    try:
        if all(isinstance(weight, Tensor) and not weight.dim() for weight in weights):
            weights = torch.stack(weights).tolist()
        return [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise InputError(
            f"loss_weight returns one number for a micro-batch; got {shown(weights[0])}; return such as "
            f"(target != -100).sum()"
        ) from None


#: What was given, by the name that errors call it: (value, the dim along which it is split).
_Given = dict[str, tuple[Any, int | None]]


def _common_rows(given: _Given) -> int:
    """How many rows a batch has. Raises InputError where its tensors differ, or have none."""
    counts = {what: rows_of(value, dim, what) for what, (value, dim) in given.items()}
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
