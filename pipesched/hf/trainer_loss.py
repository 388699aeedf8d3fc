"""Trainer loss: the loss of a micro-batch by Trainer's own rule, so that the losses of a step add up to Trainer's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from pipesched.capture.label_counts import SUM, UnknownMeanError, counts, known_labels
from pipesched.errors import InputError
from pipesched.hf.batches import cut, rows_in
from pipesched.model.state_guard import untouched
from pipesched.runtime.microbatches import Microbatch
from pipesched.tensors.meta_tensors import lacks_contents

__all__ = ["StepLossRule", "TrainerLoss"]

_COUNT = "num_items_in_batch"


@dataclass(frozen=True, kw_only=True)
class TrainerLoss:
    """The ``loss_fn`` of a trainer's pipeline: the model's own loss, that of a label smoother, or of a user's function.

    Args:
        smoother: Trainer's label smoother. Default: None.
        shifts: whether the smoother compares each label with the output of the place before it.
        function: the ``compute_loss_func`` of the Trainer. Default: None.

    """

    smoother: LabelSmoother | None = None
    shifts: bool = False
    function: Callable[..., Any] | None = None

    @property
    def takes_labels(self) -> bool:
        """Whether the loss takes the labels, so that the model does not."""
        return self.smoother is not None or self.function is not None

    def __call__(self, outputs: Any, target: Mapping[str, Any]) -> Any:
        """Return the part of a micro-batch in the loss of its step. The mean of no labels, which is NaN, counts 0."""
        loss, share = self._loss(outputs, target), target["share"]
        return loss * share if share else loss.nan_to_num(0.0) * 0

    def _loss(self, outputs: Any, target: Mapping[str, Any]) -> Any:
        labels, count = target.get("labels"), target.get(_COUNT)
        if self.function is not None:
            loss = self.function(outputs, labels, num_items_in_batch=count)
            if target["is_part"]:
                _check_adds(self.function, loss.detach(), outputs, labels, count)
            return loss
        if self.smoother is not None and labels is not None:
            return self.smoother(outputs, labels, shift_labels=self.shifts, num_items_in_batch=count)
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]

    def active_labels(self, labels: Tensor) -> int:
        """Return the number of labels over which the smoother averages."""
        own = labels[..., 1:] if self.shifts else labels
        return int((own != self.smoother.ignore_index).sum()) if self.smoother else own.numel()


@dataclass(frozen=True, kw_only=True)
class StepLossRule:
    """Splits the batches of a training step into micro-batches, each with its share of the step's loss.

    A loss that divides by ``num_items_in_batch``, the number of labels of the whole step, adds up. A mean counts by its
    share of the labels of its batch; Trainer adds the means of the batches, and divides by their number unless the
    model takes ``num_items_in_batch``. A loss that is neither a sum nor a mean needs whole batches.
    """

    loss: TrainerLoss
    #: Whether the model takes ``num_items_in_batch``.
    takes_count: bool
    #: Whether the losses of a batch's parts add up, as those that divide by ``num_items_in_batch`` do.
    adds: bool
    #: The number of labels over which the model's own loss is a mean; None for the number of rows.
    weight: Callable[..., Any] | None
    #: Why it could not be determined over which labels the model's own loss is a mean.
    unknown: str = ""

    @classmethod
    def of(cls, model: nn.Module, loss: TrainerLoss, sample: dict[str, Any], *, takes_count: bool) -> "StepLossRule":
        """Find the rule of a model's loss.

        Args:
            model: the model.
            loss: the loss function.
            sample: the inputs of some rows, with ``num_items_in_batch`` if Trainer passes it to the model.
            takes_count: whether the model takes ``num_items_in_batch``.

        """
        if loss.takes_labels:
            return cls(loss=loss, takes_count=takes_count, adds=takes_count or loss.function is not None, weight=None)
        try:
            way = known_labels(model, ((), sample))
        except UnknownMeanError as unknown:
            return cls(loss=loss, takes_count=takes_count, adds=False, weight=None, unknown=str(unknown))
        return cls(loss=loss, takes_count=takes_count, adds=way == SUM, weight=counts(model, way))

    def microbatches(
        self, batches: Sequence[dict[str, Any]], parts: int, count: Any, factor: float
    ) -> list[Microbatch]:
        """Split batches of the data loader into micro-batches.

        Args:
            batches: the batches of a step.
            parts: the number of micro-batches of each batch, if it has as many rows.
            count: Trainer's ``num_items_in_batch``, or None.
            factor: the factor of the loss.

        """
        made = []
        for batch in batches:
            pieces = cut(batch, parts)
            is_whole = len(pieces) == 1
            adds = self.adds and (count is not None or not self.loss.takes_labels)
            shares = [1.0] * len(pieces) if is_whole or adds else self._shares(pieces)
            for piece, share in zip(pieces, shares, strict=True):
                made.append(self._microbatch(piece, factor * share, count, is_part=not is_whole))
        return made

    def splits(self, model: nn.Module, batch: dict[str, Any], count: Any) -> bool:
        """Return whether the losses of the halves of some rows give their loss. True if the model cannot run here.

        A user's function is checked in each step instead.
        """
        if self.loss.function is not None or lacks_contents(model):
            return True
        rows = cut(batch, max(1, rows_in(batch) // 4))[0]
        with untouched(model, False), torch.no_grad():
            try:
                whole, halves = (self._total(model, rows, parts, count) for parts in (1, 2))
            except Exception:  # such as a layer that runs on GPUs only
                return True
        return not math.isfinite(whole) or math.isclose(whole, halves, rel_tol=_tolerance(model), abs_tol=1e-6)

    def _total(self, model: nn.Module, batch: dict[str, Any], parts: int, count: Any) -> float:
        pieces = self.microbatches([batch], parts, count, 1.0)
        return sum(float(self.loss(model(**piece.kwargs), piece.target)) for piece in pieces)

    def _shares(self, pieces: Sequence[dict[str, Any]]) -> list[float]:
        """Return the shares of a batch's parts in its mean. If the labels are on a GPU, the host waits for them."""
        weights = [self._weight(piece) for piece in pieces]
        total = sum(weights)
        return [weight / total if total else 1 / len(weights) for weight in weights]

    def _microbatch(self, inputs: dict[str, Any], share: float, count: Any, *, is_part: bool) -> Microbatch:
        target: dict[str, Any] = {"share": share, "is_part": is_part}
        if self.loss.takes_labels:
            target["labels"] = inputs.pop("labels", None)
            target[_COUNT] = count
        if self.takes_count and count is not None:
            inputs[_COUNT] = count
        made = Microbatch(target=target)
        made.kwargs = inputs  # one of them may be named target
        return made

    def _weight(self, inputs: dict[str, Any]) -> float:
        if self.loss.takes_labels and isinstance(inputs.get("labels"), Tensor):
            return self.loss.active_labels(inputs["labels"])
        return float(self.weight(**inputs) if self.weight else rows_in(inputs))


def _tolerance(model: nn.Module) -> float:
    """Return the relative difference of two equal losses that rounding can cause."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return max([1e-5, *(4 * torch.finfo(kind).eps for kind in kinds)])


def _check_adds(function: Callable[..., Any], loss: Tensor, outputs: Any, labels: Any, count: Any) -> None:
    """Raise InputError if a user's function does not divide by ``num_items_in_batch``."""
    with torch.no_grad():
        other = loss if count is None else function(outputs, labels, num_items_in_batch=2 * count)
    if not torch.allclose(2 * other, loss, rtol=1e-3):
        raise InputError(
            f"compute_loss_func must divide the sum of its losses by num_items_in_batch, if a batch is split into "
            f"micro-batches; it returned {loss:.4g} for num_items_in_batch={count}, and {other:.4g} for twice as many; "
            f"divide by num_items_in_batch, or pass pipeline_microbatches=gradient_accumulation_steps, which splits no "
            f"batch"
        )
