"""A small U-Net, an example for `pipesched graph examples/u_net.py:small --stages 4 -o layers.png`."""

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Downsample level by level, then upsample. On the way up, levels also use the features saved on the way down."""

    def __init__(self, levels: int = 4, width: int = 8) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = nn.Conv2d(widths[-1], widths[-1], 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(nn.Conv2d(2 * w, w, 3, padding=1) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = torch.relu(layer(x))
        x = torch.relu(self.middle(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = torch.relu(join(torch.cat([up(x), skips.pop()], 1)))
        return self.last(x)


def small() -> tuple[nn.Module, Tensor]:
    """Return the model and one micro-batch."""
    return UNet(), torch.randn(4, 3, 64, 64)
