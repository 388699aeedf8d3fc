"""Added losses of a stage: scales the losses that layers add, and stores them for the backward and the step's loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipesched.errors import ExecutionError
from pipesched.runtime.stage.microbatch_state import Additions, MicrobatchState
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.added_losses import AddedReduction, added_loss, check_scalar, no_graph
from pipesched.tensors.function_mode import Handler
from pipesched.tensors.graph_edges import edge_of
from pipesched.tensors.keyed_random import Key, KeyedRandom
from pipesched.tensors.loss_factors import LossFactor, scaled

__all__ = ["AddedLosses"]


class AddedLosses:
    """Provides the handler for `add_loss` in a stage's forwards. Not thread-safe."""

    def __init__(self, random: KeyedRandom) -> None:
        self._random = random
        #: Whether the running forward computes gradients.
        self.grad = False
        self.step_data = StepData(0, 0, [])
        #: The state of the running micro-batch.
        self.saved: MicrobatchState | None = None
        self.in_backward = _InBackward(self)

    def begin(self, key: Key) -> None:
        """Start a forward of a whole model that is not cut into stages."""
        no_stage: Any = {"num_grads": (), "takes_inputs": True, "weights": {}, "loss_inputs": None}
        self.saved = MicrobatchState(microbatch=key.microbatch, key=key, **no_stage)
        self.grad = torch.is_grad_enabled()

    def edges(self) -> list[GradientEdge]:
        """Return the graph edges of the losses added since ``begin``. The backward pass starts from these edges."""
        return [] if self.saved is None or self.saved.added is None else self.saved.added.edges

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        """Return the handler for the function that adds a loss, or None for any other function."""
        return self._add if function is added_loss else None

    def scaled(self, value: Tensor, reduction: AddedReduction) -> Tensor:
        """Multiply a mean by its micro-batch's weight. A recomputation repeats exactly these operations."""
        factor = self._factor(reduction)
        return value.clone() if factor is None else scaled(value, factor)

    def _factor(self, reduction: AddedReduction) -> LossFactor:
        factor = self._additions.factor
        return None if reduction == "sum" else factor

    @property
    def _additions(self) -> Additions:
        saved = self.saved
        assert saved is not None  # a handler is called while a micro-batch runs
        if saved.added is None:
            factors = self.step_data.factors
            saved.added = Additions(None if factors is None else factors[saved.microbatch])
        return saved.added

    def _add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value, name, reduction, position = _arguments(*args, **kwargs)
        check_scalar(value, name)
        if self.grad:
            self._check_graph(value, name)
        additions = self._additions
        part = self.scaled(value, reduction)  # of a factor that is known to be 0, no backward runs
        if self.grad and part.requires_grad:
            scale = self.step_data.loss_scale
            additions.edges.append(edge_of(part))
            additions.grads.append(None if scale is None else scale.to(part))
        place = self._random.place
        if not additions.counted and self.saved is not None:
            of_microbatch = self.step_data.added.setdefault(self.saved.microbatch, {})
            of_microbatch[place.layer, place.call, position or additions.num_added] = name, reduction, part.detach()
        additions.num_added += 1
        return value

    def _check_graph(self, value: Tensor, name: str) -> None:
        if not torch.is_grad_enabled():
            raise ExecutionError(no_graph(name, "checkpoint= to Pipeline"))
        if self.step_data.outside_loss and value.requires_grad:
            raise ExecutionError(
                "a model whose layers add losses must be trained with step(), which includes added losses in its loss; "
                f"forward() returns only the outputs, so the loss {name!r} of layer {self._random.place.layer!r} would "
                f"be lost; call step(), or call forward() under no_grad"
            )


class _InBackward:
    """Provides the handler for `add_loss` in backward passes. Losses that recomputed layers add again are ignored."""

    def __init__(self, added: AddedLosses) -> None:
        self._added = added

    def handler_for(self, function: Callable[..., Any]) -> Handler | None:
        return self._repeat if function is added_loss else None

    def _repeat(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value, _, reduction, _ = _arguments(*args, **kwargs)
        self._added.scaled(value, reduction)  # saves the same tensors for the backward as the first run
        return value


def _arguments(
    value: Tensor, name: str, reduction: AddedReduction, position: int = 0
) -> tuple[Tensor, str, AddedReduction, int]:
    return value, name, reduction, position
