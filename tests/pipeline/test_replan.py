"""Replanning: a running model goes on with another plan as if it had always had it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.errors import DeviceCountError, ExecutionError, InputError, PartitionError
from pipesched.pipeline import assembly
from pipesched.planning.plan import Plan
from pipesched.program.near_equal_parts import near_equal_parts
from pipesched.testing import reference_step
from tests.support import branching_models as zoo
from tests.support.async_replay import SEED, adam, batch, pipeline, sgd, transformer
from tests.support.models import ScaledLoss, assert_equal_bits, gradients, mixed_model
from tests.support.torch_versions import compiles_in_threads

pytestmark = [
    pytest.mark.usefixtures("every_product_deferred"),
    pytest.mark.filterwarnings("ignore:BatchNorm sees"),
]

X = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (11,), generator=torch.Generator().manual_seed(2))

FOUR: Any = {"num_microbatches": 4, "seed": 5}
#: Each step has another: (schedule, ranks, stages, checkpoint).
PLANS = [
    ("1f1b", 2, 2, "never"),
    ("interleaved-1f1b", 2, 4, "always"),
    ("gpipe", 1, 1, "never"),
    ("zb-v", 2, 4, "except_last"),
    ("1f1b", 4, 4, "never"),
    ("dualpipe-v", 2, 4, "never"),
]


def plans(made: Callable[..., Pipeline], kinds: list[tuple[str, int, int, Any]] = PLANS) -> list[Plan]:
    """Those of other pipelines."""
    found = []
    for schedule, num_ranks, num_stages, checkpoint in kinds:
        with made(devices=["cpu"] * num_ranks, schedule=schedule, num_stages=num_stages, checkpoint=checkpoint) as pipe:
            found.append(pipe.plan)
    return found


def row(model: nn.Module, **options: Any) -> Pipeline:
    choices = {"loss_fn": functional.cross_entropy, "seed": 5, "num_microbatches": 4, **options}
    return Pipeline(model, X[:3], **choices)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("own", [True, False])
def test_steps_under_changing_plans_are_the_plain_loops(optimizer: Callable, own: bool) -> None:
    """With an optimizer a stage, or with the user's own one: dropout, BatchNorm, a loss with weights."""
    expected, actual = (nn.ModuleList([mixed_model(), ScaledLoss()]) for _ in range(2))
    reference = optimizer(list(expected.parameters()))
    options = {"optimizer": optimizer} if own else {}
    changing = plans(lambda **kinds: row(mixed_model(), **kinds))
    with row(
        actual[0], loss_fn=actual[1], devices=["cpu"] * 4, plan=changing[0], num_microbatches=None, **options
    ) as pipe:
        whole = None if own else optimizer(list(pipe.parameters()))
        for step in range(2 * len(changing)):
            if step:
                done = pipe.replan(changing[step % len(changing)])
                assert pipe.plan.program == done.plan.program == changing[step % len(changing)].program
                assert str(done).startswith("moved: ")
            loss = pipe.step(X, target=Y)
            assert torch.equal(
                loss,
                reference_step(expected[0], X, target=Y, loss_fn=expected[1], num_microbatches=4, step=step, seed=5),
            )
            reference.step()
            reference.zero_grad()
            if whole is not None:
                whole.step()
                whole.zero_grad()
    assert_equal_bits(actual.state_dict(), expected.state_dict())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["tied", "loose", "repeated", "unet"])
def test_any_model_goes_on_with_another_plan(name: str) -> None:
    """Gradients that have come together before a change go on to come together; tied weights have one state."""
    expected, actual = zoo.made(name)[0], zoo.made(name)[0]
    changing = plans(
        lambda **kinds: zoo.pipeline(name, zoo.made(name)[0], **kinds),
        [PLANS[0], PLANS[2], PLANS[4], ("interleaved-1f1b", 2, 4, "always")],
    )
    args, kwargs, target = zoo.inputs_of(name, zoo.ROWS)
    with (
        zoo.pipeline(name, expected, devices=["cpu"] * 3) as plain,
        zoo.pipeline(name, actual, devices=["cpu"] * 4) as pipe,
    ):
        for plan in changing:
            assert torch.equal(pipe.step(*args, **kwargs, **target), plain.step(*args, **kwargs, **target))
            pipe.replan(plan)
            zoo.assert_equal(zoo.state(actual), zoo.state(expected))


@pytest.mark.exhaustive
def test_training_under_changing_plans_keeps_the_bits_with_autocast_and_short_batches() -> None:
    """Autocast, running statistics of whole mini-batches, short batches, and what a loop without a pipeline has."""
    expected, actual = mixed_model(), mixed_model()
    changing = plans(lambda **kinds: row(mixed_model(), **kinds))
    with (
        row(actual, devices=["cpu"] * 4, numerics=Numerics(batch_norm="mini-batch")) as pipe,
        torch.autocast("cpu", torch.bfloat16),
    ):
        for step, plan in enumerate(changing):
            rows = 11 - 4 * (step % 3)  # 11, 7 and 3: fewer than micro-batches
            choices = {"num_microbatches": 4, "step": step, "seed": 5, "batch_norm": "mini-batch"}
            loss = reference_step(expected, X[:rows], target=Y[:rows], loss_fn=functional.cross_entropy, **choices)
            assert torch.equal(pipe.step(X[:rows], target=Y[:rows]), loss)
            pipe.replan(plan)
    assert_equal_bits(gradients(actual), gradients(expected))
    assert_equal_bits(dict(actual.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_an_asynchronous_schedule_is_flushed_before_the_change(name: str) -> None:
    """And its optimizers' states go on, to a synchronous plan and back."""
    models = [transformer(), transformer()]
    choices: Any = {"loss_fn": functional.mse_loss, "num_microbatches": 3}
    synchronous = plans(lambda **kinds: Pipeline(transformer(), batch(0)[0][:2], **choices, **kinds), PLANS[:1])[0]
    with pipeline(models[0], name, 3) as pipe, pipeline(models[1], name, 3) as other:
        streaming = pipe.plan
        for step in range(4):
            assert torch.equal(*(one.step(batch(step)[0], target=batch(step)[1]) for one in (pipe, other)))
        pipe.replan(synchronous)
        other.close()
        states = {parameter: state for one in other.optimizers.values() for parameter, state in one.state.items()}
        loop = sgd(list(models[1].parameters()))
        loop.state.update(states)
        x, y = batch(4)
        loss = reference_step(
            models[1], x, target=y, loss_fn=functional.mse_loss, num_microbatches=3, step=4, seed=SEED
        )
        loop.step()
        assert torch.equal(pipe.step(x, target=y), loss)
        pipe.replan(streaming)
        assert_equal_bits(models[0].state_dict(), models[1].state_dict())
        assert pipe.step(x, target=y).isfinite()
        assert pipe.flush() is not None


def rates_of(*optimizers: torch.optim.Optimizer) -> dict[nn.Parameter, float]:
    return {p: group["lr"] for made in optimizers for group in made.param_groups for p in group["params"]}


def test_settings_and_schedulers_of_optimizers_are_kept() -> None:
    model = mixed_model()

    def cut_evenly(num_stages: int, **kinds: Any) -> Pipeline:
        ends = list(accumulate(near_equal_parts(len(model), num_stages)))
        return row(mixed_model(), num_stages=num_stages, boundaries=ends[:-1], **kinds)

    two, four = plans(cut_evenly, [PLANS[0], PLANS[4]])
    with row(model, devices=["cpu"] * 4, plan=two, num_microbatches=None, optimizer=sgd) as pipe:
        first, second = pipe.optimizers.values()
        scheduler = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)
        pipe.step(X, target=Y)
        scheduler.step()
        rates = rates_of(first, second)
        states = {p: made.state[p]["momentum_buffer"] for made in (first, second) for p in made.state}
        with pytest.warns(
            UserWarning, match=r"new optimizers, with the current settings, for stages \[2, 3\]; create schedulers"
        ):
            pipe.replan(four)
        assert rates_of(*pipe.optimizers.values()) == rates
        assert len(first.param_groups) == 1
        assert len(second.param_groups) == 2  # some of the first stage's came to it
        pipe.replan(two)
        assert pipe.optimizers == {0: first, 1: second}
        assert rates_of(first, second) == rates
        assert all(made.state[p]["momentum_buffer"] is states[p] for made in (first, second) for p in made.state)
        assert len(states) == sum(len(made.state) for made in (first, second))
        scheduler.step()
        assert second.param_groups[0]["lr"] == 0.00125


def broken(params: list[Any]) -> torch.optim.Optimizer:
    raise OSError("no optimizer today")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("why", ["the optimizer", "the layers", "the plan", "the devices"])
def test_a_plan_that_fails_leaves_the_old_one_running(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, actual = mixed_model(), mixed_model()
    two, four, five = plans(lambda **kinds: row(mixed_model(), **kinds), [PLANS[0], PLANS[4], ("1f1b", 5, 5, "never")])
    failing: dict[str, Any] = {
        "the optimizer": (OSError, "no optimizer today", four),
        "the layers": (RuntimeError, "no room", four),
        "the plan": (PartitionError, "is in no stage of the plan", replace(four, stages=four.stages[:3])),
        "the devices": (DeviceCountError, "5 ranks, but the pipeline has 4 devices", five),
    }
    kind, match, plan = failing[why]
    made = iter([sgd, sgd, broken])

    def optimizer(params: list[Any]) -> torch.optim.Optimizer:
        return next(made, sgd)(params)

    choices: Any = {"plan": two, "num_microbatches": None, "optimizer": optimizer}
    reference, threads = sgd(list(expected.parameters())), threading.active_count()
    with row(actual, devices=["cpu"] * 4, **choices) as pipe:
        running = threading.active_count()
        for step in range(3):
            loss = reference_step(expected, X, target=Y, loss_fn=functional.cross_entropy, **FOUR, step=step)
            reference.step()
            reference.zero_grad()
            assert torch.equal(pipe.step(X, target=Y), loss)
            if step == 1:
                if why == "the layers":
                    calls, real = iter(range(5)), assembly.put_on
                    monkeypatch.setattr(assembly, "put_on", lambda *own: full() if next(calls, 9) == 3 else real(*own))
                before = pipe.optimizers, repr(pipe), pipe.trace
                with pytest.raises(kind, match=match):
                    pipe.replan(plan)
                assert (pipe.optimizers, repr(pipe), pipe.trace) == before
                assert threading.active_count() == running
    assert_equal_bits(actual.state_dict(), expected.state_dict())
    assert threading.active_count() == threads
    with pytest.raises(ExecutionError, match="closed before replan"):
        pipe.replan(two)


def full() -> None:
    raise RuntimeError("no room")


def test_a_filled_model_is_not_filled_again() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4))
    with row(model, devices=["cpu"] * 4, num_stages=2) as pipe:
        plan = pipe.plan
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        pipe.replan(replace(plan, stages=(("0",), ("1", "2", "3", "4"))))
        assert pipe.boundaries == ["1"]
        assert model[0].weight.eq(0.5).all()
        assert pipe.step(X, target=Y).isfinite()


@compiles_in_threads
def test_layers_go_on_compiled() -> None:
    expected, actual = zoo.made("residual")[0], zoo.made("residual")[0]
    changing = plans(lambda **kinds: zoo.pipeline("residual", zoo.made("residual")[0], **kinds), [PLANS[4], PLANS[0]])
    args, _, target = zoo.inputs_of("residual", zoo.ROWS)
    compiled = zoo.pipeline("residual", actual, devices=["cpu"] * 4, compile={"backend": "eager"})
    with zoo.pipeline("residual", expected, devices=["cpu"]) as plain, compiled as pipe:
        for plan in changing:
            assert torch.allclose(pipe.step(*args, **target), plain.step(*args, **target))
            pipe.replan(plan)


def test_what_cannot_be_moved_is_refused() -> None:
    with (
        row(mixed_model(), devices=["cpu"] * 2, wrap=lambda module, stage: module) as pipe,
        pytest.raises(InputError, match="wrap=, because wrap= has changed each stage as a whole"),
    ):
        pipe.replan(pipe.plan)
    with row(mixed_model(), devices=["cpu"] * 2) as pipe:
        with pytest.raises(PartitionError, match="plan= must be a Plan"):
            pipe.replan("plan.json")
        for wrong in (-1, 2.5, True):
            with pytest.raises(InputError, match="steps_left must be the number of"):
                pipe.replan(steps_left=wrong)
