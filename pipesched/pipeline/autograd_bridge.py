"""Autograd bridge: connects a pipeline's runs to the caller's autograd graph at the model's inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.runtime.microbatches import Batch, Weighting, loss_places
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.payload import Gradients, Payload, row_dim

__all__ = ["OpenPass", "attach", "deliver_input_grads"]


@dataclass
class OpenPass:
    """A batch whose forward passes have run and whose backward passes have not yet run."""

    batch: Batch
    step_data: StepData
    run_backwards: Callable[[], Any]
    weighting: Weighting | None = None  #: the weighting of the loss, if the loss is among the outputs

    def backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Run the pipeline's backward passes, given the gradients of the whole batch's outputs.

        Returns the gradients of the inputs that require gradients, ordered by micro-batch.
        """
        outputs = [self.step_data.outputs[microbatch].wanted for microbatch in range(len(self.batch.rows))]
        columns = [
            self._cut(grad, pieces, loss=number == self._loss)
            for number, (grad, pieces) in enumerate(zip(grads, zip(*outputs, strict=True), strict=True))
        ]
        self.step_data.output_grads = [
            tuple(_beside(column[m], piece) for column, piece in zip(columns, outputs[m], strict=True))
            for m in range(len(self.batch.rows))
        ]
        self.run_backwards()
        return [
            _beside(grad, tensor)
            for microbatch, tensors in enumerate(self.batch.wanted_inputs())
            for grad, tensor in zip(self.step_data.input_grads.get(microbatch, ()), tensors, strict=False)
        ]

    @property
    def _loss(self) -> int | None:
        """The index of the loss among the outputs that require a gradient; None if the loss is not an output."""
        first = self.step_data.outputs[0]
        places = [] if self.weighting is None else loss_places(first.value)
        return sum(first.needs_grad[: first.places[places[0]]]) if places else None

    def _cut(self, grad: Tensor | None, pieces: tuple[Tensor, ...], *, loss: bool) -> Gradients:
        """Split the gradient of a whole-batch output into one part per micro-batch. Inverse of ``Batch.gathered``."""
        if grad is None:
            return (None,) * len(pieces)
        if loss and self.weighting is not None:  # a factor of 0 gives None, because the loss may be 0 / 0
            return tuple(
                grad if factor is None else grad * factor if factor else None for factor in self.weighting.factors
            )
        if pieces[0].dim() == 0:
            return grad.unbind(0)
        dim = row_dim(pieces, self.batch.rows, self.batch.output_dim)
        return tuple(torch.split(grad, [piece.shape[dim] for piece in pieces], dim))


def _beside(grad: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Move a gradient to the device of ``tensor``. Bidirectional schedules have outputs on several devices."""
    return None if grad is None else grad.to(tensor.device)


def attach(opened: OpenPass) -> Any:
    """Return the output of the whole batch. Calling ``backward()`` on it runs the pipeline's backward passes."""
    outputs = [opened.step_data.outputs[microbatch] for microbatch in range(len(opened.batch.rows))]
    whole = Payload.of(opened.batch.gathered([output.value for output in outputs], opened.weighting))
    whole = replace(
        whole, places=outputs[0].places, needs_grad=outputs[0].needs_grad, leaves=_firsts(whole, outputs[0])
    )
    if not any(whole.needs_grad):
        return whole.value
    inputs = [tensor for tensors in opened.batch.wanted_inputs() for tensor in tensors]
    anchor = torch.empty(0, requires_grad=True)
    results = _Through.apply(opened, whole.wanted, anchor, *inputs)  # type: ignore[no-untyped-call]
    return whole.with_wanted(results)


def _firsts(whole: Payload, pattern: Payload) -> tuple[Any, ...]:
    """For each leaf of ``pattern``, return the leaf of ``whole`` at the same position.

    If a leaf of ``pattern`` occurs at several positions, the first one is used.
    """
    return tuple(whole.leaves[whole.places[pattern.places.index(leaf)]] for leaf in range(len(pattern.leaves)))


def deliver_input_grads(batch: Batch, step_data: StepData) -> None:
    """Backpropagate the gradients of the inputs through the caller's graph, micro-batch by micro-batch."""
    grads_of = map(step_data.input_grads.get, range(len(batch.rows)))
    parts = [
        [(tensor, grad.to(tensor.device)) for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
        for tensors, grads in zip(batch.wanted_inputs(), grads_of, strict=True)
        if grads
    ]
    parts = [part for part in parts if part]
    for index, part in enumerate(parts):
        more = index < len(parts) - 1
        torch.autograd.backward([tensor for tensor, _ in part], [grad for _, grad in part], retain_graph=more)


class _Through(torch.autograd.Function):
    """The autograd node that connects the pipeline's inputs to its outputs in the caller's graph.

    The backward of this node runs the backward passes of the pipeline.
    """

    @staticmethod
    def forward(ctx: Any, opened: OpenPass, outputs: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.opened = opened
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        opened = ctx.opened
        ctx.opened = None
        if opened is None:
            raise ExecutionError(
                "the outputs of a forward may only be differentiated once, because the backward frees the activations; "
                "this output was differentiated a second time; add the losses and call backward once, or call forward "
                "again"
            )
        return None, None, None, *opened.backward(grads)
