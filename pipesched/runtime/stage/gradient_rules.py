"""Gradient rules: how the stages of a process treat gradients between the last backward and the update.

A NORM measures the gradients of a stage, and unscales them if the loss was scaled. Each UPDATE gets the measurements of
all stages, so that all decide alike whether to skip the update, and clip by the same norm.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor, nn

from pipesched.model.parameter_order import ParameterOrder
from pipesched.runtime.stage.gradient_norms import GradientNorms
from pipesched.tensors.gradient_norm import clip_to_norm_

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

    """

    order: ParameterOrder
    _: KW_ONLY
    max_norm: float | None = None
    norm_type: float = 2.0

    def measure(self, parameters: Sequence[nn.Parameter]) -> GradientNorms:
        """NORM: measure the gradients of a stage."""
        return GradientNorms.of(parameters, self.order, self.norm_type)

    def decide(self, parts: Sequence[GradientNorms]) -> Verdict:
        """Decide on an update from the measurements of all stages."""
        return Verdict(GradientNorms.merged(parts).total(self.norm_type))

    def prepare(self, parameters: Sequence[nn.Parameter], verdict: Verdict) -> None:
        """Clip the gradients of a stage before its update."""
        if self.max_norm is not None:
            clip_to_norm_(parameters, self.max_norm, verdict.norm)
