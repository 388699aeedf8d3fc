"""Added losses: auxiliary losses that a layer adds to the loss of a step from inside its forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pipesched.checks import shown
from pipesched.errors import ExecutionError, InputError
from pipesched.tensors.torch_insides import recomputes

__all__ = ["AddedReduction", "Route", "add_loss", "added_loss", "check_scalar", "collect_losses", "no_graph", "routed"]

#: How an added loss combines the rows of a micro-batch.
AddedReduction = Literal["mean", "sum"]

#: (value, name, reduction, position) -> None. The position orders the added losses of code between layers.
Route = Callable[[Tensor, str, AddedReduction, int], Any]

#: Receives the losses added in this thread outside a function mode.
_ROUTE: ContextVar[Route | None] = ContextVar("route", default=None)

_NAME = "added_loss"


def add_loss(value: Tensor, *, name: str | None = None, reduction: AddedReduction = "mean") -> None:
    """Add a layer's auxiliary loss, such as the load-balancing loss of experts, to the loss of the running step.

    ::

        class Experts(nn.Module):
            def forward(self, x):
                shares = self.router(x).softmax(-1)
                pipesched.add_loss(0.01 * (shares.mean(0) ** 2).sum(), name="balance")
                ...

    `Pipeline.step` multiplies the added loss by the micro-batch's weight, as it does with the model's loss. With
    ``reduction="sum"``, it adds the losses of the micro-batches without weights. The stage's backward computes the
    gradients of the added loss. The losses that `Pipeline.step`, `Pipeline.evaluate` and
    `pipesched.testing.reference_step` return include the added loss. A layer that is recomputed adds its loss only
    once. Losses with the same name are summed in ``pipe.metrics``. In a training loop without a pipeline, use
    `collect_losses`.

    Args:
        value: the loss over the rows of one micro-batch, a floating-point tensor of shape [].
        name: the name in ``pipe.metrics`` and in the step log. Default: "added_loss".
        reduction: "mean" if the value is a mean over rows or tokens, "sum" if it is a sum over them. Default: "mean".

    Raises:
        InputError: the value is not a floating-point scalar tensor, the name is not a string, or the reduction is
            unknown.
        ExecutionError: the value requires a gradient outside a step and outside `collect_losses`, or the layer
            computes it without gradients in a training step.

    """
    if not isinstance(value, Tensor):
        raise InputError(f"an added loss must be a tensor of shape []; got {shown(value)}; for example, pass x.mean()")
    if name is not None and (not isinstance(name, str) or not name):
        raise InputError(f"the name of an added loss must be a string; got {shown(name)}; for example, pass 'balance'")
    if reduction not in get_args(AddedReduction):
        raise InputError(
            f"the reduction of an added loss must be 'mean' or 'sum'; got {shown(reduction)}; pass 'sum' if the loss "
            f"is a sum over rows"
        )
    added_loss(value, _NAME if name is None else name, reduction)


def added_loss(value: Tensor, name: str, reduction: AddedReduction = "mean", position: int = 0) -> Tensor:
    """Pass a loss to the running step, and return it. Graph capture records this function, and stages intercept it."""
    if has_torch_function((value,)):
        passed: Tensor = handle_torch_function(added_loss, (value,), value, name, reduction, position)
        return passed
    route = _ROUTE.get()
    if route is not None:
        route(value, name, reduction, position)
    elif value.requires_grad and not recomputes():
        raise ExecutionError(
            f"add_loss must be called during a pipeline step, which adds the loss to its total; the loss {name!r} was "
            f"added outside a step and would be lost; run the model under no_grad, or collect its losses with "
            f"'with pipesched.collect_losses() as losses:' and add them to your loss"
        )
    return value


def check_scalar(value: Tensor, name: str) -> None:
    """Raise InputError unless a layer's added loss is a floating-point scalar tensor."""
    if value.dim() or not value.is_floating_point():
        raise InputError(
            f"an added loss must be a floating-point tensor of shape []; the loss {name!r} has shape "
            f"{list(value.shape)} and type {value.dtype}; reduce it with mean() or sum()"
        )


def no_graph(name: str, remedy: str) -> str:
    """Return the error message for a loss that a layer computes without gradients in a training step."""
    return (
        f"gradients must be enabled while a layer computes the loss that it adds; the loss {name!r} was added under "
        "no_grad, which torch.utils.checkpoint with use_reentrant=True also sets in its forward; add the loss outside "
        f"no_grad, or pass {remedy}"
    )


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """During the ``with`` block, pass losses added in this thread to ``route``.

    Losses that a function mode intercepts are not passed.
    """
    token = _ROUTE.set(route)
    try:
        yield
    finally:
        _ROUTE.reset(token)


@contextmanager
def collect_losses() -> Iterator[dict[str, Tensor]]:
    """Collect the losses that layers add with `add_loss`, in a training loop without a pipeline.

    ::

        with pipesched.collect_losses() as losses:
            output = model(x)
        loss = loss_fn(output, y) + sum(losses.values())
        loss.backward()

    If you accumulate the gradients of several micro-batches, multiply only the losses with ``reduction="mean"`` by the
    weight of the micro-batch.

    Returns:
        A dict that maps each name to the sum of the losses with this name. The dict is filled while the model runs, and
        the sums can be differentiated.

    """
    losses: dict[str, Tensor] = {}
    trains = torch.is_grad_enabled()

    def collect(value: Tensor, name: str, reduction: AddedReduction, position: int) -> None:
        check_scalar(value, name)
        if trains and not torch.is_grad_enabled():
            raise ExecutionError(no_graph(name, "use_reentrant=False in torch.utils.checkpoint"))
        if not recomputes():
            losses[name] = losses[name] + value if name in losses else value

    with routed(collect):
        yield losses
