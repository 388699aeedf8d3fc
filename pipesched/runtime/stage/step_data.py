"""Step data: the inputs of a step's stages, and the results that the stages produce."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipesched.runtime.gradients.nonfinite_watch import NonfiniteWatch
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.tensors.added_losses import AddedReduction
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.loss_factors import LossFactor
from pipesched.tensors.payload import Gradients, Payload
from pipesched.tensors.tensor_table import LayerValues

__all__ = ["Added", "StepData"]

#: The losses that layers added for one micro-batch: (layer, number of its call, position) -> (name, reduction,
#: value).
Added = dict[tuple[str, int, int], tuple[str, AddedReduction, Tensor]]


@dataclass
class StepData:
    """Inputs and results of the micro-batches of one step, or of a stream of overlapping steps."""

    seed: int
    #: The number of the step; in a stream, the number of its first step.
    step: int
    #: The model's (args, kwargs) for each micro-batch.
    inputs: list[Any] | dict[int, Any]
    _: KW_ONLY
    targets: list[Any] | dict[int, Any] = field(default_factory=list)
    #: The factor of each micro-batch's loss; a factor of None leaves the loss unscaled. Without factors, no loss is
    #: computed.
    factors: list[LossFactor] | dict[int, LossFactor] | None = None
    #: The path of each micro-batch through the code between layers; empty if all take the path of the sample.
    paths: list[int] | dict[int, int] = field(default_factory=list)
    #: Gradients of the outputs, if the loss is computed outside the pipeline.
    output_grads: list[Gradients] = field(default_factory=list)
    #: The initial gradient of each loss's backward, as a 0-d tensor. Default: None, which stands for 1.
    loss_scale: Tensor | None = None
    #: Records whether outputs of layers and their gradients are finite. Default: None (not recorded).
    watch: NonfiniteWatch | None = None
    #: The tensors that layers make in this step, for checks of a user's loss function. Default: None (not recorded).
    layer_values: LayerValues | None = None
    #: For each accelerator that holds tensors of the batch, an event that the caller's work on them precedes.
    ready: dict[torch.device, torch.Event] = field(default_factory=dict)
    #: For each stage, an event after its last copy from pinned memory. `wait_for_copies` waits for these events.
    copies: dict[object, torch.Event] = field(default_factory=dict)
    keep_outputs: bool = False
    #: A digest of the values of a stream's first batch, which all ranks must have; b"" if they are not compared.
    values: bytes = b""
    #: Makes the autocast settings of an asynchronous call's thread. Default: None (the settings of this thread).
    autocast: Callable[[], AbstractContextManager[None]] | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Payload] = field(default_factory=dict)
    input_grads: dict[int, Gradients] = field(default_factory=dict)
    #: The losses that layers added, already weighted, keyed by micro-batch: place of the call -> (name,
    #: reduction, value).
    added: dict[int, Added] = field(default_factory=dict)
    #: For each micro-batch, the function that computes metrics from its outputs; empty without metrics=.
    metrics: dict[int, Metrics | None] = field(default_factory=dict)
    #: The metrics, keyed by micro-batch.
    measured: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    #: Whether the loss is computed outside the pipeline. Such a loss cannot include the losses that layers add.
    outside_loss: bool = False
    #: Returns a micro-batch's random key. Set in a stream, in which micro-batch numbers continue across steps, and in
    #: replicas other than the first. Default: None (the key contains ``step`` and the micro-batch's number).
    key: Callable[[int], Key] | None = None

    def wait_for_copies(self) -> None:
        """Wait until the copies from pinned memory are complete, so that the caller may refill the memory.

        The host waits for no computation.
        """
        while self.copies:
            self.copies.popitem()[1].synchronize()
