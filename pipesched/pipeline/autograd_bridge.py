"""Autograd bridge: connects a pipeline's runs to the caller's autograd graph at the model's inputs and outputs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pipesched.devices.streams import on_streams, streams_here
from pipesched.errors import ExecutionError, InputError
from pipesched.runtime.microbatches import Batch, Weighting
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.function_transforms import batches_gradients, running_transform, title
from pipesched.tensors.payload import Payload
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.rows import ROWS_PAGE
from pipesched.tensors.structures import object_tensors
from pipesched.tensors.torch_insides import runs_in_backward
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["OpenPass", "attach", "check_derivatives", "deliver_input_grads"]

_REMEDY = (
    "compute such a derivative with the model itself, which has the pipeline's weights, and the rest of the loss with "
    "the pipeline"
)


@dataclass
class OpenPass:
    """A batch whose forward passes have run and whose backward passes have not yet run."""

    batch: Batch
    step_data: StepData
    run_backwards: Callable[[], Any]
    parameters: Callable[[], Iterable[nn.Parameter]]  #: returns the parameters whose gradients the passes change
    weighting: Weighting | None = None  #: the weighting of the loss, if the loss is among the outputs
    #: The caller's streams in the forward. As in PyTorch, the backward runs on them, in whatever thread autograd uses.
    streams: Sequence[torch.Stream] = ()

    def backward(self, grads: tuple[Tensor | None, ...], *, accumulates: bool) -> list[Tensor | None]:
        """Run the pipeline's backward passes, given the gradients of the whole batch's outputs.

        ``accumulates`` states whether the gradients of parameters are added to their ``.grad``, or dropped. Returns the
        gradients of the inputs that require gradients, ordered by micro-batch.
        """
        given = iter(grads)
        self.step_data.output_grads = [
            tuple(_beside(next(given), piece) for piece in self.step_data.outputs[microbatch].wanted)
            for microbatch in range(len(self.batch.rows))
        ]
        before = [] if accumulates else [(one, one.grad) for one in self.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        try:
            with on_streams(self.streams):
                self.run_backwards()
        finally:
            for parameter, grad in before:
                parameter.grad = grad
        return [
            _beside(grad, tensor)
            for microbatch, tensors in enumerate(self.batch.wanted_inputs())
            for grad, tensor in zip(self.step_data.input_grads.get(microbatch, ()), tensors, strict=False)
        ]


def _beside(grad: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Move a gradient to the device of ``tensor``. Bidirectional schedules have outputs on several devices."""
    return None if grad is None else grad.to(tensor.device)


def attach(opened: OpenPass, joins: OutputRows) -> Any:
    """Return the output of the whole batch. Calling ``backward()`` on it runs the pipeline's backward passes.

    The outputs of the micro-batches are connected to the pipeline's backward passes, and then joined by ``joins``.
    """
    outputs = [opened.step_data.outputs[microbatch] for microbatch in range(len(opened.batch.rows))]
    _check_objects(outputs)
    wanted = [output.wanted for output in outputs]
    values = [output.value for output in outputs]
    if any(wanted):
        tensors = (*chain.from_iterable(wanted), *opened.parameters())
        opened.streams = streams_here(tensor.device for tensor in tensors)
        inputs = [tensor for tensors in opened.batch.wanted_inputs() for tensor in tensors]
        leaf = torch.empty(0, requires_grad=True, device="cpu")
        anchor = leaf.clone()  # no leaf, so that autograd tells whether it goes there
        pieces = tuple(piece.detach() for piece in chain.from_iterable(wanted))  # the step data keeps the originals
        results = iter(_Through.apply(opened, pieces, anchor, *inputs))  # type: ignore[no-untyped-call]
        values = [output.with_wanted(tuple(islice(results, len(output.wanted)))) for output in outputs]
    return opened.batch.gathered(values, opened.weighting, joins)


def check_derivatives(inputs: Any) -> None:
    """Raise InputError if the caller's code computes derivatives that a pipeline does not pass on."""
    frame = running_transform()
    if frame is not None:
        raise InputError(
            f"a pipeline may not be called inside a function transform, because its ranks run in other threads; it was "
            f"called inside {title(frame)}; {_REMEDY}"
        )
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors_in(inputs)):
        raise InputError(
            f"a pipeline has derivatives in backward mode only; an input has a tangent of forward mode "
            f"(torch.autograd.forward_ad); {_REMEDY}"
        )


def _check_objects(outputs: Sequence[Payload]) -> None:
    """Raise InputError if an object of an unknown class holds outputs that can be differentiated."""
    for leaf in (leaf for output in outputs for leaf in output.leaves):
        if any(tensor.requires_grad for tensor in object_tensors(leaf)):
            raise InputError(
                f"an output that can be differentiated must be a tensor, or a structure of tensors; the model returns "
                f"an object of class {type(leaf).__qualname__} with tensors; return the tensors in a dict or a "
                f"dataclass, train with step(), or call forward under no_grad ({ROWS_PAGE})"
            )


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


def _check_builds_no_graph() -> None:
    """Raise ExecutionError if a backward of a pipeline's output was called with ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise ExecutionError(
            f"the outputs of a pipeline may be differentiated once, because its backward passes build no graph of the "
            f"derivatives; this backward was called with create_graph=True; {_REMEDY}"
        )


class _Through(torch.autograd.Function):
    """The autograd node that connects the pipeline's inputs to its outputs in the caller's graph.

    The backward of this node runs the backward passes of the pipeline. ``torch.autograd.grad`` does not run the node of
    the anchor: then the gradients of parameters are dropped, as without a pipeline.
    """

    @staticmethod
    def forward(ctx: Any, opened: OpenPass, outputs: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.opened = opened
        ctx.set_materialize_grads(False)
        return tuple(output.data for output in outputs)  # ``opened`` must not hold the results, which hold ``ctx``

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _check_builds_no_graph()
        if batches_gradients():
            raise ExecutionError(
                f"the outputs of a pipeline take one gradient at a time; this backward was called with "
                f"is_grads_batched=True, as torch.autograd.functional does with vectorize=True; {_REMEDY}"
            )
        opened = ctx.opened
        ctx.opened = None
        if opened is None:
            raise ExecutionError(
                "the outputs of a forward may only be differentiated once, because the backward frees the activations; "
                "this output was differentiated a second time; add the losses and call backward once, or call forward "
                "again"
            )
        (anchor, _), *_ = ctx.next_functions
        return None, None, None, *opened.backward(grads, accumulates=runs_in_backward(anchor))
