"""Loss: how the loss of a micro-batch comes about: by the user's loss function, or as the model's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipesched.capture.stage_body import call_with
from pipesched.errors import InputError

__all__ = ["Head", "loss_entry"]


@dataclass(frozen=True)
class Head:
    """How the loss comes about on the last stage: the user's loss function, or none for the model's own loss."""

    loss_fn: Callable[[Any, Any], Any] | None

    def loss(self, output: Any, target: Any, own: Mapping[str, Tensor]) -> Tensor:
        """The scalar loss of one micro-batch. own: in place of a loss module's tensors. Raises InputError for none."""
        if self.loss_fn is not None:
            loss = call_with(own, self.loss_fn, (output, target), {}) if own else self.loss_fn(output, target)
            return _scalar(loss, "what loss_fn(output, target) returns")
        return _scalar(loss_entry(output), "without loss_fn the model's output, or its 'loss',")


def loss_entry(output: Any) -> Any:
    """A model's own loss: its output, or the ``loss`` there."""
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _scalar(loss: Any, what: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError(
        f"{what} is a scalar loss; got {shape}; pass loss_fn= and reduce it with mean() or sum(), or call forward"
    )
