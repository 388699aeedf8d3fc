"""Gradient clipping for training loops without a pipeline. The results are bit-identical to a pipeline's results."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipesched.runtime.gradients.shards import row_cuts
from pipesched.tensors.caller_context import intra_op
from pipesched.tensors.gradient_norm import (
    as_max_norm,
    as_norm_type,
    clip_to_norm_,
    combined_norms,
    norm_of,
    total_norm,
)
from pipesched.torch_checks import as_threads

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    intra_op_threads: int = 1,
    num_shards: int = 1,
) -> Tensor:
    """Clip the gradients of a model that runs without a pipeline, bit-identically to ``Pipeline.clip_grad_norm_``.

    ::

        loss = pipesched.testing.reference_step(model, x, loss_fn=loss_fn, target=y, num_microbatches=4)
        norm = pipesched.testing.clip_grad_norm_(model.parameters(), 1.0)

    The norm of each gradient is computed in float32 (float64 for a float64 gradient); the total norm is the norm of
    these norms. For float32 gradients on one device, the result is bit-identical to the result of
    ``torch.nn.utils.clip_grad_norm_``. For bfloat16 gradients the results differ, because torch rounds each norm to
    bfloat16.

    Args:
        parameters: the model's parameters, in the order of ``model.parameters()``.
        max_norm: the maximum total norm; must be above 0. If the total norm is larger, all gradients are scaled down.
        norm_type: the order of the norm, above 0; ``math.inf`` for the largest absolute value. Default: 2.
        intra_op_threads: the number of CPU threads per operation. Default: 1.
        num_shards: the number of replicas across which ``Distributed`` splits gradients, with ``zero=2`` or 3. The norm
            of a gradient is then combined from the norms of each replica's rows. Default: 1 (gradients are not split).

    Returns:
        The total norm before clipping, a 0-d tensor.

    Raises:
        InputError: an argument is invalid.

    """
    as_max_norm(max_norm, "max_norm")
    norm_type = as_norm_type(norm_type)
    own = list(parameters)
    with intra_op(as_threads(intra_op_threads)):
        grads = [parameter.grad for parameter in own if parameter.grad is not None]
        norms = [_norm(grad, norm_type, num_shards) for grad in grads]
        norm = total_norm(norms, norm_type)
        clip_to_norm_(own, max_norm, norm)
    return norm


def _norm(grad: Tensor, norm_type: float, num_shards: int) -> Tensor:
    """Return the norm of a gradient. With several shards, the norms of the gradient's shards are combined."""
    cuts = row_cuts(grad.shape, num_shards) if num_shards > 1 else None
    if cuts is None:
        return norm_of(grad, norm_type)
    shards = [grad[start:end] for start, end in cuts]
    pieces = torch.stack([norm_of(shard, norm_type).double() for shard in shards])
    return combined_norms(pieces[:, None], norm_type, [grad.dtype])[0]
