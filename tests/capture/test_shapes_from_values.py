"""Functions between layers whose shapes or numbers of results depend on values: iteration, splits and slices."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipesched.errors import GraphError
from tests.support.odd_models import FLOATS, check

SEGMENTS = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4])
NEGATIVE = torch.tensor([1, 1, -1, 2, 3, -3, 1, 2])
NONE_FIRST = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0])

#: What code between layers counts in the values of an input, and these values.
COUNTED: dict[str, tuple[Callable[[Tensor], float], Tensor]] = {
    "list of unique": (lambda own: len(list(own.unique())), SEGMENTS),
    "enumerate": (lambda own: sum(number for number, _ in enumerate(own.unique(), 1)), SEGMENTS),
    "branch on each": (lambda own: sum(1.0 for one in own.unique() if one > 0), NEGATIVE),
    "rows of nonzero": (lambda own: sum(1.0 + int(row[0]) for row in (own > 0).nonzero()), NONE_FIRST),
    "masked": (lambda own: sum(1.0 for _ in own[own > 0]), NONE_FIRST),
    "split": (lambda own: len(torch.ones(12).split(int(own.sum()) + 1)), SEGMENTS),
    "chunk": (lambda own: len(own.unique().chunk(2)), SEGMENTS),
    "tensor_split": (lambda own: len(torch.arange(20).tensor_split(own.unique())), SEGMENTS),
    "shape": (lambda own: own.unique().shape[0], SEGMENTS),
    "fails for some": (lambda own: float(own.unique()[1]) if len(own.unique()) > 1 else 7.0, SEGMENTS),
}


class Counts(nn.Module):
    """A model that counts something before its layers, and uses the count after them."""

    def __init__(self, count: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.count = count
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        count = self.count(own)
        for layer in self.layers:
            x = layer(x).tanh()
        return x * (1 + count)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", COUNTED)
def test_the_number_of_results_of_a_function_is_that_of_the_micro_batch(kind: str, reverse: bool) -> None:
    count, own = COUNTED[kind]
    check(functools.partial(Counts, count), FLOATS, own.flip(0) if reverse else own)


def rounded(x: Tensor) -> Tensor:
    return (x[:, 0] * 8).round()


OF_LAYERS: dict[str, Callable[[Tensor], float]] = {
    "list": lambda x: len(list(rounded(x).unique())),
    "split": lambda x: len(x.split(int(rounded(x).abs().max()) + 1, dim=1)),
    "free": lambda x: len(list(torch.arange(int(rounded(x).abs().sum()) + 1))),
}


class CountsLater(Counts):
    """A model that counts something in the result of its first layer."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x).tanh()
        count = self.count(x)
        for layer in others:
            x = layer(x).tanh()
        return x * (1 + count)


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_a_number_of_results_that_depends_on_layers_is_refused(kind: str) -> None:
    with pytest.raises(GraphError, match="returned a different structure for this batch"):
        check(functools.partial(CountsLater, OF_LAYERS[kind]), FLOATS)


class Sliced(nn.Module):
    """A model whose code uses tensors as bounds of slices."""

    def __init__(self, cut: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.cut = cut
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 8, -1)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.cut(x, own).sum(1).expand(len(own), 8)


CUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "end": lambda x, own: x[:, : own.max() + 1],
    "start": lambda x, own: x[:, own.max() :],
    "step": lambda x, own: x[:, :: own.max() + 1],
    "rows": lambda x, own: x[: own.min() + 1].mean(0, keepdim=True),
    "value of the layer": lambda x, own: x[:, : own.max() + 1] * x[:, : own.max() + 1].numel(),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("kind", CUT)
def test_tensors_are_bounds_of_slices(kind: str, stages: int) -> None:
    check(functools.partial(Sliced, CUT[kind]), FLOATS, SEGMENTS, stages=stages)


def assigned(x: Tensor, own: Tensor) -> Tensor:
    x = x.clone()
    x[:, : own.max()] = 0.5
    return x


def test_an_assignment_to_a_slice_with_a_tensor_as_bound() -> None:
    check(functools.partial(Sliced, assigned), FLOATS, SEGMENTS)


class Bounded(nn.Linear):
    """A layer that takes a slice."""

    def forward(self, x: Tensor, where: slice) -> Tensor:
        mask = torch.zeros_like(x)
        mask[:, where] = 1
        return super().forward(x * mask)


class PassesSlices(nn.Module):
    """A model that passes its layers a slice, whose bound a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Bounded(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        where = slice((x > 0).sum().clamp(max=6))
        for layer in self.layers:
            x = layer(x, where).tanh()
        return x


def test_layers_take_slices_whose_bounds_other_layers_compute() -> None:
    check(PassesSlices, FLOATS)
