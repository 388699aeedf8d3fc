"""Master weights: bfloat16 parameters that an optimizer updates in float32, on any plan, and after a resume."""

import copy
import gc
import io
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipesched import Numerics, Pipeline, with_master_weights
from pipesched.errors import ArgumentError
from tests.support.jobs import clipping

ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [state["master"] for state in optimizer.state.values()]


@pytest.mark.parametrize("make", [ADAM, SGD, partial(torch.optim.SGD, lr=0.01)])
def test_a_step_is_one_of_a_float32_model_rounded(make: Any) -> None:
    torch.manual_seed(0)
    narrow = nn.Linear(6, 6).bfloat16()
    wide = copy.deepcopy(narrow).float()
    mine, theirs = with_master_weights(make(narrow.parameters())), make(wide.parameters())
    before = [parameter.data_ptr() for parameter in narrow.parameters()]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator).bfloat16()
            other.grad = one.grad.float()
        mine.step()
        theirs.step()
        for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
            assert torch.equal(one, other.bfloat16())
            assert one.grad.dtype == torch.bfloat16
            assert torch.equal(mine.state[one]["master"], other)
    assert [parameter.data_ptr() for parameter in narrow.parameters()] == before


def train(pipe: Pipeline, steps: range) -> None:
    for step in steps:
        x, y = clipping.batch(step)
        pipe.step(x, target=y)


def make(model: nn.Module, schedule: str = "1f1b") -> Pipeline:
    return Pipeline(
        model,
        clipping.batch(0)[0][:3],
        loss_fn=clipping.loss_fn,
        devices=["cpu"] * 2,
        schedule=schedule,
        num_microbatches=4,
        boundaries=[5] if schedule == "1f1b" else [3, 6, 9],
        optimizer=lambda params: with_master_weights(ADAM(params)),
        numerics=Numerics(clip_grad_norm=1.0),
        seed=5,
    )


def test_every_plan_and_the_loop_agree_and_a_resume_continues() -> None:
    models = [clipping.tied_model(torch.bfloat16) for _ in range(4)]
    optimizer = with_master_weights(ADAM(models[0].parameters()))
    for step in range(4):
        clipping.loop_step(models[0], optimizer, step, 2.0)
    for model, schedule in zip(models[1:3], ("1f1b", "zb-v"), strict=True):
        with make(model, schedule) as pipe:
            train(pipe, range(4))
    with make(models[3]) as pipe:
        train(pipe, range(2))
        saved = io.BytesIO()
        torch.save((models[3].state_dict(), {i: one.state_dict() for i, one in pipe.optimizers.items()}), saved)
    saved.seek(0)
    weights, states = torch.load(saved)
    again = clipping.tied_model(torch.bfloat16)
    again.load_state_dict(weights)
    with make(again) as pipe:
        for stage, own in pipe.optimizers.items():
            own.load_state_dict(states[stage])
            assert {one.dtype for one in masters(own)} == {torch.float32}
        pipe._running.step = 2
        train(pipe, range(2, 4))
    for model in (*models[1:3], again):
        for one, other in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(one, other)


def test_weights_that_are_loaded_replace_the_copies() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = with_master_weights(torch.optim.SGD([parameter], lr=0.001))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        parameter[1] = 5
    optimizer.step()
    assert optimizer.state[parameter]["master"].tolist() == pytest.approx([-0.002, 4.999, -0.002])


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="with_master_weights takes an optimizer"):
        with_master_weights(torch.optim.SGD)  # type: ignore[type-var]


class Failing(torch.optim.Optimizer):
    """Raises in a step after it has updated the first parameter."""

    def __init__(self, parameters: Any, *, counts: bool) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.counts, self.fails = counts, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if self.counts:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.01)
            if self.fails:
                raise ZeroDivisionError("planted")


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_step_that_fails_leaves_bfloat16_parameters_and_their_copies(counts: bool, failing: int) -> None:
    """Parameters that the failed step had updated stay updated, as in a float32 model."""
    torch.manual_seed(0)
    narrow = nn.Linear(6, 6).bfloat16()
    wide = copy.deepcopy(narrow).float()
    mine, theirs = (Failing(model.parameters(), counts=counts) for model in (narrow, wide))
    mine = with_master_weights(mine)
    scheduler = torch.optim.lr_scheduler.StepLR(mine, step_size=1)
    for step in range(failing + 2):
        for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            other.grad = one.grad.float()
        for optimizer in (mine, theirs):
            optimizer.fails = step == failing
            with pytest.raises(ZeroDivisionError, match="planted") if optimizer.fails else nullcontext():
                optimizer.step()
        for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
            assert one.dtype == one.grad.dtype == torch.bfloat16
            assert torch.equal(one, other.bfloat16())
        scheduler.step()
    assert all(map(torch.equal, masters(mine), wide.parameters()))


def test_a_step_that_fails_before_it_begins_leaves_an_empty_state() -> None:
    """Adam initialises only states that are empty."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = with_master_weights(ADAM([parameter]))
    fails = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert parameter.dtype == torch.bfloat16
    fails.remove()
    optimizer.step()
    assert optimizer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}


def test_an_optimizer_with_copies_is_freed_with_its_last_reference() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = with_master_weights(ADAM([parameter]))
    gone = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    gc.enable()
    assert gone() is None
