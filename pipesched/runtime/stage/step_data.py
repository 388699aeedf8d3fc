"""Step data: what a step gives to its stages and takes from them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor

from pipesched.tensors.keyed_random import Key
from pipesched.tensors.payload import Gradients, Payload

__all__ = ["StepData"]


@dataclass
class StepData:
    """What one step, or a stream of steps, gives to its stages and takes from them: by micro-batch.

    step: the first one's number. inputs: (args, kwargs) of the model. factors: what each loss is multiplied by, None to
    leave it as it is; without factors no loss is computed. output_grads: gradients of the outputs, where the loss is
    computed elsewhere. key: of a stream, whose micro-batches count on over its steps.
    """

    seed: int
    step: int
    inputs: list[Any] | dict[int, Any]
    _: KW_ONLY
    targets: list[Any] | dict[int, Any] = field(default_factory=list)
    factors: list[float | None] | dict[int, float | None] | None = None
    output_grads: list[Gradients] = field(default_factory=list)
    keep_outputs: bool = False
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Payload] = field(default_factory=dict)
    input_grads: dict[int, Gradients] = field(default_factory=dict)
    key: Callable[[int], Key] | None = None
