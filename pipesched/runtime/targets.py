"""Targets: checks that a batch has a target if, and only if, there is a loss function."""

from typing import Any

from pipesched.errors import InputError
from pipesched.runtime.microbatches import Batch

__all__ = ["check_given_targets", "check_target"]


def check_target(target: Any, *, has_loss_fn: bool, call: str, without: str) -> None:
    """Raise InputError if a batch lacks a target, or has one that nothing uses.

    Args:
        target: the target of the whole batch; None if none was passed.
        has_loss_fn: whether there is a loss function.
        call: a call with a target, for the error message, such as "step(x, target=x)".
        without: what to do for a batch without a target, for the error message.

    """
    if has_loss_fn and target is None:
        raise InputError(
            f"loss_fn(output, target) needs a target; none was passed; pass target=, or {without}; for a loss of the "
            f"output alone, return the loss from the model and leave loss_fn= out, or call {call}"
        )
    if not has_loss_fn and target is not None:
        raise InputError(
            "a target may only be passed to a pipeline with a loss_fn; this pipeline has none, and its model computes "
            "its own loss; pass loss_fn= to Pipeline, or leave target= out"
        )


def check_given_targets(batch: Batch, *, has_loss_fn: bool) -> None:
    """Raise InputError if micro-batches that the caller passed lack targets, or have targets that nothing uses."""
    if has_loss_fn != bool(batch.targets):
        raise InputError(
            "every micro-batch must have a target if the pipeline has a loss_fn; this pipeline has a loss_fn, but the "
            "micro-batches have no targets; pass Microbatch(..., target=...)"
            if has_loss_fn
            else "micro-batches may have targets only if the pipeline has a loss_fn; this pipeline has no loss_fn, but "
            "the micro-batches have targets; pass loss_fn= to Pipeline, or leave target= out of Microbatch(...)"
        )
