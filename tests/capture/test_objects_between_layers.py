"""Objects that layers take and return: tensors and plain values in objects of users' classes, and objects that stay."""

import collections
import datetime
import enum
import functools
import pathlib
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import GraphError
from pipesched.tensors.tree_structure import Pattern, map_tensors
from tests.support.odd_models import FLOATS, check, made, square

LENGTHS = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])


class Plain:
    def __init__(self, tensors: Any, mask: Any) -> None:
        self.tensors, self.mask = tensors, mask


class Slotted:
    __slots__ = ("__mask", "tensors")

    def __init__(self, tensors: Any, mask: Any) -> None:
        self.tensors = tensors
        self.__mask = mask

    @property
    def mask(self) -> Any:
        return self.__mask


class Wrapped(collections.UserDict[str, Any]):
    def __init__(self, tensors: Any, mask: Any) -> None:
        super().__init__(tensors=tensors, nested=[Plain(None, mask)])

    @property
    def tensors(self) -> Any:
        return self["tensors"]

    @property
    def mask(self) -> Any:
        return self["nested"][0].mask


class Entries(dict[str, Any]):
    def __init__(self, tensors: Any, mask: Any) -> None:
        super().__init__(tensors=tensors)
        self.mask = mask

    @property
    def tensors(self) -> Any:
        return self["tensors"]


def named(tensors: Any, mask: Any) -> Any:
    return types.SimpleNamespace(tensors=tensors, mask=mask)


class Linked(Plain):
    """An object that refers to itself through another object."""

    def __init__(self, tensors: Any, mask: Any) -> None:
        super().__init__(tensors, mask)
        self.other = Plain(self, None)


KINDS = [Plain, Slotted, Wrapped, Entries, named]


class Backbone(nn.Module):
    """A layer that takes an object, and returns a new object with the mask of the other."""

    def __init__(self, kind: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind

    def forward(self, nested: Any) -> Any:
        return self.kind(self.inner(nested.tensors).tanh(), nested.mask)


class Masked(nn.Module):
    """Layers that exchange objects with a tensor and a mask, followed by layers that take both."""

    def __init__(self, kind: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.backbone = nn.ModuleList(Backbone(kind) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(8)[None] < lengths[:, None]).float()
        nested = self.kind(x, mask)
        for block in self.backbone:
            nested = block(nested)
        x, mask = nested.tensors, nested.mask
        for layer in self.layers:
            x = layer(x).tanh() * mask
        return x


@pytest.mark.one_in(6)
@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_exchange_objects_with_tensors(kind: Callable[[Any, Any], Any], stages: int) -> None:
    check(functools.partial(Masked, kind), FLOATS, LENGTHS, stages=stages)
    check(functools.partial(Masked, kind), FLOATS, LENGTHS, stages=stages, checkpoint="always", schedules=["1f1b"])


class Colour(enum.Enum):
    RED, GREEN, BLUE = 1, 2, 3


def with_arrays(value: int) -> Any:
    return {"deep": [np.arange(value)]}


def counted_in(value: int) -> Any:
    return collections.Counter(a=value)


#: What a layer returns, and how code between layers uses it.
RETURNED: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "np.int64": (np.int64, float),
    "np.float32": (np.float32, float),
    "enum": (lambda n: list(Colour)[n % 3], lambda v: float(v.value)),
    "Decimal": (Decimal, float),
    "Fraction": (lambda n: Fraction(n, 3), float),
    "timedelta": (datetime.timedelta, lambda v: float(v.days)),
    "Path": (lambda n: pathlib.Path(str(n)), lambda v: float(str(v))),
    "dtype": (lambda n: torch.float32 if n > 4 else torch.float64, lambda v: 2.0 if v is torch.float32 else 1.0),
    "class": (lambda n: int if n > 4 else float, lambda v: 2.0 if v is int else 1.0),
    "array": (lambda n: np.array([n]), lambda v: float(v[0])),
    "plain object": (lambda n: Plain(n, None), lambda v: float(v.tensors)),
    "slots": (lambda n: Slotted(n, "a"), lambda v: float(v.tensors)),
    "UserDict": (lambda n: collections.UserDict(n=n), lambda v: float(v["n"])),
    "Counter": (counted_in, lambda v: float(v["a"])),
    "SimpleNamespace": (lambda n: types.SimpleNamespace(n=n), lambda v: float(v.n)),
    "slice": (slice, lambda v: float(v.stop)),
    "set": (lambda n: {n}, lambda v: float(next(iter(v)))),
}


class Reporting(nn.Module):
    """A layer that also returns a plain value computed from its input."""

    def __init__(self, wrap: Callable[[int], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Linear(8, 8), wrap

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
        return self.inner(x).tanh(), self.wrap(int(lengths.max()))


class Reported(nn.Module):
    """A model whose last stage uses what the first layer returned."""

    def __init__(self, wrap: Callable[[int], Any], use: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.use = Reporting(wrap), use
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x, value = self.first(x, lengths)
        for layer in self.layers:
            x = layer(x)
        return x * self.use(value)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", RETURNED)
def test_plain_values_that_a_layer_returns_are_those_of_the_batch(kind: str) -> None:
    check(functools.partial(Reported, *RETURNED[kind]), FLOATS, LENGTHS, schedules=["1f1b"])


def fails(call: Callable[[], Any]) -> str:
    with pytest.raises(GraphError) as caught:
        call()
    return str(caught.value)


UNSENT: dict[str, tuple[Callable[[int], Any], Callable[[Any], float], str]] = {
    "closure": (lambda n: lambda: n, lambda v: float(v()), "function"),
    "exception": (ValueError, lambda v: float(v.args[0]), "ValueError"),
    "module": (lambda n: nn.Dropout(n / 10), lambda v: v.p, "Dropout"),
    "array of objects": (lambda n: np.array([Plain(n, 0)]), lambda v: float(v[0].tensors), "ndarray"),
    "object that refers to itself": (lambda n: Linked(n, 0), lambda v: float(v.tensors), "Linked"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", UNSENT)
def test_an_object_that_cannot_be_sent_is_refused_by_class_and_the_remedy_works(kind: str) -> None:
    wrap, use, name = UNSENT[kind]
    message = fails(functools.partial(check, functools.partial(Reported, wrap, use), FLOATS, LENGTHS))
    assert f"first (stage 0) returned an object of class {name}" in message
    assert "return tensors and plain values in a tuple, a dict or a dataclass" in message
    check(functools.partial(Reported, lambda n: (n, "a"), lambda v: float(v[0])), FLOATS, LENGTHS, schedules=["1f1b"])


def test_an_object_that_is_the_same_each_time_is_kept() -> None:
    known = object()
    check(
        functools.partial(Reported, lambda n: (known, torch.tanh), lambda v: 2.0 if v[0] is known else 1.0),
        FLOATS,
        LENGTHS,
        schedules=["1f1b"],
    )


class Returning(nn.Module):
    """A layer that returns the object that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.inner(x).tanh(), state


class Passing(nn.Module):
    """A model whose layers pass an object on that code between layers made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning() for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        first = state = Plain(int(lengths.max()), [lengths])
        for layer in self.layers:
            x, state = layer(x, state)
        assert state is first
        return x * state.tensors * state.mask[0][:, None]


def test_an_object_that_layers_pass_on_stays_the_same_object() -> None:
    check(Passing, FLOATS, LENGTHS)


class Woven(Plain):
    """Contains objects that each refer to all earlier objects."""

    def __init__(self, tensors: Any, mask: Any) -> None:
        super().__init__(tensors, mask)
        self.others: list[Plain] = []
        for _ in range(30):
            self.others.append(Plain([*self.others], mask))


def test_objects_that_share_parts_are_taken_apart_once() -> None:
    check(functools.partial(Masked, Woven), FLOATS, LENGTHS, schedules=["1f1b"], steps=1)
    value = Woven(FLOATS, None)
    pattern = Pattern(value)
    copy = pattern.build(iter([FLOATS]))
    assert copy.others[1].tensors[0] is copy.others[0]
    assert copy.others[29].tensors[:29] == copy.others[:29]
    other = map_tensors(torch.neg, value)
    assert torch.equal(other.tensors, -FLOATS)
    assert map_tensors(lambda tensor: tensor, value) is value


class Gated(nn.Module):
    """A layer that multiplies its result by a gate, which it finds in an object."""

    def __init__(self, get: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.get = nn.Linear(8, 8), get

    def forward(self, x: Tensor, gate: Any) -> Tensor:
        return self.inner(x).tanh() * self.get(gate)


class Gates(nn.Module):
    """A model that passes a gate to its layers in an object, for rows that may be of other lengths than the sample."""

    def __init__(self, wrap: Callable[[Tensor], Any], get: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.gate, self.wrap = nn.Linear(8, 8), wrap
        self.layers = nn.ModuleList(Gated(get) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.wrap(self.gate(x).sigmoid())
        for layer in self.layers:
            x = layer(x, gate)
        return x.sum(1)


HELD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "object": (lambda gate: Plain([{"gate": gate}], 0), lambda own: own.tensors[0]["gate"]),
    "slots": (lambda gate: Slotted(gate, 0), lambda own: own.tensors),
    "UserDict": (lambda gate: collections.UserDict(gate=gate), lambda own: own["gate"]),
    "list of a subclass": (lambda gate: type("Own", (list,), {})([gate]), lambda own: own[0]),
    "set": (lambda gate: {gate}, lambda own: next(iter(own))),
    "closure": (lambda gate: lambda: gate, lambda own: own()),
    "partial": (lambda gate: functools.partial(torch.mul, gate), lambda own: own(1.0)),
    "exception": (ValueError, lambda own: own.args[0]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", HELD)
def test_layers_find_tensors_in_objects_on_batches_of_other_shapes(kind: str) -> None:
    plain, own = (made(functools.partial(Gates, *HELD[kind])) for _ in range(2))
    given: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "schedule": "1f1b"}
    with Pipeline(own, (torch.randn(2, 5, 8),), devices=["cpu"] * 3, **given) as pipe:
        for length in (5, 3, 7):
            x = torch.randn(8, length, 8, generator=torch.Generator().manual_seed(length))
            for model in (own, plain):
                model.zero_grad()
            loss = pipe.step(x, target=torch.zeros(8, 8))
            for part in x.chunk(4):
                (square(plain(part), torch.zeros(2, 8)) / 4).backward()
            torch.testing.assert_close(loss, square(plain(x), torch.zeros(8, 8)))
            for mine, other in zip(own.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)
