"""Code whose backward is one unit is found while it runs, however a Function's forward is written."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from pipesched.tensors.backward_regions import Region, RegionFinder

X = torch.ones(2, requires_grad=True)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that says nothing about the function that it wraps."""

    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def ask(found: list[Region | None], x: Tensor) -> Tensor:
    found.append(RegionFinder().outermost())
    return x * 2


def forward(ctx: Any, found: list[Region | None], x: Tensor) -> Tensor:
    return ask(found, x)


class Leaf(list[Region | None]):
    """A list that torch passes on as it is."""


class Called:
    def __call__(self, ctx: Any, found: list[Region | None], x: Tensor) -> Tensor:
        return ask(found, x)


class Plain(Function):
    @staticmethod
    def forward(ctx: Any, found: list[Region | None], x: Tensor) -> Tensor:
        return ask(found, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad * 2


class Inherited(Plain):
    pass


class WithoutContext(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(found: list[Region | None], x: Tensor) -> Tensor:
        return ask(found, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad * 2


class OfClass(Plain):
    @classmethod
    def forward(cls, ctx: Any, found: list[Region | None], x: Tensor) -> Tensor:  # type: ignore[override]
        return ask(found, x)


def made(decorated: Callable[..., Any]) -> type[Function]:
    return type("Made", (Plain,), {"forward": staticmethod(decorated)})


FUNCTIONS = {
    "plain": Plain,
    "inherited": Inherited,
    "without a context": WithoutContext,
    "a class method": OfClass,
    "made by a call": made(forward),
    "mixed precision": made(torch.amp.custom_fwd(forward, device_type="cpu")),
    "decorated": made(named(forward)),
    "decorated twice": made(logged(named(forward))),
    "decorated without a name": made(logged(forward)),
    "a partial function": made(partial(partial(forward))),
    "a lambda": made(lambda ctx, found, x: ask(found, x)),
    "an object": made(Called()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_of_a_function_is_found(name: str) -> None:
    found: list[Region | None] = []
    for _ in range(2):
        FUNCTIONS[name].apply(found, X)
    first, second = found
    assert first is not None
    assert second is not None
    assert first.of_function
    assert first.frame is not second.frame, "each call is a region of its own"


def test_forward_of_a_function_is_found_inside_vmap() -> None:
    found = Leaf()
    torch.vmap(lambda x: WithoutContext.apply(found, x))(X)
    assert found[0] is not None
    assert found[0].of_function


def test_other_functions_with_the_same_decorator_are_no_regions() -> None:
    found: list[Region | None] = []
    assert made(logged(forward)) is not None
    logged(ask)(found, X)
    named(ask)(found, X)
    ask(found, X)
    assert found == [None] * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_code_is_a_region_but_no_function(use_reentrant: bool) -> None:
    found: list[Region | None] = []
    checkpoint(partial(ask, found), X, use_reentrant=use_reentrant)
    assert found[0] is not None
    assert not found[0].of_function


def test_outermost_region_counts() -> None:
    found: list[Region | None] = []

    class Outer(Plain):
        @staticmethod
        def forward(ctx: Any, found: list[Region | None], x: Tensor) -> Tensor:
            with torch.enable_grad():
                checkpoint(partial(ask, found), x.detach().requires_grad_(), use_reentrant=False)
            return Plain.apply(found, ask(found, x))

    Outer.apply(found, X)
    checkpoint(partial(Plain.apply, found), X, use_reentrant=False)
    inside, own, nested, checkpointed = found
    assert inside == own == nested
    assert own is not None
    assert own.of_function
    assert checkpointed is not None
    assert not checkpointed.of_function


def test_a_class_made_after_its_code_ran_is_found() -> None:
    finder = RegionFinder()
    found: list[Region | None] = []

    def later(ctx: Any, x: Tensor) -> Tensor:
        found.append(finder.outermost())
        return x * 2

    later(None, X)
    for decorated in (later, logged(later)):
        type("Made", (Function,), {"forward": staticmethod(decorated)}).apply(X)
    later(None, X)
    before, first, second, _ = found
    assert before is None
    assert first is not None
    assert second is not None
    assert first.of_function
    assert second.of_function
