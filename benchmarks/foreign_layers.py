"""Layers of foreign code: modules that keep state, draw random numbers, change tensors in place, or look elsewhere."""

from contextvars import ContextVar
from typing import Any

import torch
from foreign_case import WIDTH, Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STRENGTH: ContextVar[float] = ContextVar("strength", default=1.0)


class OneLinear(nn.Module):
    """A module with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Recurrent(nn.GRU):
    """A GRU over the features of a row. Its backward uses a state that the forward kernel returns."""

    def __init__(self) -> None:
        super().__init__(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Run the GRU."""
        return super().forward(x.unsqueeze(-1))[0].sum(-1)


class InPlace(OneLinear):
    """Changes what its linear layer returned in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        y = self.linear(x)
        y.mul_(2)
        return y.sigmoid()


class InPlaceAct(OneLinear):
    """Applies an activation in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        y = self.linear(x)
        return torch.relu_(y) * torch.tanh(x)


class InnerGradient(OneLinear):
    """Moves its input along the gradient of an energy, which it takes by autograd.grad."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(point).tanh().square().sum(), point, create_graph=True)
        return x - 0.1 * slope


class Noisy(OneLinear):
    """Ends in a random activation."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.RReLU(0.1, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return self.act(self.linear(x))


class Dropped(OneLinear):
    """A linear layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return self.dropout(self.linear(x))


class OwnGenerator(OneLinear):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return self.linear(x * (1 + torch.rand(x.shape, generator=self.generator)))


class CountsCalls(OneLinear):
    """Grows with the number of its calls, which it keeps in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        self.calls += 1
        return self.linear(x) * (1 + 0.1 * self.calls)


class KeepsLast(OneLinear):
    """Adds the mean of its previous output, which it keeps in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        y = self.linear(x).tanh()
        if self.last is not None:
            y = y + self.last
        self.last = y.detach().mean(0)
        return y


class RunningMax(OneLinear):
    """Divides by the largest number so far, which it keeps in a buffer."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return self.linear(x / self.largest.clone())


class Normed(OneLinear):
    """A linear layer with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return self.norm(self.linear(x))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 8

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2 / 8


class OwnFunction(OneLinear):
    """Uses an autograd.Function of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return _Cube.apply(self.linear(x))  # type: ignore[no-untyped-call]


class ChecksItself(nn.Module):
    """Calls torch.utils.checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Shared(nn.Module):
    """A linear layer whose weight may belong to several layers, and may have a multiplier as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return nn.functional.linear(x, self.weight) * getattr(self.weight, "multiplier", 1.0)


class HasGain(OneLinear):
    """A linear layer with a number that other code may read and change."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return self.linear(x)


class ReadsContext(OneLinear):
    """Scales by a context variable, and makes a tensor on the default device."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        is_meta = torch.get_default_device().type == "meta"
        return self.linear(x) * STRENGTH.get() * (2 if is_meta else 1)


class Marks(OneLinear):
    """Sets an attribute on the tensor that it returns."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        y = self.linear(x)
        y.scale = 3.0  # type: ignore[attr-defined]
        return y


class ReadsMark(OneLinear):
    """Scales by the attribute of the tensor that it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return self.linear(x) * getattr(x, "scale", 1.0)


class MayPass(OneLinear):
    """Returns its input itself if the input has many rows, as that of the sample has."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        return x if len(x) > 30 else self.linear(x)


class MayFail(OneLinear):
    """Raises ValueError for infinite numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows."""
        if not bool(torch.isfinite(x.detach()).all()):
            raise ValueError("an infinite number")
        return self.linear(x)


class TimeFirst(nn.Module):
    """A GRU in torch's default layout: time, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run the GRU over time."""
        result: Tensor = self.gru(x)[0]
        return result
