"""Feed: what a step gives to its stages and takes from them; and how a loss comes about."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesched.body import call_with
from pipesched.errors import InputError
from pipesched.payload import Gradients, Payload
from pipesched.randomness import Key

__all__ = ["Feed", "Head", "loss_entry"]


@dataclass
class Feed:
    """What one step, or a stream of steps, gives to its stages and takes from them: by micro-batch.

    step: the first one's number; step_size: the micro-batches of each step of a stream, which are numbered through.
    inputs: (args, kwargs) of the model. factors: what each loss is multiplied by, None to leave it as it is; without
    factors no loss is computed. output_grads: gradients of the outputs, where the loss is computed elsewhere.
    """

    seed: int
    step: int
    inputs: list[Any] | dict[int, Any]
    targets: list[Any] | dict[int, Any] = field(default_factory=list)
    factors: list[float | None] | dict[int, float | None] | None = None
    step_size: int | None = None
    output_grads: list[Gradients] = field(default_factory=list)
    keep_outputs: bool = False
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Payload] = field(default_factory=dict)
    input_grads: dict[int, Gradients] = field(default_factory=dict)

    def key(self, microbatch: int) -> Key:
        """What its random numbers depend on: seed, step, and the micro-batch within the step."""
        if self.step_size is None:
            return Key(self.seed, self.step, microbatch)
        steps, own = divmod(microbatch, self.step_size)
        return Key(self.seed, self.step + steps, own)


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
