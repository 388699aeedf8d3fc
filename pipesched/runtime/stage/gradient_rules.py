"""Gradient rules: how the stages of a process treat gradients between the last backward and the update.

A NORM measures the gradients of a stage, and unscales them if the loss was scaled. Each UPDATE gets the measurements of
all stages, so that all decide alike whether to skip the update, and clip by the same norm.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from pipesched.model.parameter_order import ParameterOrder
from pipesched.runtime.stage.gradient_norms import GradientNorms
from pipesched.runtime.stage.loss_scale import LossScale
from pipesched.tensors.gradient_norm import clip_to_norm_, norm_of

__all__ = ["GradientRules", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """The decision of one update, the same on all stages."""

    #: The norm of all gradients before clipping.
    norm: Tensor
    #: Whether the update is skipped.
    skips: bool = False


@dataclass(frozen=True)
class GradientRules:
    """How gradients are treated before an update.

    Args:
        order: the order in which norms are added up.
        max_norm: the largest norm of all gradients. Default: None (gradients are not clipped).
        norm_type: the order of the norm. Default: 2.
        scale: the scale of the loss; an update is skipped if a scaled gradient is infinite or NaN. Default: none.

    """

    order: ParameterOrder
    _: KW_ONLY
    max_norm: float | None = None
    norm_type: float = 2.0
    scale: LossScale | None = None

    def measure(self, parameters: Sequence[nn.Parameter]) -> GradientNorms:
        """NORM: unscale and measure the gradients of a stage."""
        if self.scale is None:
            return GradientNorms.of(parameters, self.order, self.norm_type)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        peaks = [norm_of(grad, math.inf) for grad in grads]
        overflowed = ~torch.stack([peak.to(peaks[0].device) for peak in peaks]).isfinite().all() if peaks else None
        self.scale.unscale_(grads)
        return GradientNorms.of(parameters, self.order, self.norm_type)._replace(overflowed=overflowed)

    def decide(self, parts: Sequence[GradientNorms]) -> Verdict:
        """Decide on an update from the measurements of all stages. With a scale, waits for them on a GPU."""
        whole = GradientNorms.merged(parts)
        return Verdict(whole.total(self.norm_type), whole.overflowed is not None and bool(whole.overflowed))

    def prepare(self, parameters: Sequence[nn.Parameter], verdict: Verdict) -> None:
        """Clip the gradients of a stage before its update."""
        if self.max_norm is not None and not verdict.skips:
            clip_to_norm_(parameters, self.max_norm, verdict.norm)

    def loss_scale(self, device: torch.device) -> Tensor | None:
        """The gradient with which the backwards of a step start, on the device of the loss; None for 1."""
        return None if self.scale is None else self.scale.on(device)

    def finish(self, verdict: Verdict | None) -> None:
        """End a step."""
        if self.scale is not None and verdict is not None:
            self.scale.update(verdict.skips)
