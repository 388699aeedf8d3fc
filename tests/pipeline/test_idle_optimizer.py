"""An optimizer that holds none of the pipeline's parameters is noticed after the first step."""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from pipesched import Pipeline
from pipesched.pipeline import idle_optimizer
from tests.support.jobs import agreement as jobs
from tests.support.rank_processes import Ranks

MESSAGE = r"SGD\.step\(\) ran without any of the 4 parameters that this process trains"


def made(**options: Any) -> tuple[nn.Module, Pipeline, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    pipe = Pipeline(
        model,
        x[:2],
        loss_fn=nn.functional.mse_loss,
        devices=["cpu"] * 2,
        schedule="1f1b",
        num_microbatches=4,
        **options,
    )
    return model, pipe, x


def trained(pipe: Pipeline, x: torch.Tensor, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_an_optimizer_of_a_copy_is_noticed_once() -> None:
    model, pipe, x = made()
    optimizer = SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pipe:
        with pytest.warns(UserWarning, match=MESSAGE):
            trained(pipe, x, optimizer)
        with no_warning():
            trained(pipe, x, optimizer, 3)


def test_it_is_noticed_when_the_gradients_of_several_steps_are_added() -> None:
    model, pipe, x = made()
    optimizer = SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pipe:
        pipe.step(x, target=x)
        pipe.step(x, target=x)
        optimizer.step()
        with pytest.warns(UserWarning, match=MESSAGE):
            pipe.step(x, target=x)


def by_hand(model: nn.Module) -> Optimizer:
    """An optimizer of other tensors, such as copies in another dtype, that writes the model's weights afterwards."""
    copies = [parameter.detach().double().requires_grad_() for parameter in model.parameters()]

    class Copies(SGD):
        def step(self, closure: Any = None) -> None:
            for copied, parameter in zip(copies, model.parameters(), strict=True):
                copied.grad = None if parameter.grad is None else parameter.grad.double()
            super().step()
            for copied, parameter in zip(copies, model.parameters(), strict=True):
                parameter.data.copy_(copied)

    return Copies(copies, lr=0.1)


RIGHT: dict[str, Callable[[nn.Module, Pipeline], Optimizer]] = {
    "the pipeline's": lambda model, pipe: AdamW(pipe.parameters(), lr=0.1),
    "the model's": lambda model, pipe: SGD(model.parameters(), lr=0.1),
    "a learning rate of 0, as in a warm-up": lambda model, pipe: SGD(pipe.parameters(), lr=0.0),
    "a part of them": lambda model, pipe: SGD(model[2].parameters(), lr=0.1),
    "copies of the weights": lambda model, pipe: by_hand(model),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_optimizers_raise_no_warning(name: str) -> None:
    model, pipe, x = made()
    with pipe, no_warning():
        trained(pipe, x, RIGHT[name](model, pipe), 3)


def test_an_optimizer_of_another_model_beside_the_pipelines_raises_no_warning() -> None:
    _, pipe, x = made()
    other = nn.Linear(4, 4)
    own, second = SGD(pipe.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    with pipe, no_warning():
        for _ in range(3):
            pipe.step(x, target=x)
            other(x).sum().backward()
            for optimizer in (second, own):
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """The optimizers that the hook has got."""
    seen: list[Optimizer] = []
    note = idle_optimizer._note

    def noted(watch: Any, optimizer: Optimizer, *given: Any) -> None:
        seen.append(optimizer)
        note(watch, optimizer, *given)

    monkeypatch.setattr(idle_optimizer, "_note", noted)
    return seen


@pytest.mark.parametrize("kind", ["frozen", "optimizer="])
def test_a_pipeline_that_needs_no_optimizer_watches_none(kind: str, calls: list[Optimizer]) -> None:
    options = {} if kind == "frozen" else {"optimizer": lambda parameters: SGD(parameters, lr=0.1)}
    model, pipe, x = made(**options)
    if kind == "frozen":
        model.requires_grad_(False)
        x.requires_grad_()
    with pipe, no_warning():
        trained(pipe, x, SGD(nn.Linear(2, 2).parameters(), lr=0.1), 3)
    assert calls == []


def test_the_hook_is_removed_after_the_second_step(calls: list[Optimizer]) -> None:
    _, pipe, x = made()
    optimizer = SGD(pipe.parameters(), lr=0.1)
    with pipe:
        trained(pipe, x, optimizer, 1)
        optimizer.step()
        assert calls == [optimizer] * 2
        trained(pipe, x, optimizer, 2)
        assert calls == [optimizer] * 2


def test_the_hook_is_removed_with_the_pipeline(calls: list[Optimizer]) -> None:
    model, pipe, x = made()
    pipe.step(x, target=x)
    pipe.close()
    del pipe
    gc.collect()
    SGD(model.parameters(), lr=0.1).step()
    assert calls == []


@pytest.mark.timeout(60)
def test_every_rank_of_a_mesh_watches_its_own_optimizer(ranks: Ranks) -> None:
    """The rank in the middle has no parameters."""
    idle = ranks.run(3, jobs.steps_idle_optimizer, True)
    assert [len(warned) for warned in idle] == [1, 0, 1]
    assert "SGD.step() ran without any of the 2 parameters that this process trains" in idle[0][0]
    assert "SGD.step() ran without any of the 4 parameters that this process trains" in idle[2][0]
    assert ranks.run(3, jobs.steps_idle_optimizer, False) == [[]] * 3
