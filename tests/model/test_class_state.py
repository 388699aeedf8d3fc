"""State that layers store on their class: it trains like the reference loop, to the bit, or an error names it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline, graph_of, profile
from pipesched.errors import GraphError
from pipesched.testing import reference_step
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, InBlocks, check, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = [pytest.mark.usefixtures("every_product_deferred"), pytest.mark.timeout(120)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)


class Counts(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x + self.inner(x) * Counts.calls


class Last(Layer):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) if Last.last is None else self.inner(x) + Last.last
        Last.last = y
        return y


class Listed(Layer):
    seen: list[float] = []  # noqa: RUF012  # the class shares it

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)
        return x + self.inner(x) * len(self.seen)


class InPlace(Layer):
    count = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.inner(x) * self.count.item()


class ByData(Layer):
    count = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += 1
        return x + self.inner(x) * self.count.item()


class FromInput(Layer):
    """Sets a value computed from its input, so two forwards on one sample set the same value."""

    largest = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.inner(x) * FromInput.largest
        FromInput.largest = x.detach().abs().max().item()
        return y


class InBase(Counts):
    """Its class has an attribute from its first forward on."""


def in_a_row(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(4)))


def held(kind: type) -> dict[str, Any]:
    """The attributes of a class and its bases, with copies of their contents."""
    own = {
        f"{base.__name__}.{name}": value
        for base in kind.__mro__
        if base.__module__ == __name__
        for name, value in vars(base).items()
        if not name.startswith("__")
    }
    return {
        name: value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
        for name, value in own.items()
    }


KINDS = {
    Counts: r"Counts\.calls",
    Last: r"Last\.last",
    Listed: r"Listed\.seen",
    InPlace: r"InPlace\.count",
    ByData: r"ByData\.count",
    FromInput: r"FromInput\.largest",
    InBase: r"InBase\.calls",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [InBlocks, in_a_row])
@pytest.mark.parametrize("kind", KINDS)
def test_state_on_a_class_of_several_layers_is_refused(kind: Any, make: Callable[[Any], nn.Module]) -> None:
    before = held(kind)
    message = rf"{KINDS[kind]}.* all 4 modules of class .* \(such as '(blocks\.)?0'\) are inside one .*whole_layers="
    with pytest.raises(GraphError, match=message):
        Pipeline(make(kind), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square)
    assert held(kind) == before


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [InBlocks, in_a_row])
@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_left_as_they_were(kind: Any, make: Callable[[Any], nn.Module]) -> None:
    before = held(kind)
    for look in (graph_of, profile):
        with suppress(GraphError):
            look(make(kind), FLOATS[:2])
        assert held(kind) == before


class OneCounts(nn.Module):
    """The only module of its class, with state on the class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.counts, self.last = nn.Linear(8, 8), nn.Sequential(Counts(), Counts()), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.counts(self.first(x)))


@pytest.mark.parametrize("make", [OneCounts, lambda: nn.Sequential(nn.Linear(8, 8), Group(), nn.Linear(8, 8))])
def test_state_on_a_class_of_one_layer_is_that_layers_own(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"loss_fn": square, "target": FLOATS, "num_microbatches": 4, "seed": 5}
    whole = {"whole_layers": ["counts"] if make is OneCounts else ["1"]}
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    monkeypatch.setattr(Counts, "calls", 0)
    due = reference_step(plain, FLOATS, **options, **whole)
    due_calls, Counts.calls = Counts.calls, 0
    del options["target"]
    with Pipeline(model, FLOATS[:2], devices=["cpu"] * 2, schedule="1f1b", **options, **whole) as pipe:
        assert Counts.calls == 0
        assert torch.equal(pipe.step(FLOATS, target=FLOATS), due)
    assert Counts.calls == due_calls == 8
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Counts(), Counts()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class CountsItself(nn.Module):
    """The model's own code stores state on the model's class."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        type(self).forwards += 1
        for block in self.blocks:
            x = block(x)
        return x * CountsItself.forwards


def test_one_module_is_one_layer() -> None:
    class Single(Counts):
        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return x * self.inner.weight.sum() * Single.calls

    with Pipeline(Single(), FLOATS[:2], devices=["cpu"], loss_fn=square) as pipe:
        pipe.step(FLOATS, target=FLOATS)
    assert Single.calls == pipe.num_microbatches


def test_state_on_the_class_of_a_container_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"CountsItself\.forwards.* only module of class .*'CountsItself'\) is inside one"
    ):
        Pipeline(CountsItself(), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square)
    assert CountsItself.forwards == 0


class Cached(Layer):
    """Makes a mask and a table of masks once, and sets a constant in every forward."""

    mask: Tensor | None = None
    masks: dict[int, Tensor] = {}  # noqa: RUF012
    scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if Cached.mask is None:
            Cached.mask = torch.ones(8, 8).tril()[0]
        type(self).scale = 1 / x.shape[-1] ** 0.5
        mask = self.masks.setdefault(x.shape[-1], torch.ones(x.shape[-1]))
        return self.inner(x) * Cached.mask.exp() * mask * self.scale


@pytest.mark.parametrize("make", [InBlocks, in_a_row])
def test_values_that_are_made_once_and_constants_may_be_on_a_class(make: Callable[[Any], nn.Module]) -> None:
    check(lambda: make(Cached), FLOATS)
