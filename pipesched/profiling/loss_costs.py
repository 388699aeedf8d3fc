"""Loss costs: measures the costs of computing a loss on a model's output, with a known or a guessed target."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.profiling.layer_profiler import QUICK, MeasurementEffort, measure_calls
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.layer_memory import LossMemory
from pipesched.tensors.payload import pytree

__all__ = ["loss_costs", "with_loss_bytes", "with_supposed_loss"]

_FACTOR = 0.5  # stands for the factor of a micro-batch's loss


def loss_costs(
    loss_fn: Callable[[Any, Any], Any],
    output: Any,
    target: Any,
    device: torch.device,
    threads: int,
    effort: MeasurementEffort = QUICK,
) -> LayerCosts:
    """Return the measured costs of computing a loss for this output and target."""
    call: tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = _OfTarget(loss_fn, target, device), ((output,), {})
    return measure_calls({"loss_fn": call}, {"loss_fn"}, device, threads, effort)["loss_fn"]


def with_loss_bytes(costs: LayerCosts, loss: LayerCosts) -> LayerCosts:
    """Return the last layer's costs plus the memory that the loss needs."""
    measured = LossMemory(
        kept_bytes=loss.memory.activation_bytes,
        kept_input_bytes=loss.memory.kept_input_bytes,
        forward_bytes=loss.memory.forward_transient_bytes,
        backward_bytes=loss.memory.backward_transient_bytes,
    )
    return replace(costs, loss=measured)


def with_supposed_loss(
    costs: LayerCosts, loss_fn: Callable[[Any, Any], Any], output: Any, device: torch.device, threads: int
) -> LayerCosts:
    """Return the last layer's costs plus the memory of a loss whose target is unknown.

    Tries two targets: integer class labels, and a tensor like the output. If the loss accepts both targets, the target
    that needs less memory is used. If the loss accepts neither target, the costs stay unchanged.
    """
    found = []
    for target in _supposed(output):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # for example, shapes that only match by broadcasting
                found.append(loss_costs(loss_fn, output, target, device, threads))
        except Exception:  # any error of a loss that does not accept this target
            continue
    taken = [with_loss_bytes(costs, own) for own in found if own.memory.backward_transient_bytes]
    return min(taken, key=lambda own: own.loss.kept_bytes + own.loss.backward_bytes, default=costs)


def _supposed(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point() and output.dim():
        if output.dim() > 1:
            yield torch.zeros(output.shape[:1] + output.shape[2:], dtype=torch.long, device=output.device)
        yield torch.zeros_like(output)


class _OfTarget(nn.Module):
    """A loss with a fixed target. The target belongs to the batch, so its memory is not counted for the layer."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], target: Any, device: torch.device) -> None:
        super().__init__()
        self._loss_fn = loss_fn
        self._target = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), target)

    def forward(self, output: Any) -> Any:
        loss = self._loss_fn(output, self._target)
        return loss * _FACTOR if isinstance(loss, Tensor) else loss  # as a step does
