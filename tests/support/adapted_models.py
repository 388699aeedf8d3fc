"""Models with LoRA adapters: frozen layers, and small layers that are trained."""

from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two small trainable matrices (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.drop = nn.Linear(base.in_features, rank, bias=False), nn.Dropout(0.1)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x)))


def adapt(model: nn.Module, every: int = 2) -> nn.Module:
    """Freeze a model, and add adapters to every second linear layer."""
    model.requires_grad_(False)
    linears = [(module, name) for module in model.modules() for name in module._modules if _is_linear(module, name)]
    for module, name in linears[1::every]:
        setattr(module, name, Adapted(getattr(module, name)))
    return model


def _is_linear(module: nn.Module, name: str) -> bool:
    return type(getattr(module, name)) is nn.Linear and not isinstance(module, nn.MultiheadAttention)
