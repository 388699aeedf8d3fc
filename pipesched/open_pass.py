"""Open pass: a forward through the pipeline whose backward the caller starts, by differentiating the output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesched.batch import Batch
from pipesched.errors import ExecutionError
from pipesched.payload import Gradients, gather, pytree
from pipesched.stage import Feed

__all__ = ["OpenPass", "attach"]


@dataclass
class OpenPass:
    """The forwards that ran, and how to run their backwards."""

    batch: Batch
    feed: Feed
    run_backwards: Callable[[], Any]

    def backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the whole outputs -> gradients of the wanted inputs, micro-batch by micro-batch."""
        outputs = [self.feed.outputs[microbatch].wanted for microbatch in range(len(self.batch))]
        columns = [_cut(grad, pieces) for grad, pieces in zip(grads, zip(*outputs, strict=True), strict=True)]
        self.feed.output_grads = [tuple(column[m] for column in columns) for m in range(len(self.batch))]
        self.run_backwards()
        return [grad for microbatch in range(len(self.batch)) for grad in self.feed.input_grads[microbatch]]


def _cut(grad: Tensor | None, pieces: tuple[Tensor, ...]) -> Gradients:
    """The inverse of ``gather`` for one gradient."""
    if grad is None:
        return (None,) * len(pieces)
    return grad.unbind(0) if pieces[0].dim() == 0 else grad.split([piece.shape[0] for piece in pieces])


def attach(opened: OpenPass) -> Any:
    """The whole output, its differentiable tensors tied to the open pass."""
    outputs = [opened.feed.outputs[microbatch] for microbatch in range(len(opened.batch))]
    leaves, spec = pytree.tree_flatten(gather([output.value for output in outputs]))
    tied = [index for index, needs in enumerate(outputs[0].needs_grad) if needs]
    if tied:
        inputs = [tensor for tensors in opened.batch.wanted_inputs() for tensor in tensors]
        anchor = torch.empty(0, requires_grad=True)
        outputs_now = tuple(leaves[index] for index in tied)
        results = _Through.apply(opened, outputs_now, anchor, *inputs)  # type: ignore[no-untyped-call]
        for index, result in zip(tied, results, strict=True):
            leaves[index] = result
    return pytree.tree_unflatten(leaves, spec)


class _Through(torch.autograd.Function):
    """The node between the caller's graph behind the output and the one before the inputs."""

    @staticmethod
    def forward(ctx: Any, opened: OpenPass, outputs: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.opened = opened
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        opened, ctx.opened = ctx.opened, None
        if opened is None:
            raise ExecutionError(
                "what a forward holds is freed by its backward; this output was differentiated a second time; "
                "add the losses and call backward once, or call forward again"
            )
        return None, None, None, *opened.backward(grads)
