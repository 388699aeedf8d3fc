"""Cross entropy of logits that are divided by the vocabulary, or by rows."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from pipesched.errors import InputError
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.collective_functions import gather_from, reduce_from
from pipesched.parallel.embedding import own_places
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.tensors.torch_functions import LOSSES

__all__ = ["VocabularyCrossEntropy", "cross_entropy_of_rows", "vocabulary_cross_entropy"]


class VocabularyCrossEntropy(nn.CrossEntropyLoss):
    """``nn.CrossEntropyLoss`` of logits that a layer with style "column" or "vocabulary" divides by the vocabulary.

    Without a tensor group, it is ``nn.CrossEntropyLoss``. The ranks never gather the logits: for N rows, each of P
    ranks sends 6 (P - 1)/P N numbers in a forward (the largest logits, the sums of exponentials and the logits of the
    targets; 8 (P - 1)/P N with label smoothing), and none in a backward.

    Args:
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: the part of each target that is spread over all classes.

    """

    def __init__(self, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0) -> None:
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self._tensor_group: TensorGroup | None = None

    def divide(self, group: TensorGroup) -> None:
        """Take logits that the ranks of ``group`` divide."""
        self._tensor_group = group

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss. ``input`` has the classes in dim 1, or in dim 0 without rows; each rank holds its part."""
        if self._tensor_group is None:
            return super().forward(input, target)
        return vocabulary_cross_entropy(
            input,
            target,
            self._tensor_group,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class _OfVocabulary(torch.autograd.Function):
    """The losses of rows: (rows, own classes), (rows) -> (rows)."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        own = logits.shape[1]
        places, outside = own_places(target, own, group)
        shifted = logits - group.max(logits.amax(1)).unsqueeze(1)
        of_target = shifted.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(outside, 0)
        exponentials = shifted.exp()
        parts = [exponentials.sum(1), of_target]
        if smoothing:
            parts.append(shifted.sum(1))
        sums = group.all_reduce(torch.stack(parts))
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(1)), places, outside)
        ctx.smoothing = smoothing
        ctx.num_classes = own * group.size
        wanted = sums[1]
        if smoothing:
            wanted = (1 - smoothing) * wanted + smoothing / ctx.num_classes * sums[2]
        return sums[0].log() - wanted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        probabilities, places, outside = ctx.saved_tensors
        grad = probabilities - ctx.smoothing / ctx.num_classes if ctx.smoothing else probabilities.clone()
        share = torch.full_like(grads[0], ctx.smoothing - 1).masked_fill(outside, 0)
        grad.scatter_add_(1, places.unsqueeze(1), share.unsqueeze(1))
        return None, grad.mul_(grads[0].unsqueeze(1)), None, None


def vocabulary_cross_entropy(
    input: Tensor,
    target: Tensor,
    group: TensorGroup,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits whose classes are divided among the ranks.

    Args:
        input: this rank's logits, with the classes in dim 1, or in dim 0 if there are no rows.
        target: the classes of all rows, equal on all ranks.
        group: the tensor group.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: the part of each target that is spread over all classes.

    Raises:
        InputError: the targets are probabilities.

    """
    if has_torch_function((input, target)):  # pipesched reads from the call how the loss weighs micro-batches
        passed: Tensor = handle_torch_function(
            vocabulary_cross_entropy,
            (input, target),
            input,
            target,
            group,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return passed
    if target.is_floating_point():
        raise InputError(
            f"targets of a loss over a divided vocabulary must be class numbers; got {target.dtype} of shape "
            f"{list(target.shape)}; gather the logits (style 'column-gathered') for targets that are probabilities"
        )
    if group.trace is not None:
        group.trace.expect_logits(input)
    grid = group.grid
    if isinstance(grid, AxisGroups):
        return _of_blocks(input, target, grid, ignore_index, reduction, label_smoothing)
    single = input.dim() == 1
    logits = input.unsqueeze(0) if single else input.movedim(1, -1).flatten(0, -2)
    if torch.is_autocast_enabled(logits.device.type) or logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    numbers = target.reshape(-1)
    counted = numbers != ignore_index
    rows = torch.where(counted, numbers, 0)
    losses = _OfVocabulary.apply(group, logits, rows, label_smoothing)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(~counted, 0)
    if reduction == "none":
        result: Tensor = losses.view(target.shape)
    else:
        result = losses.sum() if reduction == "sum" else losses.sum() / counted.sum()
    return group.returns(_as_torch_returns(result, input), ActivationLayout.WHOLE)


LOSSES.add(vocabulary_cross_entropy)


def _as_torch_returns(result: Tensor, logits: Tensor) -> Tensor:
    """Return a loss in the dtype of the logits. A sum over many rows would be too large for it before the division."""
    return result if torch.is_autocast_enabled(logits.device.type) else result.to(logits.dtype)


def _of_blocks(
    input: Tensor, target: Tensor, grid: AxisGroups, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """Return the cross entropy of this rank's rows and classes of logits, with the targets of all rows."""
    inner = grid.blocks(ActivationLayout.INNER)
    rows = grid.over(inner.rows)
    own = vocabulary_cross_entropy(
        input.float() if input.dtype in (torch.float16, torch.bfloat16) else input,
        rows.own(target, 0),
        grid.over(inner.columns),
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        result = gather_from(own, rows, 0)
    else:
        total = reduce_from(own, rows)
        result = total if reduction == "sum" else total / (target != ignore_index).sum()
    return grid.group.returns(_as_torch_returns(result, input), ActivationLayout.WHOLE)


def cross_entropy_of_rows(
    input: Tensor, target: Tensor, group: TensorGroup, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross entropy over the rows of all ranks. Each rank has its own rows.

    The mean counts the rows of all ranks: the ranks may have different numbers of rows with ``ignore_index``. Each rank
    gets the gradient of its own rows.

    Args:
        input: the logits of this rank's rows, with all classes in dim 1.
        target: the classes of this rank's rows.
        group: the tensor group.
        ignore_index: the target of rows that do not count.
        label_smoothing: the part of each target that is spread over all classes.

    """
    total = nn.functional.cross_entropy(
        input, target, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    count = group.all_reduce((target != ignore_index).sum())
    return reduce_from(total, group) / count
