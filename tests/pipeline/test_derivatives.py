"""Derivatives through ``pipe(x)``: first ones as in PyTorch, all others refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pipesched import Pipeline
from pipesched.errors import ExecutionError, InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
X = torch.linspace(-1, 1, 32).reshape(8, 4)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def pipeline(layers: nn.Module, **options: Any) -> Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4, **options}
    return Pipeline(layers, X[:2], **given)


def slope(net: Callable[..., Any], *, create_graph: bool = False) -> Tensor:
    x = X.clone().requires_grad_()
    (made,) = torch.autograd.grad(net(x).sum(), x, create_graph=create_graph)
    return made


def penalty(net: Callable[..., Any]) -> None:
    slope(net, create_graph=True).square().sum().backward()


def through_backward(net: Callable[..., Any]) -> None:
    x = X.clone().requires_grad_()
    net(x).square().sum().backward(create_graph=True)


def hessian(net: Callable[..., Any]) -> None:
    torch.autograd.functional.hessian(lambda x: net(x).sum(), X)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("differentiate", [penalty, through_backward, hessian])
@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"checkpoint": "always"}], ids=str)
def test_second_derivatives_are_refused(differentiate: Callable[..., None], options: dict[str, Any]) -> None:
    with pipeline(model(), **options) as pipe, pytest.raises(ExecutionError, match="may be differentiated once"):
        differentiate(pipe)


def test_the_remedy_for_second_derivatives_works() -> None:
    """A critic whose gradient penalty the model computes, and whose other terms the pipeline computes."""
    ours, plain = model(), model()
    with pipeline(ours) as pipe:
        for net, rest in ((ours, pipe), (plain, plain)):
            penalty(net)
            rest(X).mean().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "chimera"])
@pytest.mark.parametrize("has_grads", [False, True])
def test_autograd_grad_leaves_the_gradients_of_weights_as_they_were(schedule: str, has_grads: bool) -> None:
    ours, plain = model(), model()
    with pipeline(ours, schedule=schedule) as pipe:
        for net, rest in ((pipe, ours), (plain, plain)):
            if has_grads:
                net(X).square().sum().backward()
            before = copy.deepcopy([one.grad for one in rest.parameters()])
            slope(net)
            after = [one.grad for one in rest.parameters()]
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        torch.testing.assert_close(slope(pipe), slope(plain))


def test_a_backward_for_inputs_alone_leaves_the_gradients_of_weights_as_they_were() -> None:
    ours, x = model(), X.clone().requires_grad_()
    with pipeline(ours) as pipe:
        pipe(x).sum().backward(inputs=[x])
    torch.testing.assert_close(x.grad, slope(model()))
    assert all(one.grad is None for one in ours.parameters())


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda net: torch.func.grad(lambda x: net(x).sum())(X),
        lambda net: torch.func.vmap(lambda x: net(x[None]))(X),
        lambda net: torch.func.jvp(net, (X,), (X,)),
        lambda net: torch.func.jacrev(net)(X),
    ],
    ids=["grad", "vmap", "jvp", "jacrev"],
)
def test_function_transforms_around_a_pipeline_are_refused(differentiate: Callable[..., Any]) -> None:
    with pipeline(model()) as pipe, pytest.raises(InputError, match="may not be called inside a function transform"):
        differentiate(pipe)


def test_tangents_of_forward_mode_are_refused() -> None:
    with pipeline(model()) as pipe, forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        with pytest.raises(InputError, match="an input has a tangent of forward mode"):
            pipe(dual)


def test_batched_gradients_are_refused() -> None:
    with pipeline(model()) as pipe:
        x = X.clone().requires_grad_()
        out = pipe(x)
        with pytest.raises(ExecutionError, match="is_grads_batched"):
            torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)
