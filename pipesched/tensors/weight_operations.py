"""Weight operation: an operation with weights that states its output, its input gradient and its weight gradients.

Autograd runs such an operation as one node. A schedule with a split backward computes the input gradient in the I and
the weight gradients in the W. Each of the three parts may exchange tensors with other processes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["WeightOperation", "linear_rule", "matmul_rule", "weighted"]


class WeightOperation(Protocol):
    """An operation that is linear in its input and in its weights.

    Attributes:
        products: the number of products of the output's rows with a matrix as large as the first weight. It is more
            than 1 if other processes send parts of them.

    """

    products: int

    def output(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Return the output. Runs in the F, without gradients."""

    def input_grad(self, grad: Tensor, *weights: Tensor) -> Tensor:
        """Return the gradient of the input from the gradient of the output. Runs in the I."""

    def weight_grads(self, grad: Tensor, x: Tensor) -> Sequence[Tensor]:
        """Return the gradient of each weight from the gradient of the output and the input. Runs in the W."""


def weighted(operation: WeightOperation, x: Tensor, *weights: Tensor) -> Tensor:
    """Run an operation with weights. Function modes see the call, so that the weight gradients can be deferred."""
    if has_torch_function((x, *weights)):
        passed: Tensor = handle_torch_function(weighted, (x, *weights), operation, x, *weights)
        return passed
    output: Tensor = _Weighted.apply(operation, x, *weights)  # type: ignore[no-untyped-call]
    return output


class _Weighted(torch.autograd.Function):
    """The autograd node of a weight operation."""

    @staticmethod
    def forward(ctx: Any, operation: WeightOperation, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.operation = operation
        ctx.trains = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*weights, *([x] if ctx.trains else []))
        return operation.output(x, *weights).data  # no view, which code after the layer could not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        weights = ctx.saved_tensors
        operation = ctx.operation
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.trains:
            *weights, x = weights
        of_input = operation.input_grad(grad, *weights) if ctx.needs_input_grad[1] else None
        if ctx.trains:
            of_weights = operation.weight_grads(grad, x)
        return None, of_input, *of_weights


def _operands(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output gradient and x as matrices. x is cast to the gradient's dtype, as autocast did in the F."""
    if x.dtype is not grad.dtype:
        x = x.to(grad.dtype)
    dims = x.dim()
    if dims > 2:
        return grad.flatten(0, -2), x.flatten(0, -2)
    return (grad, x) if dims == 2 else (grad.unsqueeze(0), x.unsqueeze(0))


def linear_rule(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    """Return the weight gradient of ``x @ weight.T``."""
    grad, x = _operands(grad, x)
    return (grad.t().mm(x),)


def matmul_rule(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    """Return the weight gradient of ``x @ weight``."""
    grad, x = _operands(grad, x)
    return (x.t().mm(grad),)
