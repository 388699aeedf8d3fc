"""Gradient rules: how the stages of a process treat gradients between the last backward and the update.

A NORM action unscales the gradients of a stage if the loss was scaled, and computes their norms. Each UPDATE gets the
norms of all stages, so that all stages agree on whether to skip the update, and clip by the same norm.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipesched.model.parameter_order import ParameterOrder
from pipesched.runtime.gradients.loss_scale import LossScale
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.plane_norms import PlaneNorms
from pipesched.tensors.gradient_norm import clip_to_norm_, norm_of

__all__ = ["GradientRules", "OnNonfinite", "Verdict"]


#: The reaction to a loss or a gradient that is infinite or NaN.
OnNonfinite = Literal["raise", "skip", "warn"]


@dataclass(frozen=True)
class Verdict:
    """The gradient norms of one update, and whether to skip the update; identical on all stages."""

    #: The norm of each gradient before clipping.
    norms: GradientNorms
    #: The norm of all gradients together, before clipping.
    norm: Tensor
    #: Whether the update is skipped.
    skips: bool = False
    #: A 0-d flag, set if the loss or a gradient is infinite or NaN; None if this is not checked.
    nonfinite: Tensor | None = None


@dataclass(frozen=True)
class GradientRules:
    """The rules for gradients before an update.

    Args:
        order: the order in which the norms of the parameters' gradients are combined.
        max_norm: the largest allowed norm of all gradients together. Default: None (gradients are not clipped).
        norm_type: the order of the norm. Default: 2.
        scale: the scale of the loss. An update is skipped if a scaled gradient is infinite or NaN. Default: None.
        on_nonfinite: the reaction to a loss or a gradient that is infinite or NaN. Default: None (not checked).
        lags: whether the check of a step is read in the next step, because reading it immediately would wait for GPUs.
        planes: combines norms over the planes. Default: None (no weights are divided over tensor groups).

    """

    order: ParameterOrder
    _: KW_ONLY
    max_norm: float | None = None
    norm_type: float = 2.0
    scale: LossScale | None = None
    on_nonfinite: OnNonfinite | None = None
    lags: bool = False
    planes: PlaneNorms | None = None

    def measure(self, parameters: Sequence[nn.Parameter], losses: Iterable[Tensor] = ()) -> GradientNorms:
        """Run a NORM: unscale a stage's gradients and compute their norms. Collective over a tensor group.

        ``losses`` are the micro-batches' losses, if the stage computes them.
        """
        nonfinite = self.unscale(parameters)
        if self.scale is None and self.on_nonfinite:
            nonfinite = _nonfinite([loss.detach() for loss in losses])
        own = [parameter for parameter in parameters if parameter.grad is not None]
        norms = GradientNorms.of(own, self.order, self.norm_type)._replace(nonfinite=nonfinite)
        norms = norms if norms.norms is None else norms.on(norms.norms.device)  # a loss may be on another device
        return norms if self.planes is None else self.planes.of(own, norms, self.norm_type)

    def unscale(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Unscale gradients if the loss was scaled. Returns whether any gradient was nonfinite; None if not checked."""
        if self.scale is None:
            return None
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        nonfinite = _nonfinite([norm_of(grad, math.inf) for grad in grads])
        self.scale.unscale_(grads)
        return nonfinite

    def decide(self, parts: Sequence[GradientNorms]) -> Verdict:
        """Decide from all stages' norms whether to skip an update. Waits for the GPU if skipping is possible."""
        norms = GradientNorms.merged(parts)
        norm = norms.total(self.norm_type)
        nonfinite = norms.nonfinite
        if self.on_nonfinite is not None:
            nonfinite = ~norm.isfinite() if nonfinite is None else nonfinite | ~norm.isfinite()
        may_skip = (
            self.scale is not None or self.on_nonfinite == "skip" or (self.on_nonfinite == "raise" and not self.lags)
        )
        skips = may_skip and nonfinite is not None and bool(nonfinite)
        return Verdict(norms, norm, skips, nonfinite)

    def prepare(self, parameters: Sequence[nn.Parameter], verdict: Verdict) -> None:
        """Clip the gradients of a stage before its update."""
        if self.max_norm is not None and not verdict.skips:
            clip_to_norm_(parameters, self.max_norm, verdict.norm)

    def loss_scale(self, device: torch.device) -> Tensor | None:
        """Return the gradient that starts each backward pass of a step, as a tensor on ``device``; None means 1."""
        return None if self.scale is None else self.scale.on(device)

    def finish(self, verdict: Verdict | None) -> None:
        """Adapt the scale of the loss at the end of a step."""
        if self.scale is not None and verdict is not None:
            self.scale.update(verdict.skips)

    @property
    def binds_all_ranks(self) -> bool:
        """Whether every rank of a mesh needs the Verdict on each update, even a rank without stages."""
        return self.scale is not None or self.on_nonfinite is not None


def _nonfinite(values: Sequence[Tensor]) -> Tensor | None:
    """Return a 0-d flag that is set if any value is infinite or NaN; None if there are no values."""
    here = [value.to(values[0].device) for value in values]
    return ~torch.stack(here).isfinite().all() if here else None
