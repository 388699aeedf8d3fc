"""Loss scale: multiplies the gradient of the loss, and divides the gradients of parameters, by torch's GradScaler."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipesched.errors import InputError

__all__ = ["LossScale"]


class LossScale:
    """The scale that a GradScaler keeps. Every process has a scaler of its own, with the same state.

    The scaler sees one parameter, whose gradient says whether any gradient of the model was infinite or NaN. So its own
    rule changes the scale, in all processes alike.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._seen = nn.Parameter(torch.zeros(()))
        self._observed = torch.optim.SGD([self._seen], lr=0.0)

    def on(self, device: torch.device) -> Tensor:
        """The scale, as a 0-d tensor on a device."""
        scale: Tensor = self.scaler.scale(torch.ones((), device=device))
        return scale

    @torch.no_grad()
    def unscale_(self, grads: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, as ``GradScaler.unscale_`` does. Raises InputError for float16 gradients."""
        inverses: dict[torch.device, Tensor] = {}
        for grad in grads:
            if grad.dtype == torch.float16:
                raise InputError(
                    f"a scaler needs parameters of float32 or bfloat16, because float16 gradients lose their small "
                    f"values when they are unscaled; a gradient of shape {list(grad.shape)} is float16; keep the "
                    f"parameters in float32, and call step() under torch.autocast"
                )
            if grad.device not in inverses:
                inverses[grad.device] = self.on(grad.device).double().reciprocal().float()
            grad.mul_(inverses[grad.device])

    def update(self, overflowed: bool) -> None:
        """Reduce the scale if a gradient was infinite or NaN; otherwise raise it after enough steps."""
        self._seen.grad = torch.full_like(self._seen, math.inf if overflowed else 0.0)
        self.scaler.unscale_(self._observed)
        self.scaler.update()
