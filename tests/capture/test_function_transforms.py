"""Function transforms between layers, such as torch.vmap: trained like the reference loop, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import GraphError
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, Block, Blocks, check, made, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = pytest.mark.usefixtures("every_product_deferred")


class Transforming(Blocks):
    """Six blocks, with a function between each two. The weights are for functions that use weights."""

    between: Callable[["Transforming", int, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.Parameter(torch.randn(3, 8, 8) * 0.3)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("offsets", torch.randn(3, 8))

    def after(self, number: int, x: Tensor) -> Tensor:
        return type(self).between(self, number, x)


def with_code(between: Callable[[Any, int, Tensor], Tensor]) -> type[Transforming]:
    return type("Model", (Transforming,), {"between": between})


def rows(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum().tanh())(x)


def members(self: Any, number: int, x: Tensor) -> Tensor:
    if number != 2:
        return x
    return torch.vmap(lambda weight, offset: (x @ weight + offset).tanh())(self.members, self.offsets).mean(0)


def enclosed_weight(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * self.scale.tanh())(x) if number == 3 else x


def two_dims(self: Any, number: int, x: Tensor) -> Tensor:
    pairs = torch.vmap(torch.vmap(lambda one, other: one * other.sum().tanh(), in_dims=(None, 0)), in_dims=(0, None))(
        x, x
    )
    return pairs.sum(1)


def several(self: Any, number: int, x: Tensor) -> Tensor:
    """Two results reach one function, a result reaches another transform, and results are looked at."""
    sines, cosines = torch.vmap(torch.sin)(x), torch.vmap(torch.cos)(x)
    both = torch.vmap(lambda row: row * 2)(sines) + torch.vmap(torch.sigmoid)(x) * torch.vmap(lambda row: row * 3)(
        cosines
    )
    return both.view(-1, sines.shape[1])


def containers(self: Any, number: int, x: Tensor) -> Tensor:
    whole, parts = torch.vmap(lambda row: (row.sin(), {"first": row[0]}))(x)
    chunked = torch.vmap(lambda column: column * 2, in_dims=1, out_dims=1, chunk_size=3)(whole)
    return chunked + parts["first"][:, None]


def gradient(self: Any, number: int, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda given: given.sin().sum())(x)


def jacobians(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.jacrev(lambda row: row.sin() * row.sum()))(x).sum(1) if number == 3 else x


@pytest.mark.one_in(18)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    "between", [rows, members, enclosed_weight, two_dims, several, containers, gradient, jacobians]
)
def test_transforms_of_functions(between: Callable[[Any, int, Tensor], Tensor], stages: int) -> None:
    check(with_code(between), FLOATS, stages=stages, steps=1)


def test_a_cut_between_a_transform_and_the_layer_that_takes_its_result() -> None:
    check(with_code(rows), FLOATS, boundaries=["blocks.2", "blocks.4"], steps=1)


class Late(nn.Module):
    """A result that only the last layer takes, and one that the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        factor = torch.vmap(lambda row: row.sum().tanh())(scale)[:, None]
        for number, block in enumerate(self.blocks):
            x = block(x if number < 3 else x * factor)
        return torch.vmap(lambda row: row * 2)(x)


def test_a_transform_of_inputs_runs_where_its_result_is_used() -> None:
    check(Late, FLOATS, FLOATS.abs(), stages=4)


class Windows(nn.Module):
    """A mask that nested vmaps make from positions, as in libraries of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.embed(ids), torch.arange(ids.shape[1])
        near = torch.vmap(torch.vmap(lambda q, k: (q - k).abs() < 3, in_dims=(None, 0)), in_dims=(0, None))
        mask = near(at, at).float()
        for layer in self.layers:
            x = layer(mask @ x).tanh()
        return self.head(x).mean(1)


def test_a_mask_of_nested_vmaps() -> None:
    check(Windows, torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(0)), stages=4)


class Ensemble(nn.Module):
    """A container that calls one of its layers under vmap, so the container stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.members[0](x) + torch.vmap(self.members[1])(x)


class WithEnsemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.ensemble, self.last = nn.ModuleList([Block(), Block()]), Ensemble(), Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        return self.last(self.ensemble(x))


def test_a_module_that_calls_its_layers_in_a_transform_stays_whole() -> None:
    check(WithEnsemble, FLOATS)


def weights_of_several(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(lambda weight: x @ weight)(self.members).mean(0) * self.scale


def test_a_weight_of_several_transforms_gets_the_sum_of_its_gradients() -> None:
    own, plain = made(with_code(weights_of_several)).eval(), made(with_code(weights_of_several)).eval()
    for part in FLOATS.chunk(4):
        (square(plain(part), torch.zeros_like(part)) / 4).backward()
    with Pipeline(own, FLOATS[:2], devices=["cpu"] * 3, loss_fn=square, schedule="1f1b", num_microbatches=4) as pipe:
        pipe.step(FLOATS, target=torch.zeros_like(FLOATS))
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def a_layer(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(self.blocks[0])(x)


def a_draw(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(nn.functional.dropout, randomness="different")(x)


def a_read(self: Any, number: int, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row if x.sum() > 0 else -row)(x)


def a_change(self: Any, number: int, x: Tensor) -> Tensor:
    torch.vmap(lambda row: row.mul_(2))(x)
    return x


def a_function(self: Any, number: int, x: Tensor) -> Tensor:
    value, back = torch.func.vjp(torch.sin, x)
    return value + back(x)[0]


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (a_layer, r"the function under vmap calls layer 'blocks\.0'"),
        (a_draw, "the function under vmap calls dropout, which draws random numbers or adds a loss"),
        (a_read, "the function under vmap reads the values of a tensor with __bool__"),
        (a_change, "the function under vmap changes a tensor from outside with mul_"),
        (a_function, "the function under vjp can be called again later"),
    ],
)
def test_what_a_transform_between_layers_must_not_do(
    between: Callable[[Any, int, Tensor], Tensor], reason: str
) -> None:
    with pytest.raises(GraphError, match=f"only on functions of their arguments; {reason}; put this code"):
        Pipeline(made(with_code(between)), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square, schedule="1f1b")


class Within(nn.Module):
    """The remedy: the code is in a submodule that has no other layers."""

    def __init__(self, between: Callable[[Any, int, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList([nn.Linear(8, 8)]), between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, 0, self.blocks[0](x))


@pytest.mark.parametrize("between", [a_layer, a_read, a_function])
def test_code_with_a_function_transform_trains_inside_a_whole_layer(
    between: Callable[[Any, int, Tensor], Tensor],
) -> None:
    own, plain = (made(lambda: nn.ModuleList(Within(between) for _ in range(3))) for _ in range(2))

    class Model(nn.Module):
        def __init__(self, parts: nn.ModuleList) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    whole = [f"parts.{number}" for number in range(3)]
    options: Any = {"loss_fn": square, "schedule": "1f1b", "num_microbatches": 4, "whole_layers": whole}
    with Pipeline(Model(own), FLOATS[:2], devices=["cpu"] * 3, **options) as pipe:
        pipe.step(FLOATS, target=torch.zeros_like(FLOATS))
    for part in FLOATS.chunk(4):
        (square(Model(plain)(part), torch.zeros_like(part)) / 4).backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(own.parameters(), plain.parameters()))


def tangent(self: Any, number: int, x: Tensor) -> Tensor:
    value, other = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    return value + other


class Tangent(nn.Module):
    """A layer that differentiates in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return tangent(self, 0, self.inner(x))


class Tangents(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tangent() for _ in range(4))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("make", "place"), [(with_code(tangent), "the code between layers"), (Tangents, r"layer 'blocks\.0'")]
)
def test_forward_mode_runs_in_one_thread_only(make: Callable[[], nn.Module], place: str) -> None:
    check(make, FLOATS, stages=1)
    with pytest.raises(
        GraphError, match=f"{place} does so, and 2 ranks would run as threads; run each rank in its own"
    ):
        Pipeline(made(make), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square, schedule="1f1b")


class Dual(Blocks):
    """Dual numbers go through all layers, but stages do not exchange tangents."""

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(super().forward(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def test_dual_numbers_through_layers_are_an_error() -> None:
    with pytest.raises(GraphError, match="a stage may only differentiate through layers that it runs itself"):
        Pipeline(made(Dual), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square, schedule="1f1b")


def inner_gradient(self: Any, x: Tensor) -> Tensor:
    return x - 0.1 * torch.func.grad(lambda z: (z @ self.weight).tanh().pow(2).sum())(x)


def gradient_of_linear(self: Any, x: Tensor) -> Tensor:
    return x - 0.1 * torch.func.grad(lambda z: functional.linear(z, self.weight).tanh().sum())(x)


def gradient_of_convolution(self: Any, x: Tensor) -> Tensor:
    rows = x[:, :, None]
    return (rows - torch.func.grad(lambda z: functional.conv1d(z, self.weight[..., None]).tanh().sum())(rows))[..., 0]


def pulled_back(self: Any, x: Tensor) -> Tensor:
    value, back = torch.func.vjp(lambda z: (z @ self.weight).tanh(), x)
    return back(value)[0]


def jacobian(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda z: (z[None] @ self.weight).tanh()[0]))(x).sum(1)


def each_part(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda part: (part @ self.weight).tanh())(x.unflatten(0, (1, -1))).flatten(0, 1)


def inside_and_outside(self: Any, x: Tensor) -> Tensor:
    return inner_gradient(self, x @ self.weight)


def inner_gradient_step(self: Any, x: Tensor) -> Tensor:
    step = torch.func.grad(lambda weight: (x @ weight).tanh().sum())(self.weight)
    return x @ (self.weight - 0.1 * step)


def weight_of_functional_call(self: Any, x: Tensor) -> Tensor:
    def inner(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(self.inner, values, (x,)).tanh().sum()

    steps = torch.func.grad(inner)(dict(self.inner.named_parameters()))
    return x * steps["weight"].sum(0) + self.inner(x)


class Differentiating(nn.Module):
    """A layer that uses its weight in a function transform."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


TRANSFORMS_IN_A_LAYER = [
    inner_gradient,
    gradient_of_linear,
    gradient_of_convolution,
    pulled_back,
    jacobian,
    each_part,
    inside_and_outside,
    inner_gradient_step,
    weight_of_functional_call,
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("boundaries", [None, ("1", "2")], ids=["measured", "given"])
@pytest.mark.parametrize("how", TRANSFORMS_IN_A_LAYER)
def test_weights_in_transforms_inside_layers(
    how: Callable[[Any, Tensor], Tensor], boundaries: tuple[str, ...] | None
) -> None:
    check(lambda: nn.Sequential(*(Differentiating(how) for _ in range(3))), FLOATS, boundaries=boundaries)


def test_a_weight_in_forward_mode_inside_a_layer() -> None:
    def pushed(self: Any, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: (z @ self.weight).tanh(), (x,), (torch.ones_like(x),))[1]

    check(lambda: nn.Sequential(*(Differentiating(pushed) for _ in range(2))), FLOATS, stages=1)


def test_a_weight_that_later_micro_batches_use_in_a_transform() -> None:
    def as_the_batch_says(self: Any, x: Tensor) -> Tensor:
        return inner_gradient(self, x) if x[0, 0] > 0 else (x @ self.weight).tanh()

    check(lambda: nn.Sequential(*(Differentiating(as_the_batch_says) for _ in range(3))), FLOATS, boundaries=("1", "2"))
