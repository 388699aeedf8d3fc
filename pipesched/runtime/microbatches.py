"""Microbatches: splits a mini-batch into micro-batches, and weights their losses."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from math import inf, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.capture.loss_reduction import LossReduction, joined_weights, weights_in_numbers
from pipesched.capture.paths import BatchPaths
from pipesched.capture.stage_body import loss_entry
from pipesched.checks import shown
from pipesched.devices.streams import events_of_caller
from pipesched.errors import InputError
from pipesched.program.near_equal_parts import near_equal_parts
from pipesched.runtime.gradients.tree_sums import ReductionOrder, tree_sum
from pipesched.simulation.size_fit import Size
from pipesched.tensors.loss_factors import LossFactor, LossWeights, normalized, scaled
from pipesched.tensors.payload import opened, pytree, trainable_leaves
from pipesched.tensors.row_count import row_counts, rows_of_batch
from pipesched.tensors.row_evidence import Evidence
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.row_split import RowSplit
from pipesched.tensors.rows import ROWS_PAGE, Argument, Dim, name_of
from pipesched.tensors.sample_layout import check_layout
from pipesched.units import counted

__all__ = ["Batch", "GivenBatch", "Microbatch", "SplitDims", "Splitter", "Weighting", "loss_places"]

#: The dim to split along: one dim for all arguments, a sequence with one dim for each positional argument, or a mapping
#: from a position, a keyword, "target" or "output" to a dim. Arguments that are left out are split along dim 0. If one
#: dim applies to all arguments, a target or output whose size in that dim differs from the number of rows uses dim 0.
#: In place of a dim, an argument can have a sequence or a mapping with the dims of its entries.
SplitDims = int | None | Sequence[Any] | Mapping[int | str, Any]


_EVERYWHERE = Dim()
_SHOWN = 3  # the number of arguments that an error message names


_SAMPLE_PATH = BatchPaths()


class Microbatch:
    """One micro-batch of a batch that the caller has split. Takes the same arguments as ``step``.

    ::

        parts = [Microbatch(tokens, mask=mask, target=labels) for tokens, mask, labels in packed]
        loss = pipe.step(microbatches=parts)

    Each micro-batch must have the same arguments as the sample. The tensors can have any shapes that the model accepts,
    for example packed sequences, or sequences grouped by length.

    Args:
        *args: the model's positional inputs.
        target: the target that is passed to loss_fn. Default: None (there is no loss_fn).
        **kwargs: the model's keyword inputs.

    """

    def __init__(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.target = target

    def __repr__(self) -> str:
        named = [f"{name}=..." for name in (*self.kwargs, *(["target"] if self.target is not None else []))]
        return f"Microbatch({', '.join(['...'] * len(self.args) + named)})"


class GivenBatch(NamedTuple):
    """The batch that a caller passed to step, evaluate or forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    #: The micro-batches into which the caller split the batch. If set, the other fields are empty.
    microbatches: Any = None

    @property
    def is_given(self) -> bool:
        """Whether the caller passed a batch."""
        return bool(self.args or self.kwargs) or self.target is not None or self.microbatches is not None


@dataclass(frozen=True)
class Batch:
    """The micro-batches of a mini-batch."""

    #: The model's (args, kwargs) for each micro-batch.
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    #: The target of each micro-batch; empty if there are no targets.
    targets: list[Any]
    #: The number of rows of each micro-batch.
    rows: list[int]
    _: KW_ONLY
    #: The dims along which outputs are concatenated, as in ``split_dims``.
    output_dim: Dim = _EVERYWHERE
    #: The form (dtypes and shapes) of each micro-batch's inputs, if this process does not have the whole batch.
    looks: list[Hashable] = field(default_factory=list)
    #: The paths of the micro-batches through the code between layers.
    paths: BatchPaths = _SAMPLE_PATH
    #: A digest of the values that all ranks of a replica must pass; empty if only one rank passes the batch.
    values: bytes = b""
    #: Whether the caller split the batch into micro-batches. The shapes of such micro-batches can differ.
    as_given: bool = False
    #: Whether micro-batches with the same number of rows can have tensors of different shapes, as lists have.
    uneven: bool = False

    def of_replica(self, replica: int, num_replicas: int) -> "Batch":
        """Return one replica's micro-batches, from a batch that contains the micro-batches of all replicas."""
        size = len(self.rows) // num_replicas
        own = slice(replica * size, (replica + 1) * size)
        return replace(
            self, inputs=self.inputs[own], targets=self.targets[own], rows=self.rows[own], paths=self.paths.of_part(own)
        )

    def looking(self, look: Callable[[Any], Hashable]) -> list[Hashable]:
        """Return each micro-batch's form (dtypes and shapes), computed by ``look``.

        Micro-batches with the same number of rows have the same form, so ``look`` is called once for each number of
        rows. If the caller split the batch into micro-batches, or rows are in lists, ``look`` is called for each
        micro-batch.
        """
        if self.as_given or self.uneven:
            return [look(value) for value in self.inputs]
        looks = {rows: look(value) for rows, value in dict(zip(self.rows, self.inputs, strict=True)).items()}
        return [looks[rows] for rows in self.rows]

    def sizes(self, look: Callable[[Any], Hashable]) -> list[Size]:
        """Return the size of each micro-batch. ``look`` returns the form (dtypes and shapes) of a micro-batch."""
        looks: list[Any] = self.looks or self.looking(look)
        return [Size(rows, _elements(own, rows)) for rows, own in zip(self.rows, looks, strict=True)]

    def ready(self) -> dict[torch.device, torch.Event]:
        """Return, for each accelerator that holds tensors of the batch, an event that the caller's work precedes."""
        leaves = pytree.tree_leaves(opened((self.inputs, self.targets)))
        return events_of_caller(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def wanted_inputs(self) -> list[list[Tensor]]:
        """Return the input tensors that require a gradient, one list per micro-batch."""
        return [trainable_leaves(value) for value in self.inputs]

    def gathered(self, outputs: Sequence[Any], weighting: "Weighting | None", joins: OutputRows) -> Any:
        """Join the micro-batches' outputs. If the caller split the batch, return the outputs as a list instead.

        If the outputs contain the model's own loss, ``weighting`` combines the micro-batches' losses. If ``weighting``
        is None, the outputs are only joined.
        """
        if self.as_given:
            return list(outputs)
        places = [] if weighting is None else loss_places(outputs[0])
        if weighting is None or not places:
            return joins.joined(outputs, self.rows, self.output_dim, self.inputs[0])
        losses, others = zip(*(_without_loss(output, places) for output in outputs), strict=True)
        total = weighting.total(weighting.weighted(losses))
        whole = opened(joins.joined(others, self.rows, self.output_dim, self.inputs[0]))
        return pytree.tree_map(lambda leaf: total if leaf is _LOSS else leaf, whole)


_LOSS = object()  # the place of the model's own loss in an output


def _without_loss(output: Any, places: Sequence[int]) -> tuple[Tensor, Any]:
    """Return the model's own loss, and the output with a marker in the places of the loss."""
    leaves, spec = pytree.tree_flatten(opened(output))
    return leaves[places[0]], pytree.tree_unflatten(
        [_LOSS if at in places else leaf for at, leaf in enumerate(leaves)], spec
    )


def _elements(look: Sequence[Any], rows: int) -> int:
    """Return the number of elements of a micro-batch's first non-scalar tensor, or 1 if that tensor is empty.

    If all tensors are scalars, return the number of rows. ``look`` is the micro-batch's form (dtypes and shapes).
    """
    shapes = (leaf[1] for leaf in look if isinstance(leaf, tuple))
    return max(1, prod(next(filter(None, shapes), (rows,))))


def loss_places(output: Any) -> list[int]:
    """Return the indices of the pytree leaves of ``output`` that are the model's scalar loss; [] if there are none."""
    loss = loss_entry(output)
    if not isinstance(loss, Tensor) or loss.dim():
        return []
    return [place for place, leaf in enumerate(pytree.tree_leaves(opened(output))) if leaf is loss]


class Weighting(NamedTuple):
    """The weights of the micro-batches' losses, for their backward passes and for the mini-batch's loss.

    A factor of None leaves a loss unscaled. A factor of 0 replaces the loss with zero, even if the loss is NaN.
    """

    #: The factor that is applied to each loss before its backward.
    factors: list[LossFactor]
    #: An additional factor for each loss, applied only when the losses are summed into the mini-batch's loss.
    shares: list[LossFactor]
    #: The order in which the losses are added.
    reduction_order: ReductionOrder = "sequential"

    def of_replica(self, replica: int, num_replicas: int) -> "Weighting":
        """Return the weights of one replica's micro-batches, from weights that cover all replicas."""
        size = len(self.factors) // num_replicas
        own = slice(replica * size, (replica + 1) * size)
        return Weighting(self.factors[own], self.shares[own], self.reduction_order)

    def weighted(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """Multiply the micro-batches' losses by their factors."""
        return [scaled(loss, factor) for loss, factor in zip(losses, self.factors, strict=True)]

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mini-batch's loss. ``losses`` are the micro-batches' losses, multiplied by their factors."""
        parts = [scaled(loss, share) for loss, share in zip(losses, self.shares, strict=True)]
        if self.reduction_order == "tree":
            return tree_sum(parts)
        total = parts[0]
        for part in parts[1:]:  # added in the same order for every schedule
            total = total + part.to(total.device)
        return total


@dataclass(frozen=True)
class Splitter:
    """Splits mini-batches into micro-batches and weights the losses."""

    num_microbatches: int
    #: Whether the program requires exactly ``num_microbatches``, however few rows a batch has.
    fixed: bool
    split_dims: SplitDims = 0
    #: Maps a micro-batch's target (its inputs if there is no target) to the weight of its loss. Default: a micro-batch
    #: is weighted by its number of rows.
    loss_weight: Callable[..., Any] | None = None
    loss_reduction: LossReduction = "mean"
    reduction_order: ReductionOrder = "sequential"
    #: The names of the model's positional parameters, if known.
    names: Sequence[str] = ()
    #: What the sample and earlier batches show about lists.
    evidence: Evidence = field(default_factory=Evidence, compare=False)
    #: Joins the outputs of micro-batches.
    joins: OutputRows = field(default_factory=OutputRows, compare=False)

    def __post_init__(self) -> None:
        for dim in self._given_dims():
            if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
                raise InputError(
                    f"split_dims must be one dim for all arguments, or one dim for each argument; got "
                    f"{self.split_dims!r}; pass integers, or None for an argument that is not split"
                )

    def batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, *, num_replicas: int = 1
    ) -> Batch:
        """Split a mini-batch. A batch with fewer rows than micro-batches is split into one micro-batch per row.

        If there are several replicas, the Batch contains the micro-batches of all replicas, in replica order. Every
        replica gets the same number of micro-batches.

        Raises:
            InputError: if the batch has no rows, if its arguments and target have different numbers of rows, if it has
                fewer rows than replicas, or if the program fixes the number of micro-batches and the batch has fewer
                rows.

        """
        if not isinstance(self.split_dims, int):
            self._check_names(len(args), kwargs)
        given = self._arguments(args, kwargs, target)
        rows = rows_of_batch(given, self.evidence.sample)
        due = self.num_microbatches * num_replicas
        count = min(due, rows // num_replicas * num_replicas)
        if self.fixed and count < due:
            raise InputError(
                f"a batch must have a row for each of the {due} micro-batches of a step; the batch "
                f"has {counted(rows, 'row')}; pass at least {counted(due, 'row')} (drop_last=True "
                f"in the data loader), or use a schedule that allows any number of micro-batches"
            )
        if not count:
            raise InputError(
                f"a batch must have a row for each of the {num_replicas} replicas; the batch has "
                f"{counted(rows, 'row')}; pass at least {num_replicas} rows"
            )
        sizes = near_equal_parts(rows, count)
        if not self.evidence.layout_known:
            check_layout(given, self.evidence, rows, sizes)
        split = RowSplit(self.evidence, rows, sizes, given=given)
        with torch.enable_grad():  # splitting an input that requires a gradient is part of the user's graph
            columns = [split.parts(argument) for argument in given]
        ordered, named = columns[: len(args)], dict(zip(kwargs, columns[len(args) :], strict=False))
        inputs = [
            (tuple([column[part] for column in ordered]), {name: column[part] for name, column in named.items()})
            for part in range(count)
        ]
        targets = [] if target is None else columns[-1]
        return Batch(inputs, targets, sizes, output_dim=self._dim("output"), uneven=split.uneven)

    def as_given(self, microbatches: Any, *, num_replicas: int = 1) -> Batch:
        """Return a Batch of the micro-batches into which the caller split a batch.

        ``microbatches`` contains the micro-batches of all replicas, in replica order.

        Raises:
            InputError: the argument is not a list of Microbatch objects, or is empty; the program does not allow this
                number of micro-batches; only some micro-batches have a target; or the weights of the losses are not
                known.

        """
        if not isinstance(microbatches, Sequence) or not all(isinstance(one, Microbatch) for one in microbatches):
            raise InputError(
                f"microbatches= must be a list of Microbatch objects; got {shown(microbatches)}; for example, pass "
                f"[Microbatch(x, target=y) for x, y in parts]"
            )
        count = len(microbatches)
        fixed = self.num_microbatches * num_replicas
        if not count or count % num_replicas or (self.fixed and count != fixed):
            due = "at least 1" if num_replicas == 1 else f"a multiple of {num_replicas}, the number of replicas"
            remedy = "pass at least one Microbatch" if num_replicas == 1 else "pass the same number for each replica"
            if self.fixed:
                due = f"exactly {fixed}, because the program has {self.num_microbatches} per replica"
                remedy = f"pass {fixed} micro-batches, or use a schedule that allows any number of micro-batches"
            raise InputError(f"the number of micro-batches must be {due}; microbatches= contains {count}; {remedy}")
        with_target = [number for number, one in enumerate(microbatches) if one.target is not None]
        if len(with_target) not in (0, count):
            missing = next(number for number in range(count) if number not in with_target)
            raise InputError(
                f"if any micro-batch has a target, all micro-batches must have one; micro-batch {with_target[0]} of "
                f"{count} has a target, but micro-batch {missing} has no target; pass target= to every Microbatch"
            )
        inputs = [(one.args, one.kwargs) for one in microbatches]
        targets = [one.target for one in microbatches] if with_target else []
        rows = self._given_rows(microbatches)
        return Batch(inputs, targets, rows, output_dim=self._dim("output"), as_given=True)

    def _given_rows(self, microbatches: Sequence[Microbatch]) -> list[int]:
        """Return the number of rows of each micro-batch that the caller passed.

        If the tensors of a micro-batch have different numbers of rows, those of the target count. The rows of the
        inputs count if all inputs lead to the same weights of the losses.
        """
        every = []
        for one in microbatches:
            self._check_names(len(one.args), one.kwargs)
            every.append(row_counts(self._arguments(one.args, one.kwargs, one.target)))
        weighted = self.loss_reduction == "mean" and self.loss_weight is None and len(microbatches) > 1
        targets = [{place: rows for place, rows in counts.items() if place[0] == "target"} for counts in every]
        for known in (every, targets):
            if all(len({*counts.values()}) == 1 for counts in known):
                found = [next(iter(counts.values())) for counts in known]
                break
        else:
            found = _proportional_rows(every) if weighted else [next(iter(counts.values()), 1) for counts in every]
        if 0 in found and weighted:
            raise InputError(
                f"a micro-batch must have at least one row; micro-batch {found.index(0)} has no rows; leave it out"
            )
        return found

    def resized(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, rows: int) -> Batch:
        """Make a batch of one micro-batch with ``rows`` rows, dropping or repeating rows of a sample as needed.

        Raises the same errors as ``batch``.
        """
        given = self._arguments(args, kwargs, target)
        has = rows_of_batch(given)
        if rows == has:
            return Batch([(args, kwargs)], [] if target is None else [target], [rows])
        split = RowSplit.choosing(has, [[row % has for row in range(rows)]])
        columns = [split.parts(argument)[0] for argument in given]
        inputs = tuple(columns[: len(args)]), dict(zip(kwargs, columns[len(args) :], strict=False))
        return Batch([inputs], [] if target is None else columns[-1:], [rows])

    def knowing(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Splitter":
        """Return a splitter that compares batches with a sample.

        Args:
            names: the names of the model's positional parameters.
            args: the sample's positional arguments.
            kwargs: the sample's keyword arguments.

        """
        sample: dict[Any, Any] = {**dict(enumerate(args)), **dict(zip(names, args, strict=False)), **kwargs}
        sample |= {place: kwargs[name] for place, name in enumerate(names) if name in kwargs}
        named = replace(self, names=tuple(names))
        given = named._arguments(args, kwargs, None)
        try:
            return replace(named, evidence=Evidence(sample, rows_of_batch(given)))
        except InputError:  # for example, a graph or packed patches, which only microbatches= can split
            rows = next(iter(row_counts(given).values()), None)
            return replace(named, evidence=Evidence(sample, rows, unequal=True))

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> list[Argument]:
        """Return the arguments of a call; a target that is not None comes last."""
        given = [Argument(place, value, self._dim(place)) for place, value in enumerate(args)]
        given += [Argument(name, value, self._dim(name)) for name, value in kwargs.items()]
        if target is not None:
            one_dim = isinstance(self.split_dims, int) and self.split_dims
            given.append(
                Argument("target", target, self._target_dim(target, given) if one_dim else self._dim("target"))
            )
        return given

    def _check_names(self, num_args: int, kwargs: Mapping[str, Any]) -> None:
        dims = self.split_dims
        if isinstance(dims, Mapping):
            known = {*range(num_args), *self.names[:num_args], *kwargs, "target", "output"}
            strange = [name for name in dims if name not in known]
            if strange:
                raise InputError(
                    f"the keys of split_dims must be arguments of the call, or 'target' or 'output'; the call has no "
                    f"argument {strange[0]!r}; correct the key: the call has the arguments "
                    f"{', '.join(map(repr, [*range(num_args), *kwargs]))}"
                )
        elif isinstance(dims, Sequence) and len(dims) < num_args:
            raise InputError(
                f"split_dims must have one dim for each argument; got a list of {counted(len(dims), 'dim')}, but the "
                f"call has {counted(num_args, 'positional argument')}; add the missing dims"
            )

    def _target_dim(self, target: Any, given: Sequence[Argument]) -> Dim:
        """Return the dim along which the target is split.

        A single dim for all arguments applies to the target only if the target's size in this dim is the batch's number
        of rows; otherwise the target is split along dim 0.
        """
        dim = self._dim("target")
        number = dim.number
        rows = next(iter(row_counts(given).values()), None)
        tensors = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        fits = all(-leaf.dim() <= number < leaf.dim() and leaf.shape[number] == rows for leaf in tensors)
        return dim if fits else Dim()

    def _given_dims(self) -> list[Any]:
        """Return all dims that the user passed, including those of entries."""
        left: list[Any] = [self.split_dims]
        found = []
        for dims in left:
            if isinstance(dims, Mapping):
                left += dims.values()
            elif isinstance(dims, Sequence) and not isinstance(dims, str | bytes):
                left += dims
            else:
                found.append(dims)
        return found

    def _dim(self, argument: int | str) -> Dim:
        dims = self.split_dims
        if dims is None or isinstance(dims, int):
            return _EVERYWHERE if dims == 0 else Dim(dims)
        name = self.names[argument] if isinstance(argument, int) and argument < len(self.names) else argument
        if isinstance(dims, Mapping) and argument not in dims and name in dims:
            argument = name
        return Dim(dims).inside(argument)

    def factors(self, batch: Batch) -> list[LossFactor]:
        """Return the loss factors that make the micro-batches' gradients add up to the mini-batch's gradients."""
        return self.weighting(self.weights(batch)).factors

    def weights(self, batch: Batch) -> LossWeights:
        """Return the weight of each micro-batch's loss: its rows by default, and 1 if losses are only added.

        If the weights follow from targets on an accelerator, they are a tensor there.
        """
        if self.loss_reduction == "sum":
            return [1] * len(batch.rows)
        return batch.rows if self.loss_weight is None else _weights(batch, self.loss_weight)

    def weighting(
        self,
        weights: LossWeights,
        groups: Sequence[Sequence[int]] = (),
        of_replicas: Sequence[Sequence[float]] | None = None,
    ) -> "Weighting":
        """Return the weighting of a batch's losses. Raises InputError unless the weights' sum is finite and above 0.

        Args:
            weights: the weight of each micro-batch's loss.
            groups: for each update, the micro-batches whose gradients the update applies. The factors in a group add up
                to 1. Default: one group of all micro-batches.
            of_replicas: the weights of every replica. The factors of all replicas together add up to 1. Default: there
                is one replica.

        """
        if self.loss_reduction == "sum":
            return Weighting([None] * len(weights), [None] * len(weights), self.reduction_order)
        if isinstance(weights, Tensor):
            if len(groups) < 2:  # the host cannot check the sum without waiting
                return Weighting(normalized(weights), [None] * len(weights), self.reduction_order)
            weights = weights_in_numbers(weights)  # an update without labels must be left out
        total = sum([weight for own in of_replicas or [weights] for weight in own])
        if not 0 < total < inf:
            remedy = getattr(self.loss_weight, "remedy", "check loss_weight, or skip this batch")
            raise InputError(f"the sum of the loss weights must be finite and above 0; got {total}; {remedy}")
        if len(groups) < 2:
            return Weighting([weight / total for weight in weights], [None] * len(weights), self.reduction_order)
        factors = [0.0] * len(weights)
        shares = [0.0] * len(weights)
        for group in groups:
            own = sum(weights[microbatch] for microbatch in group)
            for microbatch in group:
                factors[microbatch] = weights[microbatch] / own if own else 0.0
                shares[microbatch] = own / total
        return Weighting(list(factors), list(shares))

    def weighting_of_outputs(self, batch: Batch) -> Weighting | None:
        """Return the weights of the losses in the outputs of ``forward``, or None if the weights cannot be computed."""
        if self.loss_reduction == "sum":
            return self.weighting(self.weights(batch))
        try:
            weights = weights_in_numbers(self.weights(batch))
        except Exception:  # loss_weight may fail on inputs without labels, whose outputs have no loss
            return None
        total = sum(weights) or nan  # NaN, like a mean over no labels in PyTorch
        return Weighting([weight / total for weight in weights], [None] * len(batch.rows), self.reduction_order)


def _weights(batch: Batch, loss_weight: Callable[..., Any]) -> LossWeights:
    """Compute each micro-batch's weight with ``loss_weight``. Raises InputError if a weight is not a number.

    For labels among the inputs of a model that computes its own loss, the host waits for the device. The loss of a
    micro-batch without labels would be NaN there, and only the host can leave out its backward.
    """
    if batch.targets:
        return joined_weights([loss_weight(target) for target in batch.targets])
    return weights_in_numbers(joined_weights([loss_weight(*args, **kwargs) for args, kwargs in batch.inputs]))


def _proportional_rows(every: Sequence[Mapping[Any, int]]) -> list[int]:
    """Return the number of rows of each micro-batch if all inputs have rows in the same proportions.

    Raises:
        InputError: the weights of the micro-batches' losses are not known.

    """
    common = [place for place in every[0] if all(counts.get(place) for counts in every)]
    columns = {place: [counts[place] for counts in every] for place in common}
    shares = {tuple(Fraction(rows, sum(column)) for rows in column) for column in columns.values()}
    if len(shares) == 1:
        return next(iter(columns.values()))
    said = "; ".join(f"{name_of(place)} has {column} rows" for place, column in list(columns.items())[:_SHOWN])
    raise InputError(
        f"the loss of each micro-batch must have a weight, by default its number of rows; in the micro-batches, "
        f"{said or 'no tensor has rows'}; pass numerics=Numerics(loss_weight=...), a function of a micro-batch's "
        f"{'target' if any(place[0] == 'target' for place in every[0]) else 'inputs'} ({ROWS_PAGE})"
    )
