"""Checks of the memory of an accelerator, for a GPU and for simulated devices."""

import gc
from typing import Any

import torch
from torch import Tensor, nn

from pipesched import Pipeline

__all__ = ["check_offloading_frees_memory"]

_WIDTH, _LAYERS, _ROWS = 256, 12, 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(nn.functional.gelu(self.linear(x)))


def check_offloading_frees_memory(device: str) -> None:
    """Check that offloaded and recomputed layers take less memory, and give the same gradients."""
    module: Any = torch.get_device_module(torch.device(device))
    x = torch.randn(8 * _ROWS, _WIDTH, generator=torch.Generator().manual_seed(0))
    peaks, gradients = [], []
    for word in (None, "offload", "recompute"):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        words = {} if word is None else {str(layer): word for layer in range(_LAYERS)}
        with Pipeline(
            model, x[:_ROWS], loss_fn=nn.functional.mse_loss, devices=[device], schedule="gpipe", num_microbatches=8,
            checkpoint=words, seed=1,
        ) as pipe:  # fmt: skip
            for _ in range(2):
                torch.accelerator.synchronize(device)
                gc.collect()
                module.reset_peak_memory_stats(device)
                pipe.step(x, target=x)
                torch.accelerator.synchronize(device)
            peaks.append(module.max_memory_allocated(device))
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
        del model, pipe  # the next model must not share the device with this one
        gc.collect()
    assert all(torch.equal(one, other) for own in gradients[1:] for one, other in zip(gradients[0], own, strict=True))
    assert max(peaks[1:]) < 0.8 * peaks[0], peaks
