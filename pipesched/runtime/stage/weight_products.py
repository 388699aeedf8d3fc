"""Weight products: matrix products and convolutions whose weight gradients are deferred to the W."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.simulation.layer_memory import DELIVERED_BYTES

__all__ = [
    "ConvolutionRule",
    "Product",
    "WeightRule",
    "saving_input",
    "spread",
    "weight_grad",
]

#: (gradient of the operation's output, input of the operation) -> the gradients of its weights
WeightRule = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Product:
    """A matrix product or convolution whose weight gradient is deferred to the W.

    Stores the input and the weights and, after the I, the gradient of the output.
    """

    __slots__ = ("_grads", "grad", "input", "rule", "version", "weights")

    def __init__(self, weights: tuple[Tensor, ...], rule: WeightRule) -> None:
        self.weights = weights
        self.rule = rule
        self.grad: Tensor | None = None
        self._grads: list[Tensor | None] = [None] * len(weights)

    def take(self, input: Tensor) -> None:
        """Store the input of the operation."""
        self.input = input
        self.version = input._version

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        """Store the gradient of the output. Called as a hook of the operation's autograd node."""
        self.grad = grads[0]

    def weight_grad(self, index: int) -> Tensor | None:
        """Return the gradient of ``weights[index]``, or None if no gradient arrived or an earlier call returned it.

        Raises ExecutionError if the input was modified in place after the operation ran.
        """
        if self.grad is not None and self.input._version != self.version:
            raise ExecutionError(
                f"the input of a linear layer, matrix product or convolution must stay unchanged until the weight "
                f"gradient is computed; an input of shape {list(self.input.shape)} was modified in place after the "
                f"forward; remove the in-place operation, or use a schedule that does not split the backward"
            )
        if self.grad is not None:
            self._grads = list(self.rule(self.grad, self.input))
            self.grad = None
        grad = self._grads[index]
        self._grads[index] = None
        return grad


def saving_input(x: Tensor, product: Product) -> Tensor:
    """Save an operation's input through autograd, so that saved-tensor hooks apply. Return the tensor to use in the F.

    During the backward pass, autograd passes the saved input to ``product``.
    """
    saved: Tensor = _SavedInput.apply(x, (x.detach(),), product)  # type: ignore[no-untyped-call]
    return saved


class _SavedInput(torch.autograd.Function):
    """An autograd node that saves its input ``x`` for the backward, and returns ``again[0]``, an alias of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: tuple[Tensor], product: Product) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x)
        return again[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        product = ctx.product
        ctx.product = None
        product.take(ctx.saved_tensors[0].detach())
        return grads[0], None, None


def spread(value: Any, spatial: int) -> list[int]:
    """Return one number for each spatial dimension; a single number is repeated."""
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


class ConvolutionRule:
    """Computes the weight and bias gradients of a convolution with the operation that autograd itself would call."""

    def __init__(self, weight: Tensor, bias: Tensor | None, numbers: list[list[int]], groups: int) -> None:
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._numbers = numbers  # stride, padding, dilation
        self._groups = groups

    def forward(self, function: Callable[..., Any], x: Tensor) -> Tensor:
        """Compute the convolution of ``x`` with the detached weight and bias."""
        output: Tensor = function(x, self._weight, self._bias, *self._numbers, self._groups)
        return output

    def __call__(self, grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        spatial = self._weight.dim() - 2
        if x.dim() == spatial + 1:  # an unbatched image
            grad = grad.unsqueeze(0)
            x = x.unsqueeze(0)
        _, *grads = torch.ops.aten.convolution_backward(
            grad,
            x if x.dtype is grad.dtype else x.to(grad.dtype),
            self._weight if self._weight.dtype is grad.dtype else self._weight.to(grad.dtype),
            None if self._bias is None else list(self._bias.shape),
            *self._numbers,
            False,  # not transposed
            [0] * spatial,
            self._groups,
            [False, True, self._bias is not None],
        )
        return tuple(grads[:1] if self._bias is None else grads)


#: Approximate size in bytes of the weights of one `_Delivery` node. A node ends with its first large weight, so that a
#: large gradient is accumulated while it is in the cache, and the next gradient reuses its memory. Small gradients
#: share the fixed cost of one autograd node.
_GROUP_BYTES = DELIVERED_BYTES


def weight_grad(products: Sequence[Product]) -> None:
    """W: compute the weight gradients, sum them over each weight's uses, and accumulate them through autograd."""
    uses: _Uses = {}
    for product in reversed(products):  # the order of a backward pass
        for index, weight in enumerate(product.weights):
            uses.setdefault(weight, []).append((product, index))
    roots = [_Delivery.apply(group, *group) for group in _groups(uses)]  # type: ignore[no-untyped-call]
    if roots:
        torch.autograd.backward(roots, [root.detach() for root in roots])


_Uses = dict[Tensor, list[tuple[Product, int]]]


def _groups(uses: _Uses) -> Iterator[_Uses]:
    group: _Uses = {}
    size = 0
    for weight, of_weight in uses.items():
        group[weight] = of_weight
        size += weight.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group = {}
            size = 0
    if group:
        yield group


class _Delivery(torch.autograd.Function):
    """An autograd node that passes computed gradients to weights; autograd accumulates them and runs the hooks."""

    @staticmethod
    def forward(ctx: Any, group: _Uses, *weights: Tensor) -> Tensor:
        ctx.group = group
        return torch.empty(0, device=weights[0].device)  # tells autograd the stream of the computation

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        group = ctx.group
        ctx.group = None
        return None, *(_total(weight, of_weight) for weight, of_weight in group.items())


def _total(weight: Tensor, of_weight: list[tuple[Product, int]]) -> Tensor | None:
    total: Tensor | None = None
    for product, index in of_weight:
        grad = product.weight_grad(index)
        if grad is not None:
            grad = grad.to(weight.dtype)  # autocast computes in another dtype; sums use the weight's dtype
            total = grad if total is None else total + grad
    return total
