"""Methods that change weights or gradients are refused while a step runs, and the step is not affected."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import InputError
from pipesched.testing import reference_step
from tests.support.jobs import busy as jobs
from tests.support.jobs.busy import X, Y, model
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)

_PATIENCE_S = 30


def made(own: nn.Module, **options: Any) -> Pipeline:
    named: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "boundaries": [2], "seed": 1}
    return Pipeline(own, X[:2], loss_fn=functional.mse_loss, devices=["cpu"] * 2, **{**named, **options})


def check_step(pipe: Pipeline, own: nn.Module, plain: nn.Module) -> None:
    """Run a step, and compare it with a plain loop."""
    loss = pipe.step(X, target=Y)
    due = reference_step(plain, X, loss_fn=functional.mse_loss, target=Y, num_microbatches=4, seed=1)
    assert torch.equal(loss, due)
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("name", jobs.CHANGES)
def test_a_layer_cannot_change_the_weights_of_its_step(name: str) -> None:
    own, plain, errors = model(), model(), list[Exception]()
    with made(own) as pipe:
        own[2].call = lambda: jobs.tried(lambda: jobs.CHANGES[name](pipe), errors)
        check_step(pipe, own, plain)
    assert len(errors) == 4  # one for each micro-batch
    for error in errors:
        assert isinstance(error, InputError)
        assert f"{jobs.METHODS.get(name, name)}() must not be called while a step runs" in str(error)


@pytest.mark.parametrize("name", jobs.CHANGES)
def test_a_hook_of_a_gradient_cannot_change_them(name: str) -> None:
    own, plain, errors = model(), model(), list[Exception]()
    with made(own) as pipe:
        own[0].weight.register_hook(lambda grad: jobs.tried(lambda: jobs.CHANGES[name](pipe), errors))
        check_step(pipe, own, plain)
    assert errors
    assert all(isinstance(error, InputError) for error in errors)


@pytest.mark.parametrize("name", [*jobs.CHANGES, "load"])
def test_another_thread_cannot_change_them(name: str, tmp_path: Path) -> None:
    """The other thread calls the method while a layer waits for it."""
    own, plain = model(), model()
    inside, tried, errors = threading.Event(), threading.Event(), list[Exception]()

    def wait() -> None:
        inside.set()
        assert tried.wait(_PATIENCE_S)

    with made(own) as pipe:
        pipe.save(tmp_path / "saved")
        change = jobs.CHANGES.get(name, lambda pipe: pipe.load(tmp_path / "saved"))

        def call() -> None:
            assert inside.wait(_PATIENCE_S)
            jobs.tried(lambda: change(pipe), errors)
            tried.set()

        other = threading.Thread(target=call)
        other.start()
        own[2].call = wait
        check_step(pipe, own, plain)
        other.join(_PATIENCE_S)
    assert len(errors) == 1
    assert isinstance(errors[0], InputError)


@pytest.mark.parametrize("name", ["to", "load_state_dict"])
def test_between_asynchronous_steps_they_wait_for_the_steps(name: str) -> None:
    """Inside a step they are refused."""
    own, errors = model(), list[Exception]()
    with made(own, schedule="pipedream", optimizer=lambda params: torch.optim.SGD(params, lr=0.1)) as pipe:
        pipe.step(X, target=Y)
        state = copy.deepcopy(pipe.state_dict())
        own[2].call = lambda: jobs.tried(lambda: jobs.CHANGES[name](pipe), errors)
        pipe.step(X, target=Y)
        pipe.flush()
        assert errors
        assert all(isinstance(error, InputError) for error in errors)
        own[2].call = lambda: None
        pipe.step(X, target=Y)
        if name == "to":
            assert pipe.to(torch.float32) is pipe
        else:
            pipe.load_state_dict(state)
            assert all(torch.equal(value, pipe.state_dict()[key]) for key, value in state.items())


@pytest.mark.parametrize("name", jobs.CHANGES)
def test_changes_during_a_step_over_a_mesh_are_refused(ranks: Ranks, name: str) -> None:
    for errors, equal in ranks.run(2, jobs.changes_inside, name):
        assert equal
        assert all(error.startswith("InputError: ") and "while a step runs" in error for error in errors)
    assert any(errors for errors, _ in ranks.run(2, jobs.changes_inside, name))


def test_they_work_after_a_step_and_after_a_failed_step() -> None:
    own = model()
    with made(own) as pipe:
        pipe.step(X, target=Y)
        for change in jobs.CHANGES.values():
            change(pipe)
        own.float()

        def fails() -> None:
            raise ValueError("on purpose")

        own[2].call = fails
        with pytest.raises(ValueError, match="on purpose"):
            pipe.step(X, target=Y)
        for change in jobs.CHANGES.values():
            change(pipe)
