"""Settings whose attributes cannot be read: no part of pipesched reads what the model does not read."""

import enum
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.odd_models import FLOATS, check


class Guarded:
    """A field of a dataclass raises when it is read."""

    width: int = 8
    span: int = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "span":
            raise RuntimeError("read span from the settings of one layer")
        return super().__getattribute__(name)


@dataclass
class NeverSet:
    """A field has no value."""

    width: int = 8
    late: Tensor = field(init=False)


@dataclass(frozen=True)
class Frozen:
    width: int = 8

    @property
    def span(self) -> int:
        raise NotImplementedError("each layer has its own span")


@dataclass(slots=True)
class Slots:
    width: int = 8
    late: int = field(init=False)


class Missing:
    """Reading an unknown attribute raises an error other than AttributeError."""

    def __init__(self, error: type[Exception]) -> None:
        self.width, self.error = 8, error

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["error"](name)


class Bare:
    """Has no ``__dict__``, and raises for every unknown attribute."""

    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = 8

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Lazy(Mapping[str, int]):
    """A mapping with a key whose value cannot be read."""

    width = 8

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("width", "span"))

    def __len__(self) -> int:
        return 2


class Kind(enum.Enum):
    SMALL = 8

    @property
    def width(self) -> int:
        return int(self.value)

    @property
    def span(self) -> int:
        raise RuntimeError("no span")


class Locked:
    """An object that cannot be copied."""

    def __init__(self) -> None:
        self.width, self.lock = 8, threading.Lock()


SETTINGS: dict[str, Callable[[], Any]] = {
    "guarded field": dataclass(Guarded),
    "field without a value": NeverSet,
    "frozen": Frozen,
    "slots": Slots,
    "RuntimeError": lambda: Missing(RuntimeError),
    "KeyError": lambda: Missing(KeyError),
    "NotImplementedError": lambda: Missing(NotImplementedError),
    "slots that raise": Bare,
    "mapping": Lazy,
    "enum": lambda: Kind.SMALL,
    "lock": Locked,
}


class Configured(nn.Module):
    """A block with settings. The model passes the settings to the block, or the block holds them."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings, self.linear = settings, nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor, settings: Any = None) -> Tensor:
        return self.linear(x).relu() * (settings or self.settings).width


class Passes(nn.Module):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings, self.blocks = settings, nn.ModuleList(Configured(settings) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, self.settings if number % 2 else None) / 8
        return x


@pytest.mark.one_in(4)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_layers_in_a_row(settings: Callable[[], Any]) -> None:
    check(lambda: nn.Sequential(*(Configured(settings()) for _ in range(4))), FLOATS, steps=1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_a_model_passes_to_its_layers(settings: Callable[[], Any]) -> None:
    check(lambda: Passes(settings()), FLOATS, steps=1)


class Returns(nn.Module):
    """A layer returns settings together with a tensor."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings, self.linear = settings, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.settings


class PassesOn(nn.Module):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returns(settings) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, settings = block(x)
            assert settings.width == FLOATS.shape[1]
        return x


@pytest.mark.one_in(6)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_layers_return(settings: Callable[[], Any]) -> None:
    check(lambda: PassesOn(settings()), FLOATS, steps=1)
