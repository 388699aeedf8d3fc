"""Loss scale: scales the gradient of the loss, and unscales parameter gradients, with torch's GradScaler."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipesched.errors import InputError

__all__ = ["LossScale"]


class LossScale:
    """The loss scale of a GradScaler. Every process has its own scaler, and all scalers have the same state.

    The scaler sees only a dummy parameter. The gradient of the dummy parameter is infinite if any gradient of the model
    was infinite or NaN. GradScaler's own rule therefore changes the scale in the same way in all processes.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._observe_on(torch.device("cpu"))

    def _observe_on(self, device: torch.device) -> None:
        """Put the dummy parameter on a device. The scaler copies its scale there, for which a CPU would not wait."""
        self._seen = nn.Parameter(torch.zeros((), device=device))
        self._observed = torch.optim.SGD([self._seen], lr=0.0)

    def on(self, device: torch.device) -> Tensor:
        """Return the scale as a 0-d tensor on a device."""
        if self._seen.device != device:
            self._observe_on(device)
        scale: Tensor = self.scaler.scale(torch.ones((), device=device))
        return scale

    @torch.no_grad()
    def unscale_(self, grads: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, as ``GradScaler.unscale_`` does. Raises InputError for float16 gradients."""
        inverses: dict[torch.device, Tensor] = {}
        for grad in grads:
            if grad.dtype == torch.float16:
                raise InputError(
                    "a scaler needs float32 or bfloat16 parameters, because unscaling float16 gradients loses their "
                    f"small values; a gradient of shape {list(grad.shape)} is float16; keep the "
                    f"parameters in float32, and call step() under torch.autocast"
                )
            if grad.device not in inverses:
                inverses[grad.device] = self.on(grad.device).double().reciprocal().float()
            grad.mul_(inverses[grad.device])

    def update(self, overflowed: bool) -> None:
        """Reduce the scale if a gradient was infinite or NaN. Increase it after enough steps without such gradients."""
        self._seen.grad = torch.full_like(self._seen, math.inf if overflowed else 0.0)
        self.scaler.unscale_(self._observed)
        self.scaler.update()
