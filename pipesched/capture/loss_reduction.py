"""Loss reduction: finds whether a loss is a mean or a sum, and computes the weight of each micro-batch's loss.

For losses of ``torch.nn`` and ``torch.nn.functional``, the reduction and the weights follow from the options of the
loss. Most means are over elements, so a micro-batch is weighted by its number of rows. Cross entropy and ``nll_loss``
divide by the number of targets that are not ignored, or by the sum of their class weights.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pipesched.capture.label_counts import IGNORED, SUM, counted_labels, counts
from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.tensors.loss_factors import LossWeights

__all__ = [
    "LossReduction",
    "counting",
    "joined_weights",
    "reduces",
    "resolve_loss",
    "stated_reduction",
    "weights_in_numbers",
]

LossReduction = Literal["mean", "sum"]
_Option = Callable[[str, Any], Any]  # (name, default) -> the option's value

_MEANS: dict[str, LossReduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
_ABSENT = object()


def resolve_loss(
    model: nn.Module,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    loss_fn: Any,
    loss_weight: Callable[..., Any] | None,
    loss_reduction: LossReduction | None,
    split_dims: Any,
    agreed: Callable[[Callable[[], str | None]], str | None] = lambda make: make(),
) -> tuple[Callable[..., Any] | None, LossReduction]:
    """Find the weight of each micro-batch's loss, and whether the batch's loss is the mean or the sum of these losses.

    Args:
        model: the user's module. If loss_fn is None and the model averages its own loss over labels, the weight of a
            micro-batch is the number of these labels in the micro-batch. If the model's own loss is a sum, the losses
            of micro-batches are added.
        sample: the arguments (args, kwargs) of a forward.
        loss_fn: the user's loss, or None.
        loss_weight: the user's function that computes the weight, or None to derive the weight from the loss.
        loss_reduction: "mean", "sum", or None to derive the reduction from the loss.
        split_dims: the dimension along which the batch is split, or a mapping from argument to dimension.
        agreed: a function that calls its argument on one rank and returns the result on all ranks. Default: every rank
            calls the argument.

    Returns:
        The function that computes the weight (None if the weight is the number of rows), and the reduction.

    Raises:
        InputError: the loss is not reduced to a single number, or contradicts the options.

    """
    if loss_reduction is not None and loss_reduction not in get_args(LossReduction):
        raise InputError(
            f"loss_reduction must be one of {', '.join(get_args(LossReduction))}; got {loss_reduction!r}; pass the "
            f"reduction that loss_fn uses over rows"
        )
    option = _options(loss_fn)
    says = None if option is None else _reduction(loss_fn, option)
    if says is not None and loss_reduction not in (None, _MEANS[says]):
        raise InputError(
            f"loss_reduction must match the reduction of loss_fn; {_name(loss_fn)} has reduction={says!r}, but "
            f"loss_reduction is {loss_reduction!r}; leave loss_reduction out, or change the loss"
        )
    reduction = loss_reduction or _MEANS[says or "mean"]
    if reduction == "sum" and loss_weight is not None:
        raise InputError(
            "loss_weight may only be passed if the loss is a mean; this loss is a sum, in which all micro-batches "
            "have the same weight; leave loss_weight out, or let loss_fn return a mean"
        )
    if reduction == "sum" or loss_weight is not None:
        return loss_weight, reduction
    if loss_fn is None and split_dims == 0:
        way = agreed(lambda: counted_labels(model, sample))
        return counts(model, way), "sum" if way == SUM and loss_reduction is None else reduction
    dim = split_dims.get("target", 0) if isinstance(split_dims, Mapping) else split_dims
    if says == "batchmean" and dim != 0:
        raise InputError(
            f"reduction='batchmean' divides by the size of dim 0, so the rows of the target must be in dim 0; with "
            f"split_dims={split_dims!r} the rows are in another dim; pass reduction='mean' or 'sum'"
        )
    if option is None or not _counts(option):
        return None, reduction
    return _Counted(_name(loss_fn), option, dim if isinstance(dim, int) else 0), reduction


def reduces(loss_fn: Any) -> bool:
    """Return whether a loss is a torch loss, whose options determine the reduction and the weights."""
    return _options(loss_fn) is not None


def stated_reduction(option: _Option) -> Any:
    """Return the reduction that the options of a torch loss state, such as "mean", "sum" or "none"."""
    average, reduce = option("size_average", None), option("reduce", None)
    if average is not None or reduce is not None:  # deprecated options, which take precedence in torch
        return "none" if reduce is False else "sum" if average is False else "mean"
    return option("reduction", None)


def joined_weights(weights: Sequence[Any]) -> LossWeights:
    """Return the weights of micro-batches as numbers or, if they are on an accelerator, as one tensor.

    Raises InputError if a weight is not a number.
    """
    try:
        if all(isinstance(weight, Tensor) and not weight.dim() for weight in weights):
            together = torch.stack(list(weights))
            return weights_in_numbers(together) if together.is_cpu else together
        return [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise InputError(
            f"loss_weight must return one number for each micro-batch; got {shown(weights[0])}; for "
            f"example, return (target != -100).sum()"
        ) from None


def weights_in_numbers(weights: LossWeights) -> Sequence[float]:
    """Return the weights of micro-batches as numbers. For weights on an accelerator, the host waits."""
    return weights.double().tolist() if isinstance(weights, Tensor) else weights


def counting(name: str, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return a function that computes the divisor of a torch mean loss from its target.

    Returns None if the divisor is proportional to the number of rows. ``options`` has the arguments of the loss.
    """
    return _Counted(name, options.get, 0) if _counts(options.get) else None


def _options(loss_fn: Any) -> _Option | None:
    """Return a function that reads an option of a torch loss (module, function or partial); None for other losses.

    The options of a module are read at each call, because they may change.
    """
    if isinstance(loss_fn, nn.Module):
        inherited = type(loss_fn).forward.__module__ == "torch.nn.modules.loss"
        return partial(getattr, loss_fn) if inherited else None
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    if not inspect.isfunction(function) or function.__module__ != "torch.nn.functional":
        return None
    options = {name: taken.default for name, taken in inspect.signature(loss_fn).parameters.items()}
    return options.get if "reduction" in options else None


def _reduction(loss_fn: Any, option: _Option) -> str:
    """Return the reduction of a torch loss, such as "mean" or "sum". Raises InputError if the reduction is "none"."""
    reduction = stated_reduction(option)
    if reduction not in _MEANS:
        raise InputError(
            f"a loss must be a single number; {_name(loss_fn)} has reduction={reduction!r}; pass reduction='mean' or "
            f"'sum'"
        )
    return str(reduction)


def _name(loss_fn: Any) -> str:
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return getattr(function, "__name__", type(function).__name__)


def _counts(option: _Option) -> bool:
    """Return whether a mean loss may divide by a number that is not proportional to the number of rows."""
    weights = (option(name, None) for name in ("weight", "pos_weight"))
    return option("ignore_index", _ABSENT) is not _ABSENT or any(weight is not None for weight in weights)


@dataclass(frozen=True)
class _Counted:
    """Computes the divisor of a torch mean loss from a micro-batch's target."""

    name: str
    option: _Option
    dim: int  #: the dimension of the target's rows
    remedy = (
        "a mean loss counts only targets that differ from ignore_index and whose class has a weight above 0; with "
        "label smoothing, the loss of a micro-batch is undefined if all its classes have weight 0; skip this batch, or "
        "use fewer micro-batches"
    )

    def __call__(self, target: Any) -> Any:
        ignored = self.option("ignore_index", _ABSENT)
        if not isinstance(target, Tensor) or target.is_floating_point() or ignored is _ABSENT:
            return self._rows(target)  # also for class probabilities, for which torch divides by the number of rows
        target = target.long()
        weight = self.option("weight", None)
        kept = target != (IGNORED if ignored is None else ignored)
        if weight is None:
            return kept.sum()
        weights = weight.detach().to(target.device)[target.masked_fill(~kept, 0)]
        total = weights.where(kept, 0).sum(dtype=torch.float64)
        if self.option("label_smoothing", 0):  # torch would divide the smoothed part of the loss by 0
            total = total.masked_fill((total == 0) & kept.any(), torch.nan)
        return total

    def _rows(self, target: Any) -> int:
        if not isinstance(target, Tensor):
            return 1  # torch's loss will raise an error
        place = self.dim - target.dim() if self.dim >= 0 else self.dim
        for name in ("weight", "pos_weight") if target.is_floating_point() else ():
            weight = self.option(name, None)
            if (
                isinstance(weight, Tensor)
                and weight.dim() >= -place
                and weight.shape[place]
                not in (
                    1,
                    target.shape[place],
                )
            ):
                raise InputError(
                    f"the weight of a loss must not have one element per row, because this weight is not split with "
                    f"the batch; {self.name} has a {name} of shape {list(weight.shape)}, and the targets of a "
                    f"micro-batch have shape {list(target.shape)}; pass the weights within target=, and multiply by "
                    f"them in loss_fn"
                )
        return target.numel()
