"""Loss rule: the reduction of a user's loss function, read from its first calls, and the factors that follow from it.

A loss of torch states its reduction in its options (`loss_reduction`). For any other loss, the first calls show it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isclose
from typing import Any

import torch
from torch import Tensor

from pipesched.capture.loss_reading import LossReader, Reduced, Unclear, Weight
from pipesched.capture.loss_reduction import joined_weights, weights_in_numbers
from pipesched.errors import InputError, PipeschedError
from pipesched.tensors.loss_factors import LossFactor, normalized
from pipesched.tensors.tensor_table import LayerValues

__all__ = ["LossRule"]

_PAGE = "docs/howto/loss-functions.md"
_ON_ONE_RANK = (
    "loss_fn runs once for each micro-batch, on the rank of the last stage; over a mesh, layers of other ranks and "
    f"their hooks do not run in this process; return what the loss needs from the model ({_PAGE})"
)
_CALLS = 16  # the number of calls that are read, in training and in evaluation
_Factors = Sequence[LossFactor] | Mapping[int, LossFactor]


@dataclass
class LossRule:
    """The rule by which the losses of micro-batches add up to the loss of the batch.

    Args:
        weighs: whether the rule gives the micro-batches their weights. False if the user stated the weights.
        rows_in_front: whether dim 0 of outputs and targets has the rows.
        elsewhere: describes the place of a tensor that another stage trains or changes; "" for all other tensors.
        copied: whether several stages compute the loss at the same time, over copies of the layers.

    """

    weighs: bool
    rows_in_front: bool
    elsewhere: Callable[[Tensor], str]
    copied: bool = False

    def __post_init__(self) -> None:
        self._left = {True: _CALLS, False: _CALLS}
        self._reading: Reduced | Unclear | None = None
        self._batch: Any = None
        self._factors: list[LossFactor] = []

    def loss(
        self, call: Callable[[], Tensor], output: Any, target: Any, values: LayerValues | None, own: LayerValues | None
    ) -> Tensor:
        """Call the loss function. ``values`` are those that layers made in this step, ``own`` those of this forward."""
        if not self._left[torch.is_grad_enabled()]:
            return call()
        self._left[torch.is_grad_enabled()] -= 1

        def check(tensor: Tensor) -> None:
            self._check(tensor, values, own)

        reader = LossReader(output, target, check, rows_in_front=self.rows_in_front)
        try:
            with reader:
                loss = call()
        except Exception as error:
            if not isinstance(error, PipeschedError):
                error.add_note(_ON_ONE_RANK)
            raise
        if self.weighs and isinstance(loss, Tensor):
            self._learn(reader.reading(loss))
        return loss

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Calls within the ``with`` block do not count towards the first calls."""
        left = dict(self._left)
        try:
            yield
        finally:
            self._left = left

    def factor(
        self,
        factor: LossFactor,
        microbatch: int,
        factors: _Factors,
        targets: Any,
        on_device: Callable[[Any], Any] = lambda target: target,
    ) -> LossFactor:
        """Return the factor of a micro-batch's loss.

        Args:
            factor: the factor by the number of rows.
            microbatch: the number of the micro-batch.
            factors: the factors of all micro-batches by the number of rows.
            targets: the targets of all micro-batches.
            on_device: brings a target to the device of the loss. Default: it is there.

        Raises:
            InputError: the loss is neither a mean nor a sum over rows, or its weights are unknown.

        """
        reading = self._reading
        if reading is None or (len(factors) == 1 and factor == 1):
            return factor
        if isinstance(reading, Unclear):
            raise _unclear(reading)
        if reading.reduction == "sum":
            return None
        if reading.weights <= {None}:
            return factor
        if self._batch is not targets:
            self._factors = _weighted_factors(reading.weights, factors, targets, on_device)
            self._batch = targets
        return self._factors[microbatch] if self._factors else factor

    def _learn(self, reading: Reduced | Unclear) -> None:
        known = self._reading
        unclear = isinstance(known, Unclear) and isinstance(reading, Unclear)
        if known is not None and reading != known and not unclear:
            raise InputError(
                f"loss_fn must reduce over rows in the same way in all micro-batches; it returned {_said(known)} and "
                f"{_said(reading)}; pass numerics=Numerics(loss_weight=...), see {_PAGE}"
            )
        self._reading = reading

    def _check(self, tensor: Tensor, values: LayerValues | None, own: LayerValues | None) -> None:
        remedy = (
            f"return the value from the model beside its output, or compute this term in the model with "
            f"pipesched.add_loss ({_PAGE})"
        )
        place = self.elsewhere(tensor)
        if place:
            raise InputError(
                f"loss_fn may use the output, the target, constants and weights of the last stage, because other "
                f"weights have older values where the loss is computed; it uses {place}; {remedy}"
            )
        if values is not None and tensor in values and (self.copied or own is None or tensor not in own):
            raise InputError(
                f"loss_fn may use the output, the target and constants, because layers run for other micro-batches in "
                f"the meantime; it uses a tensor of shape {list(tensor.shape)} that a layer or a hook has kept; "
                f"{remedy}"
            )


def _weighted_factors(
    weights: Collection[Weight], factors: _Factors, targets: Any, on_device: Callable[[Any], Any]
) -> list[LossFactor]:
    """Return the factor of each micro-batch's loss; an empty list for the factors by the number of rows."""
    counted = [weight for weight in weights if weight is not None]
    if isinstance(factors, Mapping) or not isclose(sum(one or 0 for one in factors), 1):
        if all(weight.counts_all(target) for weight in counted for target in _listed(targets)):
            return []
        raise InputError(
            f"with several replicas or several updates in a step, the weights of micro-batches must be known before "
            f"the step; loss_fn calls {counted[0].name}(), which ignores some labels or weights classes; pass that "
            f"loss itself as loss_fn=, or the number of its labels with numerics=Numerics(loss_weight=...), see {_PAGE}"
        )
    columns: list[list[LossFactor]] = [list(factors)] if None in weights else []
    here = [on_device(target) for target in targets]
    for weight in counted:
        found = joined_weights([weight(target) for target in here])
        if isinstance(found, Tensor) and len(weights) == 1:
            return normalized(found)
        numbers = weights_in_numbers(found)  # several terms are compared
        total = sum(numbers)
        if not 0 < total < inf:
            raise InputError(
                f"the sum of the loss weights must be finite and above 0; got {total}; {weight.name}() in loss_fn "
                f"counts no label of this batch; skip this batch"
            )
        columns.append([number / total for number in numbers])
    for column in columns[1:]:
        if not all(isclose(one or 0, other or 0) for one, other in zip(columns[0], column, strict=True)):
            raise InputError(
                f"the terms of a loss must weight the micro-batches alike; loss_fn adds means with the weights "
                f"{columns[0]} and {column}; pass one of the terms as loss_fn= and the other with pipesched.add_loss, "
                f"or state the weights with numerics=Numerics(loss_weight=...), see {_PAGE}"
            )
    return columns[0]


def _listed(targets: Any) -> list[Any]:
    return list(targets.values()) if isinstance(targets, Mapping) else list(targets)


def _unclear(reading: Unclear) -> InputError:
    return InputError(
        f"loss_fn must return a mean or a sum over the rows of a micro-batch, because the losses of micro-batches are "
        f"added; its result comes from {reading.maker}, from which the weight of a micro-batch does not follow; pass "
        f"numerics=Numerics(loss_reduction='sum') if it is a sum over rows, loss_reduction='mean' if it is a mean over "
        f"rows, or loss_weight=..., a function that returns the number by which it divides ({_PAGE}); then "
        f"pipe.check(...) shows whether the gradients are those of the whole batch"
    )


def _said(reading: Reduced | Unclear) -> str:
    return f"the result of {reading.maker}" if isinstance(reading, Unclear) else f"a {reading.reduction}"
