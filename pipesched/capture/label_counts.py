"""Label counts: finds how a model reduces its own loss over rows or labels, to weight the losses of micro-batches.

Micro-batches have different numbers of labels that are not padding, so their mean losses need different weights. The
model's code determines these labels. For example, a language model that shifts its labels drops the first label of each
row. A probe computes the loss of four rows, and the losses of the first two and of the last two rows. Usually, these
three losses are consistent with only one counting method. They also show whether the loss is a sum.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.capture.stage_body import loss_entry
from pipesched.model.containers import Shells, find_layers
from pipesched.model.state_guard import unchanged, untouched
from pipesched.tensors.meta_tensors import call_beside, lacks_contents, stand_in
from pipesched.tensors.payload import pytree
from pipesched.tensors.row_count import rows_of_batch
from pipesched.tensors.row_split import RowSplit
from pipesched.tensors.rows import Argument, Dim
from pipesched.tensors.tree_structure import positional
from pipesched.user_warning import warn

__all__ = ["IGNORED", "SUM", "UnknownMeanError", "counted_labels", "counts", "known_labels", "labels_in"]

#: The label that torch's losses ignore.
IGNORED = -100
#: The result of ``counted_labels`` for a loss that is a sum.
SUM = "sum"
_NAME = "labels"
_MASK = "attention_mask"
_ATTEMPTS = 8
_CONFIRMED = 3  # more attempts if the model may add a loss of other labels, which can be almost equal for all rows
_ROUNDING = 32  # tolerated difference of two losses, in units of the last place


class UnknownMeanError(Exception):
    """The labels over which a model averages its own loss could not be determined; the text says why."""


def counts(model: nn.Module, way: str | None) -> Callable[..., Any] | None:
    """Return a function that maps a micro-batch's inputs to the weight of its loss.

    ``way`` is a result of ``counted_labels``. Returns None if ``way`` is None, because the weight is then the number of
    rows, or if ``way`` is `SUM`.
    """
    if way is None or way == SUM:
        return None
    count = _WAYS[way]

    def loss_weight(*args: Any, **kwargs: Any) -> float:
        named = _named(model, args, kwargs)
        return count(named[_NAME], named.get(_MASK))

    return loss_weight


def counted_labels(model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    """Return the result of ``known_labels``; if there is none, issue a warning and return None."""
    try:
        return known_labels(model, sample)
    except UnknownMeanError as unknown:
        warn(
            f"each micro-batch must be weighted by the number of labels over which the model averages its own loss; "
            f"this number could not be determined: {unknown}; each micro-batch is weighted by its number of rows "
            f"instead; pass Numerics(loss_weight=...), or loss_reduction='sum' if the loss is a sum; if the loss is a "
            f"mean over rows, ignore this warning; pipe.check(...) compares the gradients with those of the whole batch"
        )
        return None


def known_labels(model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    """Find the labels over which a model averages its own loss; None if the model averages over rows.

    The model runs up to three times in evaluation mode. It runs again with other labels if several counting methods
    fit, or if it may add a loss of other labels. It is left unchanged. A model on the meta device runs with stand-ins
    for its layers' outputs.

    Args:
        model: the user's module.
        sample: the arguments (args, kwargs) of a forward.

    Returns:
        The name of the counting method, to pass to ``counts``; None to count rows; `SUM` if the loss is a sum.

    Raises:
        UnknownMeanError: there are labels, and none of the counting methods fits or several do.

    """
    given = _labels_of(model, sample)
    with untouched(model, False), torch.no_grad():
        if given is None:
            return SUM if _adds_rows(model, sample) else None
        return _counted(model, sample, given)


def _counted(model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], given: Tensor) -> str | None:
    """Return the result of ``counted_labels`` for a model that takes these labels."""
    fitting = list(_WAYS)
    is_sum = True
    has_others = any(_is_class(value, given) for name, value in _named(model, *sample).items() if name != _NAME)
    for attempt in range(_ATTEMPTS):
        try:
            inputs = _probe(model, sample, given.roll(attempt, -1), attempt)
            losses = _losses(model, *inputs) if _may_try(model, given) else None
        except Exception as error:  # any error of a model that does not accept such labels
            raise UnknownMeanError(
                f"the model failed on four rows in which some labels are {IGNORED}: {type(error).__name__}: {error}"
            ) from error
        if losses is None:
            raise UnknownMeanError(
                f"the model returns no scalar loss, or it is not on a CPU and no label of the sample is {IGNORED}"
            )
        parts = [_named(model, *part) for part in inputs[1:]]
        weights = {way: [_WAYS[way](part[_NAME], part.get(_MASK)) for part in parts] for way in fitting}
        fitting = [way for way, counted in weights.items() if _fits(counted, losses)]
        is_sum &= _is_sum(losses)
        if len(fitting) < 2 and attempt >= (_CONFIRMED if fitting and has_others else 0):
            break
    if given.dim() == 1 and "labels" in fitting:
        return "labels"  # one label per row: the same number as rows unless some labels are ignored
    if len(fitting) != 1:
        if is_sum and not fitting:
            return SUM
        answer = "could be the mean over more than one" if fitting else "is not the mean over any"
        raise UnknownMeanError(f"the model's loss {answer} of these: {', '.join(fitting or _WAYS)}")
    return None if fitting[0] == "rows" else fitting[0]


def _count(labels: Tensor, mask: Tensor | None) -> float:
    return float((labels != IGNORED).sum())


def _count_shifted(labels: Tensor, mask: Tensor | None) -> float:
    return _count(labels[..., 1:], mask) if labels.dim() > 1 else _NEVER  # not applicable with one label per row


def _count_seen(labels: Tensor, mask: Tensor | None) -> float:
    """Count the labels that the mask does not hide."""
    if mask is None or not _is_mask_of(labels, mask):
        return _NEVER
    return _count(torch.where(mask.to(labels.device) == 0, IGNORED, labels), None)


def _is_mask_of(labels: Tensor, mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.shape == labels.shape and labels.dim() > 1


#: The probe's four rows, the first two, and the last two.
_PARTS = [slice(0, 4), slice(0, 2), slice(2, 4)]
_NEVER = -1.0  # the weight of a way that does not apply
#: Each way takes a micro-batch's labels and its attention mask.
_WAYS: Mapping[str, Callable[[Tensor, Tensor | None], float]] = {
    "rows": lambda labels, mask: float(len(labels)),
    "labels": _count,
    "labels except the first in each row": _count_shifted,
    "labels that attention_mask does not hide": _count_seen,
}


def _labels_of(model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor | None:
    labels = _labels_in(model, *sample)
    whole = isinstance(labels, Tensor) and labels.dim() > 0 and labels.numel() and not labels.is_floating_point()
    return labels if whole and labels.dtype is not torch.bool else None


def _labels_in(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _named(model, args, kwargs).get(_NAME)


def labels_in(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument that holds the labels of a model that computes its own loss; None if there is none."""
    named = _named(model, args, kwargs)
    return next((named[name] for name in (_NAME, "targets", "target") if named.get(name) is not None), None)


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(positional(model.forward), args, strict=False)), **kwargs}


def _marked(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels of the probe's first two rows and of its last two rows. The last two ignore more labels."""
    rows = labels[_four(len(labels))]
    valid = rows[rows != IGNORED]
    rows = torch.where(rows == IGNORED, valid[0] if len(valid) else 0, rows)
    if rows.dim() == 1:
        rows[3] = IGNORED
    else:
        rows[:2, ..., 2:-1] = IGNORED
        rows[2:, ..., :-1] = IGNORED
    return rows[:2], rows[2:]


def _probe(
    model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]], labels: Tensor, attempt: int = 0
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return three inputs (args, kwargs) of the model: the probe's four rows, the first two, and the last two."""
    marked = torch.cat(_marked(labels))
    mask = _named(model, *sample).get(_MASK)
    masks = _masks(mask) if isinstance(mask, Tensor) and _is_mask_of(labels, mask) else None
    given = _arguments(sample)
    has = rows_of_batch(given)

    def rows(chosen: slice) -> Any:
        picked = _picked(given, has, chosen)
        if has == 1 or attempt:
            roll = partial(_rolled, labels=marked[chosen], chosen=chosen, by=attempt + 1)
            picked = pytree.tree_map_only(Tensor, roll, picked)
        for place, argument in enumerate(given):
            if _is_class(argument.value, labels):
                ends = argument.value.aminmax()
                picked[place] = torch.stack([ends.min, ends.min, ends.max, ends.max])[chosen]
        args, kwargs = _replaced(model, *_call(picked, sample), _NAME, marked[chosen])
        return (args, kwargs) if masks is None else _replaced(model, args, kwargs, _MASK, masks[chosen])

    return [rows(chosen) for chosen in _PARTS]


def _arguments(sample: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Argument]:
    return [Argument(name, value, Dim()) for name, value in (*enumerate(sample[0]), *sample[1].items())]


def _picked(given: list[Argument], has: int, chosen: slice) -> list[Any]:
    """Return the arguments with only these of the probe's four rows. ``has`` is the number of rows in the arguments."""
    split = RowSplit.choosing(has, [_four(has)[chosen]])
    return [split.parts(argument)[0] for argument in given]


def _call(picked: list[Any], sample: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call with these arguments instead of the sample's."""
    count = len(sample[0])
    return tuple(picked[:count]), dict(zip(sample[1], picked[count:], strict=True))


def _four(count: int) -> list[int]:
    """Return which of ``count`` rows are the probe's four rows. The first two differ from the last two, if possible."""
    return [row * min(count, 4) // 4 for row in range(4)]


def _is_class(value: Any, labels: Tensor) -> bool:
    """Return whether a value may hold one label per row, in addition to ``labels``."""
    whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
    return whole and value.dim() == 1 and 0 < len(value) == len(labels) and labels.dim() > 1


def _rolled(rows: Tensor, labels: Tensor, chosen: slice, by: int) -> Tensor:
    """Roll the probe's last two rows of text; return any other tensor unchanged."""
    if rows.shape != labels.shape or rows.dim() < 2 or rows.is_floating_point():
        return rows
    return torch.stack([row.roll(number // 2 * by) for number, row in zip(range(4)[chosen], rows, strict=True)])


def _masks(mask: Tensor) -> Tensor:
    """Return the masks of the probe's four rows. Only the last one hides a place, the last in the row."""
    masks = torch.ones_like(mask[_four(len(mask))])
    masks[3, -1] = 0
    return masks


def _replaced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> Any:
    """Replace an argument by its name, because the same tensor may also be another argument."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    place = [*inspect.signature(model.forward).parameters].index(name)
    return (*args[:place], value, *args[place + 1 :]), kwargs


def _losses(model: nn.Module, *inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor] | None:
    losses = []
    run = _Outline(model) if lacks_contents(model) else model
    for args, kwargs in inputs:
        output = run(*args, **kwargs)
        loss = loss_entry(output)
        if not isinstance(loss, Tensor) or loss.dim():
            return None
        losses.append(loss)
    return losses


def _adds_rows(model: nn.Module, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Return whether the loss of a model without labels is the sum of the losses of its rows."""
    try:
        given = _arguments(sample)
        has = rows_of_batch(given)
        losses = _losses(model, *[_call(_picked(given, has, chosen), sample) for chosen in _PARTS])
    except Exception:  # any error of a model that does not accept other numbers of rows
        return False
    if losses is None or not losses[0].is_floating_point():
        return False
    return _is_sum(losses) and not _fits([1, 1], losses)


def _may_try(model: nn.Module, labels: Tensor) -> bool:
    """Return whether it is safe to run a model with labels that are `IGNORED`.

    On a GPU, a label that the model does not accept breaks the CUDA context. Labels that are already in the sample are
    safe.
    """
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return devices <= {"cpu", "meta"} or bool((labels == IGNORED).any())


def _fits(weights: list[float], losses: list[Tensor]) -> bool:
    """Return whether the first loss is the mean of the other two losses, weighted by ``weights``."""
    if min(weights) < 0:
        return False
    parts = [float(loss) for loss in losses[1:]]
    mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    return _equals_whole(mean, losses)


def _is_sum(losses: list[Tensor]) -> bool:
    """Return whether the first loss is the sum of the other two losses."""
    return _equals_whole(sum(float(loss) for loss in losses[1:]), losses)


def _equals_whole(value: float, losses: list[Tensor]) -> bool:
    """Return whether the first loss is this value, within rounding."""
    rounding = _ROUNDING * torch.finfo(losses[0].dtype).eps * max(abs(float(loss)) for loss in losses)
    return abs(float(losses[0]) - value) <= rounding


class _Outline(TorchFunctionMode):
    """Runs the model with stand-ins for the layers' outputs.

    All rows of a stand-in are identical, so the loss of a batch is the mean of the losses of its rows.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        layers = find_layers(model)
        self._root = Shells(model, layers, self._layer, layers).model
        self._inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self._root(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: stand_in(tensor, weight=True), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return layer(*args, **kwargs)
        self._inside = True
        try:
            before = unchanged((args, kwargs))
            result = call_beside(layer, args, kwargs, lambda: before)
            return pytree.tree_map_only(Tensor, stand_in, result)
        finally:
            self._inside = False
