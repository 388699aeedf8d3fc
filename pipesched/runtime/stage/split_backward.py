"""Split backward: records the operations of an F that use weights, so that the backward can be split into an I and a W.

The I computes the input gradients, and the W computes the weight gradients (Qi et al. 2023, arXiv:2401.10241). No
computation runs twice.

During the F, each linear layer, matrix product or convolution, such as ``linear(x, w)``, is called with ``w`` detached,
so autograd computes only the gradient of ``x``. The I is an ordinary backward pass over that graph. The I also computes
cheap weight gradients (norms, biases, embeddings) and weight gradients that cannot be separated (custom functions,
recurrent nets). A custom operation whose weight gradient can be separated is a `WeightOperation`.

During the I, a hook stores the gradient ``gy`` of each operation's output. The W computes ``gy^T x`` with the
operations that autograd itself would have used, so the result is bit-identical. The W then passes this weight gradient
to autograd, which runs all hooks of the weight.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional

from pipesched.runtime.stage.weight_products import (
    ConvolutionRule,
    Product,
    WeightRule,
    saving_input,
    spread,
)
from pipesched.tensors.function_mode import Handler
from pipesched.tensors.function_transforms import running_transform
from pipesched.tensors.graph_edges import edge_of, enter
from pipesched.tensors.weight_operations import linear_rule, matmul_rule, weighted

__all__ = ["PAYS_FLOPS", "Deferral"]


class _WeightUses:
    """Records the operations that use each weight in one forward: their number, their cost and their autograd nodes."""

    def __init__(self, live: Callable[[Tensor], Tensor]) -> None:
        self._live = live
        self._uses: Counter[Tensor] = Counter()
        self._flops: Counter[Tensor] = Counter()
        self._nodes: dict[Tensor, list[Node | None]] = {}
        self._leaves: dict[Node, Tensor] = {}  # the node that adds to a weight's gradient -> the weight

    def note(self, weights: Iterable[Tensor], flops: int, output: Tensor) -> None:
        """Record an operation that uses these weights. Autograd computes the weights' gradients as usual."""
        for used in weights:
            weight = self._live(used)
            self._leaves[get_gradient_edge(used).node] = weight
            self._uses[weight] += 1
            self._flops[weight] += flops
            self._nodes.setdefault(weight, []).append(output.grad_fn)

    def deferrable(self, outputs: Sequence[GradientEdge]) -> frozenset[Tensor]:
        """Return the weights whose gradients can be deferred to the W and are so expensive that deferring saves time.

        All uses of such a weight must be recorded operations that the backward pass reaches. If a weight is also used
        in another way, its gradient is a sum over all uses, and the W could not reproduce this sum bit by bit. The
        backward pass does not reach an operation if the layer differentiates inside its own forward, or runs the
        operation without gradients.
        """
        passed, reached = _reached(outputs, self._leaves)
        uses = Counter({self._leaves[leaf]: count for leaf, count in reached.items()})
        return frozenset(
            weight
            for weight, count in self._uses.items()
            if uses[weight] == count
            and self._flops[weight] >= PAYS_FLOPS
            and all(node in passed for node in self._nodes[weight])
        )


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Deferral:
    """Intercepts a stage's operations that use weights, detaches the weights and records the operations for the W.

    Micro-batches with the same input shapes and trainable parameters are of the same kind. The first micro-batch of a
    kind shows which weight gradients can be deferred. The first micro-batch that a step runs determines the kind for
    the whole step. If this kind is new, the backward of this micro-batch is not split. Lower-numbered micro-batches of
    this kind may be recomputed later in the step, and their backwards are not split either. Gradients are therefore
    always summed in the same order.
    """

    def __init__(self) -> None:
        self._live: Callable[[Tensor], Tensor] = _itself
        self._products: list[Product] = []
        self._learned: dict[Hashable, frozenset[Tensor]] = {}
        self._deferrable: frozenset[Tensor] = frozenset()
        self._weight_uses: _WeightUses | None = None
        self._decided = False
        self._whole_up_to = -1
        self._kind: Hashable = None
        self._noting = True
        self._saving = False

    def begin(self, live: Callable[[Tensor], Tensor] | None = None) -> None:
        """Start a step. ``live`` maps a weight version's tensor to its Parameter, and any other tensor to itself."""
        self._live = live or _itself
        self._decided = False
        self._weight_uses = None
        self._products.clear()

    def decide(self, microbatch: int, kind: Callable[[], Hashable]) -> bool:
        """Return whether the next forward defers weight gradients.

        The result depends on the kind (input shapes, trainable parameters) of the step's first forward. If the kind is
        new, the first forward is observed to find the deferrable weights.
        """
        if not self._decided:
            self._decided = True
            self._kind = kind()
            known = self._kind in self._learned
            self._weight_uses = None if known else _WeightUses(self._live)
            self._whole_up_to = -1 if known else microbatch
            self._deferrable = self._learned.get(self._kind, frozenset())
        return bool(self._deferrable) and microbatch > self._whole_up_to

    @property
    def learning(self) -> bool:
        """Whether the current forward is observed to find the deferrable weights."""
        return self._weight_uses is not None

    @property
    def num_noted(self) -> int:
        """The number of operations recorded so far in this forward."""
        return len(self._products)

    def finish(self, outputs: Sequence[GradientEdge]) -> list[Product]:
        """End a forward. Return the operations recorded for the W, or [] if the forward was observed (see `decide`)."""
        if self._weight_uses is not None:
            self._deferrable = self._learned[self._kind] = self._weight_uses.deferrable(outputs)
            self._weight_uses = None
        products = self._products
        self._products = []
        return products

    @contextmanager
    def saving(self, *, again: bool = False) -> Iterator[None]:
        """A context for recomputed or offloaded layers: autograd saves the inputs of operations that use weights.

        ``again`` states whether the layer is being recomputed. If so, its operations are not recorded a second time.
        """
        before = self._saving, self._noting
        self._saving = True
        self._noting = self._noting and not again
        try:
            yield
        finally:
            self._saving, self._noting = before

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """A context for the backward pass of an I, in which weights are detached but no operations are recorded.

        Layers that are recomputed in this backward pass build the same autograd graph as in the F, which has already
        recorded their operations.
        """
        self._noting = False
        try:
            yield
        finally:
            self._noting = True

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        """Return the handler for a linear layer, matrix product, convolution or weight operation; None for others."""
        if function is functional.linear:
            return self._linear
        if function in _MATRIX_PRODUCTS:
            return self._matrix_product
        if function is torch.addmm:
            return self._addmm
        if function is weighted:
            return self._weighted
        return self._convolution if function in _CONVOLUTIONS else None

    def _linear(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, weight, bias = _bind(("input", "weight", "bias"), args, kwargs)
        if not _is_plain(x, weight) or weight.dim() != 2:
            return function(*args, **kwargs)
        if not self._defers(weight):
            return self._learn(function(*args, **kwargs), x, weight)
        if _lies_in_rows(x):
            return self._note(x, (weight,), linear_rule, lambda x: function(x, weight.detach(), bias))
        rows = x.flatten(0, -2)
        output = self._note(rows, (weight,), linear_rule, lambda rows: function(rows, weight.detach()))
        output = output.unflatten(0, x.shape[:-1])
        return output if bias is None else output + bias

    def _matrix_product(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 2 or not _is_plain(*args) or args[0].dim() < 2 or args[1].dim() != 2:
            return function(*args, **kwargs)
        x, weight = args
        if not self._defers(weight):
            return self._learn(function(x, weight), x, weight)
        rows = x if _lies_in_rows(x) else x.flatten(0, -2)
        output = self._note(rows, (weight,), matmul_rule, lambda rows: function(rows, weight.detach()))
        return output if rows is x else output.unflatten(0, x.shape[:-1])

    def _addmm(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 3 or not _is_plain(*args[1:]):
            return function(*args, **kwargs)
        bias, x, weight = args
        if not self._defers(weight):
            return self._learn(function(bias, x, weight), x, weight)
        return self._note(x, (weight,), matmul_rule, lambda x: function(bias, x, weight.detach()))

    def _convolution(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        x, weight, bias, stride, padding, dilation, groups = _bind(names, args, kwargs)
        weights = (weight,) if bias is None else (weight, bias)
        if isinstance(padding, str) or not _is_plain(x, *weights):
            return function(*args, **kwargs)
        spatial = weight.dim() - 2
        if not self._defers(*weights):
            return self._learn(function(*args, **kwargs), x, *weights, channels=-1 - spatial)
        defaults = ((stride, 1), (padding, 0), (dilation, 1))
        numbers = [spread(default if value is None else value, spatial) for value, default in defaults]
        rule = ConvolutionRule(weight, bias, numbers, 1 if groups is None else groups)
        return self._note(x, weights, rule, lambda x: rule.forward(function, x))

    def _weighted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operation, x, *weights = args
        if not _is_plain(x, *weights):
            return function(*args)
        if self._defers(*weights):
            call = lambda x: function(operation, x, *(weight.detach() for weight in weights))  # noqa: E731
            return self._note(x, tuple(weights), operation.weight_grads, call)
        output = function(*args)
        return self._learn(output, output, *weights, times=operation.products)

    def _defers(self, *weights: Tensor) -> bool:
        deferrable = torch.is_grad_enabled() and all(self._live(weight) in self._deferrable for weight in weights)
        return deferrable and running_transform() is None

    def _learn(self, output: Tensor, x: Tensor, *weights: Tensor, channels: int = -1, times: int = 1) -> Tensor:
        """Return ``output``. If this forward is observed, record that the operation used ``weights``.

        ``channels`` is the dim of ``x`` over which the operation sums, and ``times`` the number of such operations. An
        operation inside a function transform, such
        as ``torch.func.grad``, is not recorded, because its operands and its output belong to the transform;
        nor is one in inference mode, which has no gradients.
        """
        if self._weight_uses is None or not self._noting:
            return output
        if running_transform() is None and not torch.is_inference_mode_enabled():
            flops = 2 * times * weights[0].numel() * x.numel() // max(1, x.shape[channels])
            self._weight_uses.note(weights, flops, output)
        return output

    def _note(
        self, x: Tensor, weights: tuple[Tensor, ...], rule: WeightRule, call: Callable[[Tensor], Tensor]
    ) -> Tensor:
        product = Product(weights, rule)
        if self._saving and x.requires_grad:
            x = saving_input(x, product)
        else:
            product.take(x.detach())
        output = call(x)
        if not output.requires_grad:  # no input requires a gradient, but the hook needs an autograd node
            (output,) = enter((output,))
        if self._noting:
            edge_of(output).node.register_prehook(product.keep)
            self._products.append(product)
        return output


#: The smallest number of floating-point operations for which a weight gradient is deferred. Deferring a
#: gradient costs about 20 us of host time. Computing a smaller gradient takes less time.
PAYS_FLOPS = 2_000_000

_PLAIN = (Tensor, nn.Parameter)
_MATRIX_PRODUCTS = frozenset({torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__})
_CONVOLUTIONS = frozenset({torch.conv1d, torch.conv2d, torch.conv3d})


def _is_plain(x: Any, *weights: Any) -> bool:
    """Return whether all operands are plain floating-point tensors: torch.Tensor or nn.Parameter, no other subclass.

    The weights must also be trainable leaves, and must not be ``x`` itself.
    """
    return _is_plain_tensor(x) and all(
        _is_plain_tensor(weight) and weight.requires_grad and weight.is_leaf and weight is not x for weight in weights
    )


def _is_plain_tensor(tensor: Any) -> bool:
    return type(tensor) in _PLAIN and tensor.is_floating_point()


def _lies_in_rows(x: Tensor) -> bool:
    """Return whether torch can compute a matrix product with x as a matrix of rows without copying x.

    If not, torch copies x when the weight requires a gradient. When the weight requires no gradient, torch uses a
    slower method that rounds differently. A detached weight would select this method, so the caller copies x instead.
    """
    return x.dim() <= 2 or x.is_contiguous()


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    if len(args) == len(names):  # the usual case
        return list(args)
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def _reached(outputs: Sequence[GradientEdge], leaves: Collection[Node]) -> tuple[set[Node], dict[Node, int]]:
    """Return the nodes that a backward pass reaches, and the number of uses of each leaf that it reaches.

    Uses of a view or a cast of a weight, such as the transposed weight of a linear layer, count as uses of the weight.
    """
    above: dict[Node, list[Node | None]] = {}
    front: list[tuple[Node | None, Node]] = [(None, edge.node) for edge in outputs]
    while front:
        parent, node = front.pop()
        if node not in above:
            front += [(node, following) for following, _ in node.next_functions if following is not None]
        above.setdefault(node, []).append(parent)

    def uses(node: Node) -> int:
        parents = above[node]
        return sum(1 if parent is None or len(parent.next_functions) > 1 else uses(parent) for parent in parents)

    return set(above), {leaf: uses(leaf) for leaf in leaves if leaf in above}
