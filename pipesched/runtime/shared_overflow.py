"""Shared overflow: makes the gradient scalers of all processes react to an overflow in any process."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from pipesched.errors import InputError
from pipesched.runtime.collectives import RankCollectives
from pipesched.tensors.caller_context import intra_op
from pipesched.tensors.gradient_norm import norm_of, total_norm

__all__ = ["share_overflow"]


@torch.no_grad()
def share_overflow(parameters: Sequence[nn.Parameter], collectives: RankCollectives, intra_op_threads: int) -> None:
    """If any gradient in any process is infinite or NaN, make all gradients infinite or NaN. Collective.

    Each GradScaler checks only the gradients of one optimizer in its own process. If all gradients are infinite or NaN,
    all scalers skip the update.

    Args:
        parameters: the parameters of this process's stages.
        collectives: exchange values between the processes.
        intra_op_threads: the number of CPU threads that read the gradients.

    Raises:
        InputError: a process has no gradients, so its GradScaler.step() would fail. All processes raise this error.

    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None and parameter.grad.numel()]
    with intra_op(intra_op_threads):
        finite = bool(total_norm([norm_of(grad, math.inf) for grad in grads], math.inf).isfinite())
    planes = collectives.gather_over_planes(collectives.gathered((len(grads), finite)))
    known = [one for plane in planes for one in plane]
    idle = [rank for rank, (count, _) in enumerate(known) if not count]
    if idle:
        raise InputError(
            f"with scaler= and your own optimizers, every rank needs a gradient, because GradScaler.step() fails "
            f"without one; rank {idle[0]} of {len(known)} has no gradient; pass optimizer=, or use fewer ranks"
        )
    if not all(finite for _, finite in known):
        for grad in grads:
            grad.mul_(math.inf)  # 0 becomes NaN
