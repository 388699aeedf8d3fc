"""Gradient clipping: clips the gradients of all ranks by their total norm, before the optimizer's step."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipesched.checks import shown
from pipesched.errors import ExecutionError, InputError
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.plane_norms import NormMeasure
from pipesched.tensors.caller_context import intra_op
from pipesched.tensors.gradient_norm import as_max_norm, as_norm_type, clip_to_norm_

__all__ = ["clip_gradients"]


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    gathered: Callable[[Any], list[Any]],
    measure: NormMeasure,
    *,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    intra_op_threads: int,
    has_optimizers: bool,
) -> Tensor:
    """Clip the gradients of all ranks by their total norm. Collective.

    Args:
        parameters: the parameters that this process trains.
        gathered: gathers a value from each process, and returns the values in rank order.
        measure: computes the norms of the parameters' gradients.
        max_norm: the largest allowed norm of all gradients together; if it is exceeded, all gradients are scaled down.
        norm_type: the order of the norm.
        error_if_nonfinite: whether to raise if the norm is infinite or NaN.
        intra_op_threads: the number of CPU threads that compute norms.
        has_optimizers: whether step() updates the weights and clears the gradients.

    Returns:
        The norm before clipping.

    Raises:
        InputError: an argument is invalid or differs between ranks, or step() has already used the gradients.
        ExecutionError: the norm is infinite or NaN, and ``error_if_nonfinite`` is set.

    """
    as_max_norm(max_norm, "max_norm")
    norm_type = as_norm_type(norm_type)
    asked = float(max_norm), norm_type, bool(error_if_nonfinite)
    with intra_op(intra_op_threads):
        parts = gathered((asked, measure.of(parameters, norm_type)))
        _check_same([asked for asked, _ in parts])
        norms = GradientNorms.merged([norms for _, norms in parts])
        if has_optimizers and norms.norms is None:
            raise InputError(
                f"clip_grad_norm_() must be called before an optimizer uses the gradients; with optimizer=, step() "
                f"has already used and cleared all gradients; pass numerics=Numerics(clip_grad_norm="
                f"{max_norm}) to Pipeline instead"
            )
        norm = norms.total(norm_type)
        if error_if_nonfinite and (first := norms.first_nonfinite()) is not None:
            raise ExecutionError(
                f"gradients must be finite to be clipped; the norm of all gradients is {float(norm)}, and "
                f"{measure.name(first)!r} is the first parameter whose gradient norm is not finite; skip this update, "
                f"or pass error_if_nonfinite=False"
            )
        clip_to_norm_(parameters, max_norm, norm)
    return norm


def _check_same(asked: Sequence[tuple[float, float, bool]]) -> None:
    others = [rank for rank, one in enumerate(asked) if one != asked[0]]
    if others:
        raise InputError(
            f"all ranks must pass the same max_norm, norm_type and error_if_nonfinite to clip_grad_norm_; rank 0 of "
            f"{len(asked)} passed {shown(asked[0])}, rank {others[0]} passed {shown(asked[others[0]])}; pass the same "
            f"values on every rank"
        )
